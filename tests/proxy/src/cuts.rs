//! Cuts connections after an exact number of bytes.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};

use crate::{Ended, Harm};

/// How long nothing must be carried until an exchange counts as over.
const QUIET: Duration = Duration::from_millis(4);

/// The sender whose bytes are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// The client.
    Requests,
    /// The server.
    Answers,
}

/// The fate of a connection at its cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ending {
    /// By RST, to both sides.
    Reset,
    /// By FIN, to both sides.
    Close,
    /// By RST, to all connections; and the next connection is refused.
    Outage,
    /// It stays open without further bytes: a client waits until its timeout.
    Silence,
}

/// Where an exchange is cut.
#[derive(Debug, Clone, Copy)]
pub struct Cut {
    /// The direction whose bytes are counted.
    pub direction: Direction,
    /// How many bytes still arrive, counted over all connections. With 0, the first byte is lost.
    pub after: usize,
    /// The fate of the connection then.
    pub ending: Ending,
}

#[derive(Debug)]
struct State {
    cut: Option<Cut>,
    /// The bytes carried since the proxy was armed, by direction.
    carried: [usize; 2],
    is_cut: bool,
    /// How many new connections are still closed at once.
    refusals: u32,
    last_carried: Instant,
}

/// Cuts one exchange after an exact number of bytes.
#[derive(Debug)]
pub struct Cuts(Mutex<State>);

impl Default for Cuts {
    fn default() -> Self {
        let last_carried = Instant::now();
        Self(Mutex::new(State { cut: None, carried: [0; 2], is_cut: false, refusals: 0, last_carried }))
    }
}

impl Cuts {
    /// Resets the byte counts. The next exchange that reaches `cut` is cut, once.
    pub fn arm(&self, cut: Option<Cut>) {
        let mut state = self.state();
        (state.cut, state.carried, state.is_cut) = (cut, [0; 2], false);
    }

    /// Carries everything again. Returns whether the cut was made.
    pub fn disarm(&self) -> bool {
        let mut state = self.state();
        (state.cut, state.refusals) = (None, 0);
        state.is_cut
    }

    /// Whether the cut was made since the proxy was armed.
    pub fn is_cut(&self) -> bool {
        self.state().is_cut
    }

    /// How many bytes were carried in a direction since the proxy was armed.
    pub fn carried(&self, direction: Direction) -> usize {
        self.state().carried[direction as usize]
    }

    /// Waits until nothing was carried for a moment, so that background work of the last exchange is done.
    pub async fn quiet(&self) {
        loop {
            let idle = self.state().last_carried.elapsed();
            if idle >= QUIET {
                return;
            }
            tokio::time::sleep(QUIET - idle).await;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many of the received bytes may pass, and the fate of the connection then.
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

impl Harm for Cuts {
    fn accepts(&self) -> bool {
        let mut state = self.state();
        let is_refused = state.refusals > 0;
        state.refusals = state.refusals.saturating_sub(1);
        !is_refused
    }

    async fn carry(&self, client: &mut TcpStream, server: &mut TcpStream) -> io::Result<Ended> {
        let ((from_client, to_client), (from_server, to_server)) = (client.split(), server.split());
        tokio::select! {
            ended = forward(self, Direction::Requests, from_client, to_server) => ended,
            ended = forward(self, Direction::Answers, from_server, to_client) => ended,
        }
    }
}

async fn forward(
    cuts: &Cuts,
    direction: Direction,
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
) -> io::Result<Ended> {
    let mut buffer = vec![0; 64 * 1024];
    let mut is_silent = false;
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return Ok(Ended::Closed);
        }
        if is_silent {
            continue;
        }
        let (passed, ending) = cuts.pass(direction, read);
        to.write_all(&buffer[..passed]).await?;
        match ending {
            None => {}
            Some(Ending::Silence) => is_silent = true,
            Some(Ending::Close) => return Ok(Ended::Closed),
            Some(Ending::Reset) => return Ok(Ended::Reset),
            Some(Ending::Outage) => return Ok(Ended::AllReset),
        }
    }
}

#[cfg(test)]
mod tests;
