//! The sessions of handlers' transactions, and the limit for them. They are the store's own, or come from the application's
//! pool ([`ApplicationPool`]).
//!
//! A connection serves again only after [`Session::give_back`], which is called once COMMIT or ROLLBACK was answered. A
//! session that is dropped is closed, which ends its transaction.
//!
//! Connection pools do not fit the store's own sessions:
//!
//! - The `Pool` of sqlx keeps a dropped connection after a ping. That does not end a transaction that the store's messages
//!   began. A ROLLBACK in its `after_release` hook would cost each transaction another round trip.
//! - The managed pools of deadpool keep a dropped connection, and check it when it is taken again. Until then its transaction
//!   would hold its key. Their `Object::take` frees the permit before the connection is closed, so that the server could have
//!   more sessions than `max_transactions`.
//!
//! What a handler leaves in its session:
//!
//! - ROLLBACK takes back its `SET`, `LISTEN` and temporary tables. It does not take back prepared statements and session-level
//!   advisory locks.
//! - COMMIT keeps all of these, as in any connection pool.
//! - The role is reset before COMMIT.
//! - If the session has lost `default_transaction_read_only` or a prepared statement that begins a transaction, the next `begin`
//!   closes it. If it has lost one that ends a transaction, the settlement fails and the session is closed.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use idem_core::{StoreError, StoreErrorKind, TransactionSlots};
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, Connection, PgConnection};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};

use crate::config::PostgresConfig;
use crate::connect::application_pool::ApplicationPool;
use crate::connect::handler_connection::prepare;
use crate::connect::idle::{IdleConnection, IdleConnections};
use crate::connect::options::{NEEDS_OPTIONS, expect_direct};
use crate::connect::session::{Session, SessionConnection};
use crate::connect::unanswered::UnansweredWrites;
use crate::error::{connect_error, is_not_ready, is_protocol_violation, open_error};
use crate::timeouts::{CLOSE_TIMEOUT, SHORT_WAIT, within};

/// How long a caller waits for a connection of the application's pool at least, however late it got its permit. With the default
/// `transaction_wait` the sum stays below the engine's `store_timeout` of 2 s.
const LEAST_ACQUIRE_WAIT: Duration = Duration::from_millis(500);

/// The first pause before connecting again to a server that is not ready; each further one is twice as long.
const FIRST_RETRY_PAUSE: Duration = Duration::from_millis(10);

pub(crate) struct Sessions {
    options: PgConnectOptions,
    /// The application's pool, if it gave one. `idle` is empty then.
    pub(crate) pool: Option<ApplicationPool>,
    /// Whether the configuration declares a transaction pooler.
    pub(crate) pooled: bool,
    /// Prepares statements in a new session.
    prepare_sql: String,
    /// How long each step of connecting may take.
    client_timeout: Duration,
    /// How many sessions there may be, and how long a caller waits for the permit to have one.
    most: NonZeroU32,
    transaction_wait: Duration,
    permits: Arc<Semaphore>,
    waiting: AtomicU32,
    /// Whether the last request that waited for a permit did so for longer than [`SHORT_WAIT`].
    is_slow: AtomicBool,
    idle: Arc<IdleConnections>,
    unanswered: Arc<UnansweredWrites>,
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

impl Sessions {
    pub(crate) fn new(
        options: PgConnectOptions,
        pool: Option<sqlx::PgPool>,
        config: &PostgresConfig,
        prepare_sql: String,
        client_timeout: Duration,
        unanswered: Arc<UnansweredWrites>,
    ) -> Arc<Self> {
        let most = config.max_transactions;
        let permits = usize::try_from(most.get()).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Arc::new(Self {
            options,
            pool: pool.map(|pool| ApplicationPool { pool, wait: config.transaction_wait, pooled: config.pooled }),
            pooled: config.pooled,
            prepare_sql,
            client_timeout,
            most,
            transaction_wait: config.transaction_wait,
            permits: Arc::new(Semaphore::new(permits)),
            waiting: AtomicU32::new(0),
            is_slow: AtomicBool::new(false),
            idle: Arc::default(),
            unanswered,
        })
    }

    pub(crate) fn slots(&self) -> TransactionSlots {
        let free = u32::try_from(self.permits.available_permits()).unwrap_or(u32::MAX);
        let (most, waiting) = (self.most.get(), self.waiting.load(Ordering::Relaxed));
        TransactionSlots { most, in_use: most.saturating_sub(free), waiting }
    }

