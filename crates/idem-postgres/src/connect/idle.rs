//! The idle sessions of the store's own.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sqlx::PgConnection;

/// How long a connection may be idle, because firewalls drop idle connections, and how long it may serve at all, because the
/// server's memory for it only grows. The values are those of sqlx's pools. An expired connection is closed when another one
/// is given back or taken.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);
const MAX_LIFETIME: Duration = Duration::from_secs(1800);

/// Connections without a transaction. The most recently used is last.
#[derive(Debug, Default)]
pub(crate) struct IdleConnections(Mutex<VecDeque<IdleConnection>>);

#[derive(Debug)]
pub(crate) struct IdleConnection {
    pub(crate) connection: PgConnection,
    pub(crate) opened: Instant,
    since: Instant,
}

impl IdleConnection {
    fn is_expired(&self) -> bool {
        self.since.elapsed() > IDLE_TIMEOUT || self.opened.elapsed() > MAX_LIFETIME
    }
}

impl IdleConnections {
    /// Keeps a connection for the next handler.
    pub(crate) fn keep(&self, connection: PgConnection, opened: Instant) {
        let mut idle = self.lock();
        idle.push_back(IdleConnection { connection, opened, since: Instant::now() });
        let expired = if idle.front().is_some_and(IdleConnection::is_expired) { idle.pop_front() } else { None };
        drop(idle);
        drop(expired);
    }

    /// Takes the most recently used one.
    pub(crate) fn take(&self) -> Option<IdleConnection> {
        self.lock().pop_back().filter(|idle| !idle.is_expired())
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<IdleConnection>> {
        // Nothing panics while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
