//! Connections on which a write got no answer in time.
//!
//! A commit that waits for a synchronous standby, or for the disk, goes on when its client has gone, and keeps its session on
//! the server. If the store only closed the connection, each further write would add a session, until the server has none left
//! for anyone. So the store keeps the connection, and what limits the number of sessions, until the wait is over.
//!
//! The silence may have another reason, such as a server whose machine is gone. The network reports that after a quarter of
//! an hour. So the store asks the server over another connection which sessions are busy with a write. Once all of them have
//! gone on, or if there are none, nothing is left that waits. If the role of the login was replaced meanwhile, as by rotated
//! credentials, the server does not tell of its sessions, and they are not kept.
//!
//! A connection that ends before its write is late is not kept: the store sends the write again, or looks it up. Neither is one
//! on which a read gets no answer.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sqlx::{ConnectOptions, Connection, PgConnection, Row as _};
use tokio::sync::Mutex;
use tokio::time::{sleep, timeout};

use crate::connect::source::ConnectSource;
use crate::error::may_be_done;
use crate::sql::{BEGIN, own_rows};
use crate::timeouts::{CLOSE_TIMEOUT, within};

/// The pause before the first question, and before the second. A write ends meanwhile, unless something holds it up. Short,
/// because other writes may be refused until then. Each later pause is twice as long, up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// The longest pause between two questions of a store. Each costs the server a connection.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The sessions that are busy with a write, each by its process and the beginning of its statement.
///
/// A commit that waits shows as one of three waits. On a disk that hangs a write may show as any other, so each message by which
/// the store writes counts too, and each that ends with a COMMIT. Waits for locks end after `lock_timeout`, or with the session
/// that has the lock. Those for a client end when it is gone. Versions of Postgres differ in the case of the names.
/// Without `track_activities` the server tells of the three waits alone. The bracket keeps the question from matching itself.
///
/// Only sessions of the current role, or of roles that it belongs to, say what they do. So another role that the options may
/// set is taken back.
const BUSY_SESSIONS: &str = "SET LOCAL ROLE NONE;\
    SELECT pg_catalog.concat(pid, ' ', pg_catalog.date_part('epoch', query_start)) FROM pg_catalog.pg_stat_activity \
    WHERE backend_type OPERATOR(pg_catalog.=) 'client backend' AND datname OPERATOR(pg_catalog.=) pg_catalog.current_database() \
    AND (pg_catalog.lower(wait_event) OPERATOR(pg_catalog.=) ANY ('{syncrep,walsync,walwrite}') \
    OR state OPERATOR(pg_catalog.=) 'active' AND coalesce(wait_event_type, '') OPERATOR(pg_catalog.<>) ALL ('{Lock,Client}') \
    AND query OPERATOR(pg_catalog.~) 'idem[_](acquire|renew|checkpoint|settle|release|replace|remove|put)[_]v|idem[_]wait|COMMIT$');\
    COMMIT";

/// Waits for the end of unanswered writes.
pub(crate) struct UnansweredWrites {
    source: ConnectSource,
    /// How long each step of connecting and asking may take.
    client_timeout: Duration,
    /// The last answer of the server. Locked while it is asked.
    last: Mutex<Option<Answer>>,
}

struct Answer {
    at: Instant,
    /// `None` if the server could not be asked.
    busy: Option<Arc<HashSet<String>>>,
}

impl UnansweredWrites {
    pub(crate) fn new(source: ConnectSource, client_timeout: Duration) -> Self {
        Self { source, client_timeout, last: Mutex::default() }
    }

    /// Waits until the server has answered what was sent on `connection`, or until no session is left that was busy with a
    /// write at the first question. It goes on to wait if the server cannot be asked, or if the connection ends: a proxy may
    /// have cut it off, or a pooler, which then sends an error of its own.
    pub(crate) async fn wait(&self, connection: &mut PgConnection) {
        // It reads the answer first.
        let is_answered = async { connection.ping().await.err().is_none_or(|error| !may_be_done(&error)) };
        tokio::select! {
            true = is_answered => {}
            () = self.no_session_waits() => {}
        }
    }

    async fn no_session_waits(&self) {
        let mut pause = FIRST_PAUSE;
        let mut left: Option<HashSet<String>> = None;
        while left.as_ref().is_none_or(|left| !left.is_empty()) {
            let since = Instant::now();
            sleep(pause).await;
            match (&mut left, self.busy_sessions(since).await) {
                (None, Some(busy)) => left = Some(HashSet::clone(&busy)),
                (left, busy) => {
                    if let (Some(left), Some(busy)) = (left, busy) {
                        left.retain(|session| busy.contains(session));
                    }
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }

    /// The sessions that were busy with a write at some time after `since`. Connections of one store share the questions.
    async fn busy_sessions(&self, since: Instant) -> Option<Arc<HashSet<String>>> {
        let mut last = self.last.lock().await;
        if let Some(answer) = last.as_ref().filter(|answer| answer.at >= since) {
            return answer.busy.clone();
        }
        let at = Instant::now();
        let answer = match self.ask().await {
            Ok(busy) => Answer { at, busy: Some(Arc::new(busy)) },
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "writes have no answer, and the server could not be asked whether they still wait"
                );
                // Holds for those who have waited for it too.
                Answer { at: Instant::now(), busy: None }
            }
        };
        last.insert(answer).busy.clone()
    }

    async fn ask(&self) -> Result<HashSet<String>, sqlx::Error> {
        let mut connection = within(self.client_timeout, self.source.options().connect()).await?;
        let asked = within(self.client_timeout, own_rows(&mut connection, format!("{BEGIN}{BUSY_SESSIONS}"))).await;
        let _ = timeout(CLOSE_TIMEOUT, connection.close()).await;
        asked?.iter().map(|row| row.try_get(0)).collect()
    }
}

impl fmt::Debug for UnansweredWrites {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("UnansweredWrites").field("client_timeout", &self.client_timeout).finish_non_exhaustive()
    }
}
