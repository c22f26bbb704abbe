//! A server that is slow to accept, or hangs.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;

use crate::{Ended, Harm, Proxy};

/// Stands for a server that is slow to accept a connection, and may hang.
#[derive(Debug, Default)]
pub struct Sluggish {
    accepting: Duration,
    hangs: AtomicBool,
}

impl Sluggish {
    /// Makes each connection usable only this long after it was made.
    #[must_use]
    pub fn new(accepting: Duration) -> Self {
        Self { accepting, hangs: AtomicBool::new(false) }
    }
}

impl Proxy<Sluggish> {
    /// Ends all connections, and accepts new ones without answering them.
    pub fn hang(&self) {
        self.hangs.store(true, Ordering::SeqCst);
        self.end_all(Ended::Closed);
    }

    /// Answers new connections again; those made meanwhile stay unanswered.
    pub fn recover(&self) {
        self.hangs.store(false, Ordering::SeqCst);
    }
}

impl Harm for Sluggish {
    async fn reach(&self) {
        tokio::time::sleep(self.accepting).await;
    }

    async fn carry(&self, client: &mut TcpStream, server: &mut TcpStream) -> io::Result<Ended> {
        if self.hangs.load(Ordering::SeqCst) {
            // It reads without answering until the client gives up.
            let mut ignored = [0; 1024];
            while client.read(&mut ignored).await? > 0 {}
            return Ok(Ended::Closed);
        }
        tokio::io::copy_bidirectional(client, server).await?;
        Ok(Ended::Closed)
    }
}
