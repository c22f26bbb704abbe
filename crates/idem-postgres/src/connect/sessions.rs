//! The connection pool for handlers' transactions.
//!
//! A connection serves again only after [`Session::give_back`], which is called once COMMIT or ROLLBACK was answered. A session
//! that is dropped is closed, and its transaction with it.
//!
//! sqlx's `Pool` keeps a dropped connection after a ping, which does not end a transaction that the store's messages began; a
//! ROLLBACK in its `after_release` hook would cost each transaction another round trip. deadpool's managed pools keep a dropped
//! connection and check it when it is taken again: until then its transaction would hold its key. Their `Object::take` frees the
//! permit before the connection is closed, so that the server could have more sessions than `max_transactions`.
//!
//! What a handler leaves in its session:
//!
//! - ROLLBACK takes back its `SET`, `LISTEN` and temporary tables. It does not take back prepared statements and session-level
//!   advisory locks.
//! - COMMIT keeps all of these, as in any connection pool.
//! - The role is reset before COMMIT.
//! - If the session has lost its prepared statements or `default_transaction_read_only`, the next `begin` closes it.

use std::collections::VecDeque;
use std::fmt;
use std::num::NonZeroU32;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use idem_core::{StoreError, StoreErrorKind};
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, Connection, PgConnection};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};

use crate::config::PostgresConfig;
use crate::connect::handler_connection::{ROLLBACK, depth, prepare, required_depth, roll_back_by};
use crate::connect::options::NEEDS_OPTIONS;
use crate::error::{
    is_not_ready, is_out_of_transaction, is_protocol_violation, open_error, out_of_transaction, outage,
};
use crate::timeouts::{ROLLBACK_TIMEOUT, within};

/// How long a connection may stay unused, because firewalls drop idle connections, and how long it may serve at all, because the
/// server's memory for it only grows; as in pools of sqlx. An expired connection is closed when another one is given back or taken.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);
const MAX_LIFETIME: Duration = Duration::from_secs(1800);

/// How long closing a connection may take. It keeps its permit until then, so that the server has no more sessions of this store
/// than `max_transactions`. A statement that runs for longer outlives its permit, until the server notices.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The first pause before connecting again to a server that is not ready; each further one is twice as long.
const FIRST_RETRY_PAUSE: Duration = Duration::from_millis(10);

pub(crate) struct Sessions {
    options: PgConnectOptions,
    pooled: bool,
    /// Prepares statements in a new session.
    prepare_sql: String,
    /// How long each step of connecting may take.
    client_timeout: Duration,
    /// How many sessions there may be, and how long a caller waits for the permit to have one.
    most: NonZeroU32,
    transaction_wait: Duration,
    permits: Arc<Semaphore>,
    waiting: AtomicU32,
    /// The most recently used is last.
    idle: Mutex<VecDeque<IdleConnection>>,
}

/// How many of the transactions that handlers may have are in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransactionSlots {
    /// How many there may be: [`max_transactions`](crate::PostgresConfig::max_transactions).
    pub most: u32,
    /// How many are open, or are being opened or closed.
    pub in_use: u32,
    /// How many operations wait for one.
    pub waiting: u32,
}

/// Counts one, until dropped.
struct Counted<'a>(&'a AtomicU32);

