//! A network that is cut in two.

use std::io;

use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::{Ended, Harm, Proxy};

/// A network that can be cut in two. While it is cut, neither side receives bytes or learns that a connection has ended.
#[derive(Debug, Default)]
pub struct Partition(watch::Sender<bool>);

impl Proxy<Partition> {
    /// Cuts the network. New clients can connect, and receive nothing.
    pub fn cut(&self) {
        self.0.send_replace(true);
    }

    /// Redirects the address to the server at this port, as a virtual IP does. Connected clients are cut off.
    pub fn fail_over(&self, port: u16) {
        self.lead_to(port);
        self.end_all(Ended::Closed);
        self.0.send_replace(false);
    }
}

impl Partition {
    async fn wait_for(&self, is_cut: bool) {
        // It fails only if the sender is dropped, and this value owns the sender.
        let _ = self.0.subscribe().wait_for(|now| *now == is_cut).await.map(drop);
    }
}

impl Harm for Partition {
    async fn reach(&self) {
        self.wait_for(false).await;
    }

    async fn carry(&self, client: &mut TcpStream, server: &mut TcpStream) -> io::Result<Ended> {
        tokio::select! {
            // First, so that clients do not see a server's end through a cut.
            biased;
            () = self.wait_for(true) => self.wait_for(false).await,
            carried = copy_bidirectional(client, server) => {
                carried?;
            }
        }
        Ok(Ended::Closed)
    }
}

#[cfg(test)]
mod tests;
