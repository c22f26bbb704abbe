//! Ports for servers.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{Ipv4Addr, TcpListener};

use crate::Error;

/// Below the ports that Linux gives to clients. A client that knocks while its server restarts could otherwise be given
/// the server's own port, and keep it.
const FIRST: u16 = 15_000;
const COUNT: u16 = 16_000;

/// A port of 127.0.0.1 that nobody listened on a moment ago.
pub(crate) fn free() -> Result<u16, Error> {
    const ATTEMPTS: usize = 200;
    let random = || RandomState::new().build_hasher().finish() % u64::from(COUNT);
    let candidates = std::iter::repeat_with(|| FIRST + random() as u16).take(ATTEMPTS);
    let free = candidates.into_iter().find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok());
    free.ok_or_else(|| Error::failed(format!("no port from {FIRST} on was free in {ATTEMPTS} attempts")))
}
