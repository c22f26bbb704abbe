//! The address at which clients find the primary, whichever server that is.

use std::io;
use std::net::Ipv4Addr;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// As a virtual address does, it leads to one server, and whoever is connected when that changes is cut off.
#[derive(Debug)]
pub(super) struct Address {
    port: u16,
    leads: watch::Sender<Option<u16>>,
    task: JoinHandle<()>,
}

impl Address {
    /// In front of the server at port `server`.
    pub(super) async fn start(server: u16) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let port = listener.local_addr()?.port();
        let leads = watch::Sender::new(Some(server));
        let receiver = leads.subscribe();
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(receiver.clone(), client));
            }
        });
        Ok(Self { port, leads, task })
    }

    /// `postgres://postgres@127.0.0.1:PORT/postgres`
    pub(super) fn url(&self) -> String {
        url(self.port)
    }

    /// Nothing arrives any more, in either direction, and nobody is told.
    pub(super) fn swallow(&self) {
        self.leads.send_replace(None);
    }

    /// Everybody is cut off, and finds the server at this port from now on.
    pub(super) fn lead_to(&self, server: u16) {
        self.leads.send_replace(Some(server));
    }
}

impl Drop for Address {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// How a server at a port of this machine is reached.
pub(super) fn url(port: u16) -> String {
    format!("postgres://postgres@127.0.0.1:{port}/postgres")
}

async fn carry(mut leads: watch::Receiver<Option<u16>>, mut client: TcpStream) {
    let Ok(Some(server)) = leads.wait_for(Option::is_some).await.map(|server| *server) else { return };
    let Ok(mut upstream) = TcpStream::connect((Ipv4Addr::LOCALHOST, server)).await else { return };
    let _ = (client.set_nodelay(true), upstream.set_nodelay(true));
    tokio::select! {
        _ = copy_bidirectional(&mut client, &mut upstream) => {}
        _ = elsewhere(&mut leads, server) => {
            // Neither side learns of it while it leads nowhere.
            let _ = leads.wait_for(Option::is_some).await.map(drop);
        }
    }
}

/// Waits until it does not lead to `server` any more.
async fn elsewhere(leads: &mut watch::Receiver<Option<u16>>, server: u16) {
    // It fails only when nobody can change it any more.
    let _ = leads.wait_for(|now| *now != Some(server)).await.map(drop);
}
