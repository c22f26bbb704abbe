//! Connections on which a write got no answer in time.
//!
//! A commit that waits for a synchronous standby, or for the disk, goes on when its client has gone, and keeps its session on
//! the server. If the store only closed the connection, each further write would add a session, until the server has none left
//! for anyone. So the store keeps the connection, and what limits the number of sessions, until the wait is over.
//!
//! The silence may have another reason, such as a server whose machine is gone. The network reports that after a quarter of
//! an hour. So the store asks the server, at once and over another connection, whether any commit waits. If the role of the login
//! was replaced meanwhile, as by rotated credentials, the server does not tell of its sessions, and they are not kept.

use std::fmt;
use std::time::{Duration, Instant};

use sqlx::{ConnectOptions, Connection, PgConnection};
use tokio::sync::Mutex;
use tokio::time::{sleep, timeout};

use crate::connect::source::ConnectSource;
use crate::sql::{BEGIN, is_true, own_rows};
use crate::timeouts::{CLOSE_TIMEOUT, within};

/// How often the server is asked while it says that commits wait, for all unanswered connections of a store together.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

/// How often in a row the server has to say that no commit waits. A commit may reach its wait after the first time.
const DENIALS: u32 = 2;

/// The pause between those. It is short, because writes may be refused meanwhile.
const DENIAL_PAUSE: Duration = Duration::from_millis(500);

/// Whether a commit has waited for a standby or for the disk, for longer than any does while those are well. Only sessions of
/// the current role, or of roles that it belongs to, say what they wait for. So another role that the options may set is taken
/// back. Versions of Postgres differ in the case of the names.
const WAITS: &str = "SET LOCAL ROLE NONE;\
    SELECT EXISTS (SELECT FROM pg_catalog.pg_stat_activity \
    WHERE pg_catalog.lower(wait_event) OPERATOR(pg_catalog.=) ANY ('{syncrep,walsync,walwrite}') \
    AND backend_type OPERATOR(pg_catalog.=) 'client backend' \
    AND coalesce(query_start, '-infinity') OPERATOR(pg_catalog.+) '2 s'::pg_catalog.interval \
    OPERATOR(pg_catalog.<) pg_catalog.clock_timestamp());\
    COMMIT";

/// Waits for the end of unanswered writes.
pub(crate) struct UnansweredWrites {
    source: ConnectSource,
    /// How long each step of connecting and asking may take.
    client_timeout: Duration,
    /// When the server was last asked, and its answer. Locked while it is asked.
    last: Mutex<Option<(Instant, bool)>>,
}

impl UnansweredWrites {
    pub(crate) fn new(source: ConnectSource, client_timeout: Duration) -> Self {
        Self { source, client_timeout, last: Mutex::default() }
    }

    /// Waits until the server has answered what was sent on `connection`, the connection has ended, or the server says that
    /// no commit of its role waits. A server that cannot be asked has not said so.
    pub(crate) async fn wait(&self, connection: &mut PgConnection) {
        let denied = async {
            let mut denials = 0;
            while denials < DENIALS {
                if self.may_be_waiting(Instant::now()).await {
                    denials = 0;
                    sleep(POLL_INTERVAL).await;
                } else {
                    denials += 1;
                    sleep(DENIAL_PAUSE).await;
                }
            }
        };
        tokio::select! {
            // It reads the answer first. An error says that the connection has ended.
            _ = connection.ping() => {}
            () = denied => {}
        }
    }

    /// Asks the server, unless another connection has just done so. That no commit waits must have been said after `since`.
    async fn may_be_waiting(&self, since: Instant) -> bool {
        let mut last = self.last.lock().await;
        if let Some((asked_at, may_be_waiting)) = *last
            && (asked_at >= since || may_be_waiting && asked_at.elapsed() < POLL_INTERVAL)
        {
            return may_be_waiting;
        }
        let asked_at = Instant::now();
        let may_be_waiting = self.ask().await.unwrap_or_else(|error| {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "writes have no answer, and the server could not be asked whether commits wait"
            );
            true
        });
        *last = Some((asked_at, may_be_waiting));
        may_be_waiting
    }

    async fn ask(&self) -> Result<bool, sqlx::Error> {
        let mut connection = within(self.client_timeout, self.source.options().connect()).await?;
        let asked = within(self.client_timeout, own_rows(&mut connection, format!("{BEGIN}{WAITS}"))).await;
        let _ = timeout(CLOSE_TIMEOUT, connection.close()).await;
        Ok(is_true(&asked?))
    }
}

impl fmt::Debug for UnansweredWrites {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("UnansweredWrites").field("client_timeout", &self.client_timeout).finish_non_exhaustive()
    }
}
