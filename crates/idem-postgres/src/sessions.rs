//! The connections on which handlers have their transactions: as many as there may be at once, kept for the next ones.
//!
//! A pool of sqlx asks the server on the way back whether a connection still answers, and of each drop does not know whether
//! it left something open. Here a connection serves again only when it is [given back](Session::give_back), by whoever has seen
//! its transaction end; dropped, it is closed, and its transaction with it.

use std::collections::VecDeque;
use std::fmt;
use std::num::NonZeroU32;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use idem_core::{StoreError, StoreErrorKind, planted};
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, Connection, PgConnection};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};

use crate::connection::{no_session, prepare};
use crate::error::is_not_ready;

/// How long a connection may stay unused, as firewalls forget quiet ones, and how long it may serve at all, as the server's
/// memory for it only grows; as in pools of sqlx. What is over is closed when another one is given back, or taken.
const IDLE: Duration = Duration::from_secs(600);
const LIFE: Duration = Duration::from_secs(1800);

/// How long a connection that is not kept may take to say goodbye.
const GOODBYE: Duration = Duration::from_secs(1);

/// The first pause before connecting to a server again that is not ready yet; each further one is twice as long.
const AGAIN_AFTER: Duration = Duration::from_millis(10);

pub(crate) struct Sessions {
    options: PgConnectOptions,
    pooled: bool,
    /// What a new one is told.
    questions: String,
    /// How long whoever wants one waits for a place, and then for a connection.
    patience: Duration,
    places: Arc<Semaphore>,
    /// The one that was used last comes last.
    idle: Mutex<VecDeque<Idle>>,
}

struct Idle {
    connection: PgConnection,
    made: Instant,
    since: Instant,
}

impl Idle {
    fn is_over(&self) -> bool {
        self.since.elapsed() > IDLE || self.made.elapsed() > LIFE
    }
}

impl Sessions {
    pub(crate) fn new(
        options: PgConnectOptions,
        pooled: bool,
        questions: String,
        patience: Duration,
        most: NonZeroU32,
    ) -> Arc<Self> {
        let most = usize::try_from(most.get()).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        let places = Arc::new(Semaphore::new(most));
        Arc::new(Self { options, pooled, questions, patience, places, idle: Mutex::default() })
    }

    /// A place with a connection that is there already, or none.
    pub(crate) fn now(self: &Arc<Self>) -> Option<Place> {
        let permit = Arc::clone(&self.places).try_acquire_owned().ok()?;
        let idle = self.take_idle()?;
        Some(Place { permit, idle: Some(idle), sessions: Arc::clone(self) })
    }

    /// A place, as soon as there is one. Dropping this future leaves the queue of those who wait, and nothing else.
    pub(crate) async fn soon(self: &Arc<Self>) -> Result<Place, StoreError> {
        match timeout(self.patience, Arc::clone(&self.places).acquire_owned()).await {
            Ok(Ok(permit)) => Ok(Place { permit, idle: self.take_idle(), sessions: Arc::clone(self) }),
            Ok(Err(_)) | Err(_) => {
                let message =
                    "all connections that there may be are in use, by handlers that run; see max_transactions";
                Err(StoreError::new(StoreErrorKind::Unavailable, message))
            }
        }
    }

    async fn connect(&self) -> Result<PgConnection, sqlx::Error> {
        let mut connection = self.options.connect().await?;
        prepare(&mut connection, self.pooled, &self.questions).await?;
        Ok(connection)
    }

    /// Connects, and waits for a server that is on its way up.
    async fn connect_soon(&self) -> Result<PgConnection, StoreError> {
        let mut last = None;
        let connecting = async {
            let mut pause = AGAIN_AFTER;
            loop {
                match self.connect().await {
                    Err(error) if is_not_ready(&error) => last = Some(error),
                    connected => return connected,
                }
                sleep(pause).await;
                pause = (pause * 2).min(self.patience / 5);
            }
        };
        match timeout(self.patience, connecting).await {
            Ok(connected) => connected.map_err(no_session),
            Err(_) => Err(last.map_or_else(
                || {
                    let message = format!("Postgres did not accept a connection within {:?}", self.patience);
                    StoreError::new(StoreErrorKind::Unavailable, message)
                },
                no_session,
            )),
        }
    }

    fn take_idle(&self) -> Option<Idle> {
        self.idle().pop_back().filter(|idle| !idle.is_over())
    }

    fn idle(&self) -> MutexGuard<'_, VecDeque<Idle>> {
        // Nothing panics while it is held.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Without the options, which have a password in them.
impl fmt::Debug for Sessions {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Sessions").field("places", &self.places).finish_non_exhaustive()
    }
}

/// The right to one of the connections.
pub(crate) struct Place {
    permit: OwnedSemaphorePermit,
    idle: Option<Idle>,
    sessions: Arc<Sessions>,
}

impl Place {
    /// The connection that was used last, or a new one.
    pub(crate) async fn session(self) -> Result<Session, StoreError> {
        let Self { permit, idle, sessions } = self;
        let (connection, made) = match idle {
            Some(Idle { connection, made, .. }) => (connection, made),
            None => (sessions.connect_soon().await?, Instant::now()),
        };
        Ok(Session { connection: Some(connection), made, sessions, _place: permit })
    }
}

/// A connection that nobody else uses. Dropped, it is closed.
pub(crate) struct Session {
    /// `None` only once it is given back, or dropped.
    connection: Option<PgConnection>,
    made: Instant,
    sessions: Arc<Sessions>,
    _place: OwnedSemaphorePermit,
}

impl Session {
    /// Keeps the connection, on which no transaction is open, for others.
    pub(crate) fn give_back(mut self) {
        self.keep();
    }

    fn keep(&mut self) {
        let Some(connection) = self.connection.take() else { return };
        let mut idle = self.sessions.idle();
        idle.push_back(Idle { connection, made: self.made, since: Instant::now() });
        // Of those that nobody needs any more, one at a time.
        let over = if idle.front().is_some_and(Idle::is_over) { idle.pop_front() } else { None };
        drop(idle);
        drop(over);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        planted!("cancelled-begin-returned-to-the-pool" => self.keep());
        if let (Some(connection), Ok(runtime)) = (self.connection.take(), Handle::try_current()) {
            // Else the server would write into its log that the client has vanished.
            runtime.spawn(timeout(GOODBYE, connection.close()));
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
