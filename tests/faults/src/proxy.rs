//! A TCP proxy with weather.

use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What becomes of what is carried now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "it is a list of faults")]
pub enum Weather {
    /// Everything arrives.
    Clear,
    /// Everything arrives, so much later.
    Delay(Duration),
    /// Connections are reset as soon as they are used.
    Reset,
    /// Nothing arrives before the weather changes.
    BlackHole,
    /// Whoever is answered gets so many bytes of the answer, and a reset.
    CutAfter(usize),
    /// Requests are delivered, and their answers are lost with the connection.
    DropAnswer,
    /// Requests are delivered; their client sees the end of what it can read.
    HalfClose,
}

#[derive(Debug)]
struct Shared {
    upstream: AtomicU16,
    weather: watch::Sender<Weather>,
    /// Connections or answers that came to harm.
    harmed: AtomicU64,
}

/// Carries connections to a server on this machine.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// In front of the server at port `upstream`.
    ///
    /// # Errors
    /// When there is no free port.
    pub async fn start(upstream: u16) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let port = listener.local_addr()?.port();
        let weather = watch::Sender::new(Weather::Clear);
        let shared = Arc::new(Shared { upstream: upstream.into(), weather, harmed: AtomicU64::new(0) });
        let carrier = Arc::clone(&shared);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(Arc::clone(&carrier), client));
            }
        });
        Ok(Self { port, shared, task })
    }

    /// Where it listens on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// New connections lead there from now on.
    pub fn lead_to(&self, upstream: u16) {
        self.shared.upstream.store(upstream, Ordering::SeqCst);
    }

    /// From now on.
    pub fn weather(&self, weather: Weather) {
        self.shared.weather.send_replace(weather);
    }

    /// How often something came to harm.
    #[must_use]
    pub fn harmed(&self) -> u64 {
        self.shared.harmed.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(shared: Arc<Shared>, mut client: TcpStream) {
    let Ok(mut server) = TcpStream::connect((Ipv4Addr::LOCALHOST, shared.upstream.load(Ordering::SeqCst))).await else {
        return;
    };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let is_harmed = {
        let ((from_client, to_client), (from_server, to_server)) = (client.split(), server.split());
        tokio::select! {
            ended = requests(&shared, from_client, to_server) => ended,
            ended = answers(&shared, from_server, to_client) => ended,
        }
    };
    if matches!(is_harmed, Ok(Ended::Reset)) {
        // Closing with a linger of zero sends RST instead of FIN.
        let _ = socket2::SockRef::from(&client).set_linger(Some(Duration::ZERO));
    }
}

/// How a connection ends.
enum Ended {
    /// One side has closed it.
    Closed,
    Reset,
}

async fn requests(shared: &Shared, mut client: ReadHalf<'_>, mut server: WriteHalf<'_>) -> io::Result<Ended> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let read = client.read(&mut buffer).await?;
        if read == 0 {
            return Ok(Ended::Closed);
        }
        match shared.settled_weather().await {
            Weather::Reset => {
                shared.harm();
                return Ok(Ended::Reset);
            }
            Weather::Delay(time) => tokio::time::sleep(time).await,
            _ => {}
        }
        server.write_all(&buffer[..read]).await?;
    }
}

async fn answers(shared: &Shared, mut server: ReadHalf<'_>, mut client: WriteHalf<'_>) -> io::Result<Ended> {
    let mut buffer = vec![0; 64 * 1024];
    let mut is_half_closed = false;
    loop {
        let read = server.read(&mut buffer).await?;
        if read == 0 {
            return Ok(Ended::Closed);
        }
        match shared.settled_weather().await {
            _ if is_half_closed => continue,
            Weather::Clear | Weather::BlackHole => {}
            Weather::Delay(time) => tokio::time::sleep(time).await,
            Weather::HalfClose => {
                shared.harm();
                client.shutdown().await?;
                is_half_closed = true;
                continue;
            }
            Weather::CutAfter(bytes) => {
                client.write_all(&buffer[..read.min(bytes)]).await?;
                shared.harm();
                return Ok(Ended::Reset);
            }
            Weather::Reset | Weather::DropAnswer => {
                shared.harm();
                return Ok(Ended::Reset);
            }
        }
        client.write_all(&buffer[..read]).await?;
    }
}

impl Shared {
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

#[cfg(test)]
mod tests;
