//! A TCP proxy that ends what it carries after an exact number of bytes.

use std::io;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How long nothing has to be carried until an exchange counts as over.
const QUIET: Duration = Duration::from_millis(4);

/// Who says what is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Direction {
    Requests,
    Answers,
}

/// How a connection ends at its cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Ending {
    /// By RST, to both sides.
    Reset,
    /// By FIN, to both sides.
    Close,
    /// By RST, as all others; and the next one is refused.
    Outage,
    /// Not at all: whoever waits for more waits for ever.
    Silence,
}

/// Where an exchange is cut.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cut {
    pub(crate) direction: Direction,
    /// So many bytes arrive, counted over all connections; at 0, the first one that is sent does not.
    pub(crate) after: usize,
    pub(crate) ending: Ending,
}

#[derive(Debug)]
struct State {
    cut: Option<Cut>,
    /// What was carried since the proxy was armed, by direction.
    carried: [usize; 2],
    is_cut: bool,
    /// So many connections are closed as soon as they are made.
    refusals: u32,
    last_carried: Instant,
}

#[derive(Debug)]
struct Shared {
    upstream: (String, u16),
    state: Mutex<State>,
    /// Changes when all connections are to end.
    end: watch::Sender<()>,
}

/// Carries connections to a server.
#[derive(Debug)]
pub(crate) struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

impl Proxy {
    pub(crate) async fn start(host: &str, port: u16) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let state = State { cut: None, carried: [0; 2], is_cut: false, refusals: 0, last_carried: Instant::now() };
        let upstream = (host.to_owned(), port);
        let port = listener.local_addr()?.port();
        let shared = Arc::new(Shared { upstream, state: Mutex::new(state), end: watch::Sender::new(()) });
        let carrier = Arc::clone(&shared);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(Arc::clone(&carrier), client));
            }
        });
        Ok(Self { port, shared, task })
    }

    /// Where it listens on 127.0.0.1.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Counts from now on, and cuts where it is told to, once.
    pub(crate) fn arm(&self, cut: Option<Cut>) {
        let mut state = self.shared.state();
        (state.cut, state.carried, state.is_cut) = (cut, [0; 2], false);
    }

    /// Carries everything again. Says whether the cut was made.
    pub(crate) fn disarm(&self) -> bool {
        let mut state = self.shared.state();
        (state.cut, state.refusals) = (None, 0);
        state.is_cut
    }

    /// Whether the cut was made since the proxy was armed.
    pub(crate) fn is_cut(&self) -> bool {
        self.shared.state().is_cut
    }

    /// How many bytes were carried in a direction since the proxy was armed.
    pub(crate) fn carried(&self, direction: Direction) -> usize {
        self.shared.state().carried[direction as usize]
    }

    /// Ends all connections.
    pub(crate) fn end_all(&self) {
        self.shared.end.send_replace(());
    }

    /// Waits until nothing was carried for a moment: what the last exchange left to be done behind the callers' backs is done.
    pub(crate) async fn quiet(&self) {
        loop {
            let idle = self.shared.state().last_carried.elapsed();
            if idle >= QUIET {
                return;
            }
            tokio::time::sleep(QUIET - idle).await;
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
        self.end_all();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_refused(&self) -> bool {
        let mut state = self.state();
        let is_refused = state.refusals > 0;
        state.refusals = state.refusals.saturating_sub(1);
        is_refused
    }

    /// How many of the bytes that came may go on, and what becomes of the connection then.
    fn pass(&self, direction: Direction, bytes: usize) -> (usize, Option<Ending>) {
        let mut state = self.state();
        state.last_carried = Instant::now();
        let before = state.carried[direction as usize];
        let cut = state.cut.filter(|cut| !state.is_cut && cut.direction == direction && before + bytes >= cut.after);
        let passed = cut.map_or(bytes, |cut| cut.after - before);
        state.carried[direction as usize] += passed;
        let Some(cut) = cut else { return (passed, None) };
        state.is_cut = true;
        state.refusals = u32::from(cut.ending == Ending::Outage);
        (passed, Some(cut.ending))
    }
}

async fn carry(shared: Arc<Shared>, mut client: TcpStream) {
    let mut end = shared.end.subscribe();
    if shared.is_refused() {
        reset(&client);
        return;
    }
    let Ok(mut server) = TcpStream::connect((shared.upstream.0.as_str(), shared.upstream.1)).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let ending = {
        let ((from_client, to_client), (from_server, to_server)) = (client.split(), server.split());
        tokio::select! {
            ended = forward(&shared, Direction::Requests, from_client, to_server) => ended,
            ended = forward(&shared, Direction::Answers, from_server, to_client) => ended,
            _ = end.changed() => Ok(Ending::Reset),
        }
    };
    match ending {
        Ok(Ending::Reset) => {}
        Ok(Ending::Outage) => shared.end.send_replace(()),
        Ok(Ending::Close | Ending::Silence) | Err(_) => return,
    }
    reset(&client);
    reset(&server);
}

/// Closing with a linger of zero sends RST instead of FIN.
fn reset(stream: &TcpStream) {
    let _ = socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

async fn forward(
    shared: &Shared,
    direction: Direction,
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
) -> io::Result<Ending> {
    let mut buffer = vec![0; 64 * 1024];
    let mut is_silent = false;
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return Ok(Ending::Close);
        }
        if is_silent {
            continue;
        }
        let (passed, ending) = shared.pass(direction, read);
        to.write_all(&buffer[..passed]).await?;
        match ending {
            None => {}
            Some(Ending::Silence) => is_silent = true,
            Some(ending) => return Ok(ending),
        }
    }
}

#[cfg(test)]
mod tests;
