//! Connections for upkeep.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use idem_core::{StoreError, StoreErrorKind};
use sqlx::PgPool;
use sqlx::postgres::{PgPoolOptions, PgRow};
use tokio::time::timeout;

use crate::connect::source::ConnectSource;
use crate::error::{connect_error, outage};
use crate::records::Records;
use crate::sql::{Sql, own_rows};

/// One connection may read a partition for minutes to see whether it has expired; the other is for everything else.
const MAX_CONNECTIONS: u32 = 2;

/// The setting of transactions that are repeated if they are lost. So they do not wait for a standby: while it is away, each
/// would keep its locks and leave a session behind; see [`unanswered`](crate::connect::unanswered).
pub(super) const LOCAL_COMMIT: &str = "SET LOCAL synchronous_commit=local;";

/// Runs statements of the store's upkeep, on its own connections or those of the application's pool.
#[derive(Debug)]
pub(crate) struct Upkeep {
    pool: PgPool,
    /// Whether it is the application's pool.
    pub(crate) is_from_pool: bool,
    /// Whether the configuration declares a transaction pooler.
    pub(crate) pooled: bool,
    pub(crate) records: Arc<Records>,
    /// What each transaction sets first.
    pub(crate) local_settings: String,
    /// How long a statement may take, including the round trip.
    pub(crate) client_timeout: Duration,
    /// Until when no partition is made; see [`maintain_partitions`](Self::maintain_partitions).
    pub(super) make_paused_until: Mutex<Option<Instant>>,
}

impl Upkeep {
    pub(crate) fn new(
        source: &ConnectSource,
        pooled: bool,
        records: Arc<Records>,
        local_settings: String,
        client_timeout: Duration,
    ) -> Self {
        let own = PgPoolOptions::new().max_connections(MAX_CONNECTIONS).acquire_timeout(client_timeout);
        let pool = source.pool().cloned().unwrap_or_else(|| own.connect_lazy_with(source.options()));
        let is_from_pool = source.pool().is_some();
        let make_paused_until = Mutex::default();
        Self { pool, is_from_pool, pooled, records, local_settings, client_timeout, make_paused_until }
    }

    /// Runs a statement in a separate task. If a cancelled caller dropped its future midway, the pool would get the
    /// connection back in the middle of the statement.
    pub(crate) async fn run(
        &self,
        what: &'static str,
        sql: Sql,
        client_timeout: Duration,
    ) -> Result<Vec<PgRow>, StoreError> {
        self.records.batcher.expect_open()?;
        let (pool, pooled, sql) = (self.pool.clone(), self.pooled, sql.into_text());
        let work = tokio::spawn(async move {
            let mut connection = pool.acquire().await.map_err(|error| connect_error(error, pooled))?;
            match timeout(client_timeout, own_rows(&mut connection, sql)).await {
                Ok(Ok(rows)) => Ok(rows),
                Ok(Err(error)) => {
                    connection.close_on_drop();
                    Err(outage(what, error))
                }
                Err(_) => {
                    connection.close_on_drop();
                    let message = format!("could not {what} within {client_timeout:?}");
                    Err(StoreError::new(StoreErrorKind::Timeout, message))
                }
            }
        });
        work.await.map_err(|error| {
            let message = format!("could not {what}: the runtime ended");
            StoreError::new(StoreErrorKind::Unavailable, message).with_source(error).indeterminate()
        })?
    }
}
