//! A network with bad weather.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::watch;

use crate::{Ended, Harm};

/// The fate of traffic at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weather {
    /// Everything arrives.
    Clear,
    /// Everything arrives, but this much later.
    Delay(Duration),
    /// Connections are reset as soon as they are used.
    Reset,
    /// Nothing arrives until the weather changes.
    BlackHole,
    /// A client gets this many bytes of its answer, and then a reset.
    CutAfter(usize),
    /// Requests are delivered, and their answers are lost with the connection.
    DropAnswer,
    /// Requests are delivered, and the client sees the end of the stream.
    HalfClose,
}

/// A network whose weather affects all connections.
#[derive(Debug)]
pub struct Network {
    weather: watch::Sender<Weather>,
    /// Connections or answers that came to harm.
    harmed: AtomicU64,
}

impl Default for Network {
    fn default() -> Self {
        Self { weather: watch::Sender::new(Weather::Clear), harmed: AtomicU64::new(0) }
    }
}

impl Network {
    /// From now on.
    pub fn weather(&self, weather: Weather) {
        self.weather.send_replace(weather);
    }

    /// How often something came to harm.
    #[must_use]
    pub fn harmed(&self) -> u64 {
        self.harmed.load(Ordering::SeqCst)
    }

    /// The weather, once it is one in which anything arrives.
    async fn settled_weather(&self) -> Weather {
        let mut weather = self.weather.subscribe();
        if *weather.borrow() == Weather::BlackHole {
            self.harm();
        }
        match weather.wait_for(|weather| *weather != Weather::BlackHole).await {
            Ok(weather) => *weather,
            Err(_) => Weather::Clear,
        }
    }

    fn harm(&self) {
        self.harmed.fetch_add(1, Ordering::SeqCst);
    }
}

impl Harm for Network {
    async fn carry(&self, client: &mut TcpStream, server: &mut TcpStream) -> io::Result<Ended> {
        let ((from_client, to_client), (from_server, to_server)) = (client.split(), server.split());
        tokio::select! {
            ended = requests(self, from_client, to_server) => ended,
            ended = answers(self, from_server, to_client) => ended,
        }
    }
}

async fn requests(network: &Network, mut client: ReadHalf<'_>, mut server: WriteHalf<'_>) -> io::Result<Ended> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let read = client.read(&mut buffer).await?;
        if read == 0 {
            return Ok(Ended::Closed);
        }
        match network.settled_weather().await {
            Weather::Reset => {
                network.harm();
                return Ok(Ended::ClientReset);
            }
            Weather::Delay(time) => tokio::time::sleep(time).await,
            _ => {}
        }
        server.write_all(&buffer[..read]).await?;
    }
}

async fn answers(network: &Network, mut server: ReadHalf<'_>, mut client: WriteHalf<'_>) -> io::Result<Ended> {
    let mut buffer = vec![0; 64 * 1024];
    let mut is_half_closed = false;
    loop {
        let read = server.read(&mut buffer).await?;
        if read == 0 {
            return Ok(Ended::Closed);
        }
        match network.settled_weather().await {
            _ if is_half_closed => continue,
            Weather::Clear | Weather::BlackHole => {}
            Weather::Delay(time) => tokio::time::sleep(time).await,
            Weather::HalfClose => {
                network.harm();
                client.shutdown().await?;
                is_half_closed = true;
                continue;
            }
            Weather::CutAfter(bytes) => {
                client.write_all(&buffer[..read.min(bytes)]).await?;
                network.harm();
                return Ok(Ended::ClientReset);
            }
            Weather::Reset | Weather::DropAnswer => {
                network.harm();
                return Ok(Ended::ClientReset);
            }
        }
        client.write_all(&buffer[..read]).await?;
    }
}

#[cfg(test)]
mod tests;
