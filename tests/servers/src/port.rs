//! Free ports for servers.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{Ipv4Addr, TcpListener};

use crate::Error;

/// The first port of a range below the ephemeral ports of Linux. From the ephemeral range, a client that retries while its
/// server restarts could get the server's port, and keep it.
const FIRST: u16 = 15_000;
const COUNT: u16 = 16_000;

/// The offset of the cluster bus, by which nodes of a Redis Cluster talk to each other. This is Redis's default.
const BUS: u16 = 10_000;

/// The bus ports too must stay below the ephemeral ports, which begin at 32768.
const CLUSTER_COUNT: u16 = 7_500;

/// Finds a port of 127.0.0.1 that was free a moment ago.
pub(crate) fn free() -> Result<u16, Error> {
    free_among(COUNT, is_free)
}

/// Finds a [free](free) port for a node of a Redis Cluster, whose bus port is free as well.
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