    /// Until when a request that comes now waits for a transaction.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.transaction_wait
    }

    /// A permit, if there is an idle connection for it. If all permits are in use, it waits for [`SHORT_WAIT`], unless earlier requests
    /// have waited longer. Cancel-safe, like [`permit_by`](Self::permit_by).
    pub(crate) async fn permit_soon(self: &Arc<Self>, deadline: Instant) -> Option<Permit> {
        let permit = match Arc::clone(&self.permits).try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) if self.is_slow.load(Ordering::Relaxed) => return None,
            Err(_) => {
                let _counted = Counted::new(&self.waiting);
                let wait = SHORT_WAIT.min(deadline.saturating_duration_since(Instant::now()));
                let waited = timeout(wait, Arc::clone(&self.permits).acquire_owned()).await;
                let Ok(Ok(permit)) = waited else {
                    self.is_slow.store(wait == SHORT_WAIT, Ordering::Relaxed);
                    return None;
                };
                permit
            }
        };
        self.is_slow.store(false, Ordering::Relaxed);
        let permit = self.with_idle(permit, deadline);
        let is_ready = self.pool.as_ref().map_or(permit.idle.is_some(), ApplicationPool::has_idle);
        is_ready.then_some(permit)
    }

    /// Waits for a permit for `transaction_wait`.
    pub(crate) async fn permit(self: &Arc<Self>) -> Result<Permit, StoreError> {
        self.permit_by(self.deadline()).await
    }

    /// Waits for a permit, for [`SHORT_WAIT`] at least. Cancel-safe: dropping this future only gives up its turn.
    pub(crate) async fn permit_by(self: &Arc<Self>, deadline: Instant) -> Result<Permit, StoreError> {
        let _counted = Counted::new(&self.waiting);
        let began = Instant::now();
        // A lookup may have taken the time.
        let deadline = deadline.max(began + SHORT_WAIT.min(self.transaction_wait));
        let wait = deadline.saturating_duration_since(began);
        match timeout(wait, Arc::clone(&self.permits).acquire_owned()).await {
            Ok(Ok(permit)) => {
                self.is_slow.store(began.elapsed() > SHORT_WAIT, Ordering::Relaxed);
                Ok(self.with_idle(permit, deadline))
            }
            Ok(Err(_)) | Err(_) => {
                let message = format!(
                    "no transaction was free within {:?}: all {} that max_transactions allows are in use",
                    self.transaction_wait, self.most
                );
                Err(StoreError::new(StoreErrorKind::Busy, message))
            }
        }
    }

    fn with_idle(self: &Arc<Self>, permit: OwnedSemaphorePermit, deadline: Instant) -> Permit {
        let idle = if self.pool.is_none() { self.idle.take() } else { None };
        Permit { permit, idle, deadline, sessions: Arc::clone(self) }
    }

    /// Connects. Each step may take `client_timeout`. There is no limit for their sum: a new session needs a round trip for
    /// each level of [`required_depth`](crate::connect::handler_connection::required_depth), and such a limit would shut out
    /// slow networks.
    async fn connect(&self) -> Result<PgConnection, sqlx::Error> {
        let mut connection = within(self.client_timeout, self.options.connect()).await?;
        if self.pool.is_none() {
            prepare(&mut connection, self.pooled, &self.prepare_sql, self.client_timeout).await?;
        } else if !self.pooled {
            within(self.client_timeout, expect_direct(&mut connection)).await?;
        }
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
    /// options that are added to them, the error says so. A pool of the application does not add them, and is checked too.
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
        if self.pool.is_none() {
            permit.into_session(SessionConnection::Own { connection, opened: Instant::now() }).give_back();
        } else {
            let _ = timeout(CLOSE_TIMEOUT, connection.close()).await;
            // The pool may have to make its first connection, to a server far away.
            let deadline = Instant::now() + 4 * self.client_timeout;
            Permit { deadline, ..permit }.session().await?.give_back();
        }
        Ok(())
    }
}

/// Omits the options, which contain a password.
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
            (Some(pool), _) => {
                let deadline = self.deadline.max(Instant::now() + LEAST_ACQUIRE_WAIT);
                SessionConnection::Pool(pool.acquire(deadline).await?)
            }
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
        let Sessions { idle, unanswered, pooled, .. } = &*self.sessions;
        Session::new(connection, Arc::clone(idle), Arc::clone(unanswered), *pooled, self.permit)
    }
}