impl<'a> Counted<'a> {
    fn new(count: &'a AtomicU32) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

struct IdleConnection {
    connection: PgConnection,
    opened: Instant,
    since: Instant,
}

impl IdleConnection {
    fn is_expired(&self) -> bool {
        self.since.elapsed() > IDLE_TIMEOUT || self.opened.elapsed() > MAX_LIFETIME
    }
}

impl Sessions {
    pub(crate) fn new(
        options: PgConnectOptions,
        config: &PostgresConfig,
        prepare_sql: String,
        client_timeout: Duration,
    ) -> Arc<Self> {
        let most = config.max_transactions;
        let permits = usize::try_from(most.get()).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Arc::new(Self {
            options,
            pooled: config.pooled,
            prepare_sql,
            client_timeout,
            most,
            transaction_wait: config.transaction_wait,
            permits: Arc::new(Semaphore::new(permits)),
            waiting: AtomicU32::new(0),
            idle: Mutex::default(),
        })
    }

    pub(crate) fn slots(&self) -> TransactionSlots {
        let free = u32::try_from(self.permits.available_permits()).unwrap_or(u32::MAX);
        let (most, waiting) = (self.most.get(), self.waiting.load(Ordering::Relaxed));
        TransactionSlots { most, in_use: most.saturating_sub(free), waiting }
    }

    /// A permit with an idle connection, if both are there.
    pub(crate) fn try_permit(self: &Arc<Self>) -> Option<Permit> {
        let slot = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        let idle = self.take_idle()?;
        Some(Permit { permit: slot, idle: Some(idle), sessions: Arc::clone(self) })
    }

    /// Waits for a permit. Cancel-safe: dropping this future only gives up its turn.
    pub(crate) async fn permit(self: &Arc<Self>) -> Result<Permit, StoreError> {
        let _counted = Counted::new(&self.waiting);
        match timeout(self.transaction_wait, Arc::clone(&self.permits).acquire_owned()).await {
            Ok(Ok(permit)) => Ok(Permit { permit, idle: self.take_idle(), sessions: Arc::clone(self) }),
            Ok(Err(_)) | Err(_) => {
                let message = format!(
                    "no transaction was free within {:?}: handlers have all {} that max_transactions allows",
                    self.transaction_wait, self.most
                );
                Err(StoreError::new(StoreErrorKind::Busy, message))
            }
        }
    }

    /// Connects. Each step may take `client_timeout`. There is no limit for their sum: a new session needs a round trip for each
    /// level of [`required_depth`], and such a limit would shut out slow networks.
    async fn connect(&self) -> Result<PgConnection, sqlx::Error> {
        let mut connection = within(self.client_timeout, self.options.connect()).await?;
        prepare(&mut connection, self.pooled, &self.prepare_sql, self.client_timeout).await?;
        Ok(connection)
    }

    /// Connects, and retries for `client_timeout` while the server is starting or full.
    async fn connect_with_retries(&self) -> Result<PgConnection, sqlx::Error> {
        let give_up_at = Instant::now() + self.client_timeout;
        let mut pause = FIRST_RETRY_PAUSE;
        loop {
            match self.connect().await {
                Err(error) if self.is_not_ready(&error) && Instant::now() + pause < give_up_at => {}
                connected => return connected,
            }
            sleep(pause).await;
            pause = (pause * 2).min(self.client_timeout / 5);
        }
    }

    /// Whether the server, or the proxy in front of it, may take a connection soon.
    fn is_not_ready(&self, error: &sqlx::Error) -> bool {
        // A PgBouncer that is full says 08P01.
        is_not_ready(error) || self.pooled && is_protocol_violation(error)
    }

    /// Opens the first session. A connection was just made with the options `plain`. If the server refuses only the start-up
    /// options that are added to them, the error says so.
    pub(crate) async fn open_first(self: &Arc<Self>, plain: &PgConnectOptions) -> Result<(), StoreError> {
        let permit = self.permit().await?;
        let mut connected = self.connect_with_retries().await;
        if let Err(error) = &connected
            && is_protocol_violation(error)
            && !self.pooled
        {
            // PgBouncer says 08P01 of start-up options, and when it is full. A connection without options tells the two apart.
            match within(self.client_timeout, plain.connect()).await {
                Ok(plain) => {
                    let _ = timeout(CLOSE_TIMEOUT, plain.close()).await;
                    connected = self.connect_with_retries().await.map_err(|error| match error {
                        error if is_protocol_violation(&error) => sqlx::Error::Configuration(NEEDS_OPTIONS.into()),
                        error => error,
                    });
                }
                Err(error) => connected = Err(error),
            }
        }
        let connection = connected.map_err(|error| match error {
            error @ sqlx::Error::Configuration(_) => {
                StoreError::new(StoreErrorKind::Misconfigured, NEEDS_OPTIONS).with_source(error)
            }
            error => open_error(error, self.pooled),
        })?;
        permit.into_session(connection, Instant::now()).give_back();
        Ok(())
    }

    fn take_idle(&self) -> Option<IdleConnection> {
        self.idle().pop_back().filter(|idle| !idle.is_expired())
    }

    fn idle(&self) -> MutexGuard<'_, VecDeque<IdleConnection>> {
        // Nothing panics while it is held.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Without the options, which have a password in them.
impl fmt::Debug for Sessions {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Sessions").field("permits", &self.permits).finish_non_exhaustive()
    }
}

/// The right to use one of the connections.
pub(crate) struct Permit {
    permit: OwnedSemaphorePermit,
    idle: Option<IdleConnection>,
    sessions: Arc<Sessions>,
}

impl Permit {
    /// The session of an idle connection, or of a new one.
    pub(crate) async fn session(mut self) -> Result<Session, sqlx::Error> {
        let (connection, opened) = match self.idle.take() {
            Some(idle) => (idle.connection, idle.opened),
            None => (self.sessions.connect_with_retries().await?, Instant::now()),
        };
        Ok(self.into_session(connection, opened))
    }

    fn into_session(self, connection: PgConnection, opened: Instant) -> Session {
        Session { connection: Some(connection), opened, sessions: self.sessions, permit: Some(self.permit) }
    }
}

/// A connection in exclusive use. Dropping it closes it.
pub(crate) struct Session {
    /// `None` only after it was given back, closed or dropped.
    connection: Option<PgConnection>,
    opened: Instant,
    sessions: Arc<Sessions>,
    /// Released when the session is closed or given back.
    permit: Option<OwnedSemaphorePermit>,
}

impl Session {
    /// Keeps the connection for the next handler; no transaction may be open on it. If sqlx counts too few open transactions,
    /// the connection is closed instead; see [`prepare`].
    pub(crate) fn give_back(mut self) {
        if depth(&self) >= required_depth(self.sessions.pooled) {
            self.keep();
        }
    }

    /// Rolls back the transaction by the statements in `how`, and gives the session back. If that fails, the session is closed,
    /// which rolls back too.
    pub(crate) async fn roll_back(mut self, how: String) -> Result<(), StoreError> {
        let rolled_back = roll_back_by(&mut self, &how);
        let late = |_| StoreError::new(StoreErrorKind::Timeout, format!("no ROLLBACK within {ROLLBACK_TIMEOUT:?}"));
        let rolled_back = timeout(ROLLBACK_TIMEOUT, rolled_back).await.map_err(late)?;
        rolled_back.map_err(|error| match is_out_of_transaction(&error) {
            true => out_of_transaction(error),
            false => outage("roll back", error),
        })?;
        self.give_back();
        Ok(())
    }

    /// Closes the connection at once, even if the server still works on a statement.
    pub(crate) fn close_now(mut self) {
        if let (Some(connection), Ok(runtime)) = (self.connection.take(), Handle::try_current()) {
            let permit = self.permit.take();
            runtime.spawn(async move {
                let _ = timeout(CLOSE_TIMEOUT, connection.close()).await;
                drop(permit);
            });
        }
    }

    fn keep(&mut self) {
        let Some(connection) = self.connection.take() else { return };
        let mut idle = self.sessions.idle();
        idle.push_back(IdleConnection { connection, opened: self.opened, since: Instant::now() });
        let expired = if idle.front().is_some_and(IdleConnection::is_expired) { idle.pop_front() } else { None };
        drop(idle);
        drop(expired);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let (Some(mut connection), Ok(runtime)) = (self.connection.take(), Handle::try_current()) {
            let permit = self.permit.take();
            runtime.spawn(async move {
                let goodbye = async {
                    // The answer to ROLLBACK says that no statement is running. `close` keeps the server from logging a lost client.
                    let _ = sqlx::raw_sql(ROLLBACK).execute(&mut connection).await;
                    connection.close().await
                };
                let _ = timeout(CLOSE_TIMEOUT, goodbye).await;
                drop(permit);
            });
        }
    }
}

impl Deref for Session {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        match &self.connection {
            Some(connection) => connection,
            None => unreachable!("a session that was given back is used"),
        }
    }
}

impl DerefMut for Session {
    fn deref_mut(&mut self) -> &mut PgConnection {
        match &mut self.connection {
            Some(connection) => connection,
            None => unreachable!("a session that was given back is used"),
        }
    }
}
