//! The sessions of handlers' transactions: of the store's own pool, or of one of the application.
//!
//! # The store's own pool
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
//!
//! # A pool of the application
//!
//! The application's other work uses the same sessions, so nothing is kept in them. sqlx begins and ends the transaction, so that its
//! count of open transactions is right when the pool gets the connection back; that takes a round trip more at both ends. A
//! session whose transaction did not end that way leaves the pool and is closed.

use std::collections::VecDeque;
use std::fmt;
use std::num::NonZeroU32;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use idem_core::{StoreError, StoreErrorKind, Writes};
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnectOptions, PgTransactionManager};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection, PgPool, Postgres, SqlSafeStr as _};
use sqlx_core::transaction::TransactionManager as _;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout, timeout_at};

use crate::config::PostgresConfig;
use crate::connect::handler_connection::{ROLLBACK, depth, prepare, required_depth, roll_back_by, skip_errors};
use crate::connect::options::NEEDS_OPTIONS;
use crate::error::{
    connect_error, is_not_ready, is_out_of_transaction, is_protocol_violation, open_error, out_of_transaction, outage,
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
    /// The application's, if it has given one. Nothing is idle here then.
    pool: Option<PgPool>,
    /// Whether a transaction pooler is known to be on the way.
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
        pool: Option<PgPool>,
        config: &PostgresConfig,
        prepare_sql: String,
        client_timeout: Duration,
    ) -> Arc<Self> {
        let most = config.max_transactions;
        let permits = usize::try_from(most.get()).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Arc::new(Self {
            options,
            pool,
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

    /// A permit, if there is an idle connection for it.
    pub(crate) fn try_permit(self: &Arc<Self>) -> Option<Permit> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        let idle = match &self.pool {
            // `try_acquire` would spare the pool's `before_acquire`.
            Some(pool) => (pool.num_idle() > 0).then_some(None)?,
            None => Some(self.take_idle()?),
        };
        Some(Permit { permit, idle, deadline: Instant::now() + self.transaction_wait, sessions: Arc::clone(self) })
    }

    /// Waits for a permit. Cancel-safe: dropping this future only gives up its turn.
    pub(crate) async fn permit(self: &Arc<Self>) -> Result<Permit, StoreError> {
        let _counted = Counted::new(&self.waiting);
        let deadline = Instant::now() + self.transaction_wait;
        match timeout(self.transaction_wait, Arc::clone(&self.permits).acquire_owned()).await {
            Ok(Ok(permit)) => Ok(Permit { permit, idle: self.take_idle(), deadline, sessions: Arc::clone(self) }),
            Ok(Err(_)) | Err(_) => {
                let message = format!(
                    "no transaction was free within {:?}: handlers have all {} that max_transactions allows",
                    self.transaction_wait, self.most
                );
                Err(StoreError::new(StoreErrorKind::Busy, message))
            }
        }
    }

    /// A connection of the application's pool.
    async fn acquire(&self, pool: &PgPool, deadline: Instant) -> Result<PoolConnection<Postgres>, StoreError> {
        // In a task: where a new connection takes longer than callers wait, the pool gets it, and the next caller.
        let acquiring = tokio::spawn({
            let pool = pool.clone();
            async move { pool.acquire().await }
        });
        let error = match timeout_at(deadline.into(), acquiring).await {
            Ok(Ok(Ok(connection))) => return Ok(connection),
            Ok(Ok(Err(error @ sqlx::Error::PoolTimedOut))) => Some(error),
            Ok(Ok(Err(error))) => return Err(connect_error(error, self.pooled)),
            Ok(Err(_)) | Err(_) => None,
        };
        let most = pool.options().get_max_connections();
        let (kind, why) = if pool.size() >= most && pool.num_idle() == 0 {
            (StoreErrorKind::Busy, "are in use")
        } else {
            (StoreErrorKind::Unavailable, "are in use, or a new one could not be made")
        };
        let wait = self.transaction_wait;
        let message = format!("the application's pool gave no connection within {wait:?}: its {most} {why}");
        let told = StoreError::new(kind, message);
        Err(error.map_or(told.clone(), |error| told.with_source(error)))
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
        if self.pool.is_some() {
            permit.session().await?.give_back();
            return Ok(());
        }
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
        permit.into_session(SessionConnection::Own { connection, opened: Instant::now() }).give_back();
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
    /// Until when to wait for a connection of the application's pool.
    deadline: Instant,
    sessions: Arc<Sessions>,
}

impl Permit {
    /// The session of an idle connection, or of a new one.
    pub(crate) async fn session(mut self) -> Result<Session, StoreError> {
        let connection = match (&self.sessions.pool, self.idle.take()) {
            (Some(pool), _) => SessionConnection::Pool(self.sessions.acquire(pool, self.deadline).await?),
            (None, Some(idle)) => SessionConnection::Own { connection: idle.connection, opened: idle.opened },
            (None, None) => {
                let connected = self.sessions.connect_with_retries().await;
                let connection = connected.map_err(|error| connect_error(error, self.sessions.pooled))?;
                SessionConnection::Own { connection, opened: Instant::now() }
            }
        };
        Ok(self.into_session(connection))
    }

    fn into_session(self, connection: SessionConnection) -> Session {
        Session { connection: Some(connection), sessions: self.sessions, permit: Some(self.permit) }
    }
}

enum SessionConnection {
    Own { connection: PgConnection, opened: Instant },
    Pool(PoolConnection<Postgres>),
}

impl SessionConnection {
    fn into_connection(self) -> PgConnection {
        match self {
            Self::Own { connection, .. } => connection,
            Self::Pool(connection) => connection.detach(),
        }
    }
}

/// A connection in exclusive use. Dropping it closes it.
pub(crate) struct Session {
    /// `None` only after it was given back, closed or dropped.
    connection: Option<SessionConnection>,
    sessions: Arc<Sessions>,
    /// Released when the session is closed or given back.
    permit: Option<OwnedSemaphorePermit>,
}

impl Session {
    /// Begins a transaction, where sqlx has to count it.
    pub(crate) async fn begin(&mut self, begin: &str, limit: Duration) -> Result<(), sqlx::Error> {
        if self.sessions.pool.is_none() {
            return Ok(());
        }
        let begin = AssertSqlSafe(begin.to_owned()).into_sql_str();
        within(limit, PgTransactionManager::begin(self, Some(begin))).await
    }

    /// Runs the statements, and commits. With `Writes::Discard` the first of them rolls back.
    pub(crate) async fn commit_after(&mut self, mut statements: String, writes: Writes) -> Result<(), sqlx::Error> {
        let is_counted = self.is_counted();
        if !is_counted {
            statements.push_str("COMMIT");
        }
        match writes {
            Writes::Keep => sqlx::raw_sql(AssertSqlSafe(statements)).execute(&mut **self).await.map(drop)?,
            Writes::Discard => roll_back_by(self, &statements).await?,
        }
        if is_counted { PgTransactionManager::commit(self).await } else { Ok(()) }
    }

    /// Whether sqlx has begun the transaction and can end it. It cannot when the handler has left a nested one open.
    fn is_counted(&self) -> bool {
        self.sessions.pool.is_some() && depth(self) == 1
    }

    /// Keeps the connection for the next handler; no transaction may be open on it. If sqlx counts another number of open
    /// transactions than it has to, the connection is closed instead; see [`prepare`].
    pub(crate) fn give_back(mut self) {
        let depth = depth(&self);
        let is_right = match &self.sessions.pool {
            Some(_) => depth == 0,
            None => depth >= required_depth(self.sessions.pooled),
        };
        if is_right {
            self.keep();
        }
    }

    /// Rolls back the transaction after the statements in `first`, and gives the session back. If that fails, the session is closed,
    /// which rolls back too.
    pub(crate) async fn roll_back_after(mut self, first: String) -> Result<(), StoreError> {
        let late = |_| StoreError::new(StoreErrorKind::Timeout, format!("no ROLLBACK within {ROLLBACK_TIMEOUT:?}"));
        let rolled_back = timeout(ROLLBACK_TIMEOUT, self.roll_back_by_statements(first)).await.map_err(late)?;
        rolled_back.map_err(|error| match is_out_of_transaction(&error) {
            true => out_of_transaction(error),
            false => outage("roll back", error),
        })?;
        self.give_back();
        Ok(())
    }

    async fn roll_back_by_statements(&mut self, mut first: String) -> Result<(), sqlx::Error> {
        if !self.is_counted() {
            first.push_str(ROLLBACK);
            return roll_back_by(self, &first).await;
        }
        if first.is_empty() {
            skip_errors(self).await?;
        } else {
            roll_back_by(self, &first).await?;
        }
        PgTransactionManager::rollback(self).await
    }

    /// Closes the connection at once, even if the server still works on a statement.
    pub(crate) fn close_now(mut self) {
        // Outside of its runtime the pool's connection must not be given back.
        let connection = self.connection.take().map(SessionConnection::into_connection);
        if let (Some(connection), Ok(runtime)) = (connection, Handle::try_current()) {
            let permit = self.permit.take();
            runtime.spawn(async move {
                let _ = timeout(CLOSE_TIMEOUT, connection.close()).await;
                drop(permit);
            });
        }
    }

    fn keep(&mut self) {
        // A connection of the application's pool goes back to it when it is dropped.
        let Some(SessionConnection::Own { connection, opened }) = self.connection.take() else { return };
        let mut idle = self.sessions.idle();
        idle.push_back(IdleConnection { connection, opened, since: Instant::now() });
        let expired = if idle.front().is_some_and(IdleConnection::is_expired) { idle.pop_front() } else { None };
        drop(idle);
        drop(expired);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Outside of its runtime the pool's connection must not be given back.
        let connection = self.connection.take().map(SessionConnection::into_connection);
        if let (Some(mut connection), Ok(runtime)) = (connection, Handle::try_current()) {
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
            Some(SessionConnection::Own { connection, .. }) => connection,
            Some(SessionConnection::Pool(connection)) => connection,
            None => unreachable!("a session that was given back is used"),
        }
    }
}

impl DerefMut for Session {
    fn deref_mut(&mut self) -> &mut PgConnection {
        match &mut self.connection {
            Some(SessionConnection::Own { connection, .. }) => connection,
            Some(SessionConnection::Pool(connection)) => connection,
            None => unreachable!("a session that was given back is used"),
        }
    }
}
