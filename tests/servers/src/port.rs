//! Ports for servers.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{Ipv4Addr, TcpListener};

use crate::Error;

/// Below the ports that Linux gives to clients. A client that knocks while its server restarts could otherwise be given
/// the server's own port, and keep it.
const FIRST: u16 = 15_000;
const COUNT: u16 = 16_000;

/// Nodes of a Redis Cluster talk to each other on this port after their own. It is their default.
const BUS: u16 = 10_000;

/// The bus has to stay below the ports of clients as well, whose first is 32768.
const CLUSTER_COUNT: u16 = 7_500;

/// A port of 127.0.0.1 that nobody listened on a moment ago.
pub(crate) fn free() -> Result<u16, Error> {
    free_among(COUNT, is_free)
}

/// A [free](free) port for a node of a Redis Cluster, whose bus is free as well.
pub(crate) fn free_with_bus() -> Result<u16, Error> {
    free_among(CLUSTER_COUNT, |port| is_free(port) && is_free(port + BUS))
}

fn free_among(count: u16, is_free: impl Fn(u16) -> bool) -> Result<u16, Error> {
    const ATTEMPTS: usize = 200;
    let random = || RandomState::new().build_hasher().finish() % u64::from(count);
    let candidates = std::iter::repeat_with(|| FIRST + random() as u16).take(ATTEMPTS);
    let free = candidates.into_iter().find(|port| is_free(*port));
    free.ok_or_else(|| Error::failed(format!("no port from {FIRST} on was free in {ATTEMPTS} attempts")))
}

fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}
