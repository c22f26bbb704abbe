//! The session of one handler's transaction.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use idem_core::{StoreError, StoreErrorKind, Writes};
use sqlx::pool::PoolConnection;
use sqlx::postgres::PgTransactionManager;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Postgres, SqlSafeStr as _};
use sqlx_core::transaction::TransactionManager as _;
use tokio::runtime::Handle;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use crate::connect::application_pool::{GUARD, UNGUARD};
use crate::connect::handler_connection::{ROLLBACK, depth, required_depth, roll_back_by, skip_errors};
use crate::connect::idle::IdleConnections;
use crate::connect::unanswered::UnansweredWrites;
use crate::error::{is_out_of_step, is_out_of_transaction, left_unread, out_of_transaction, outage};
use crate::sql::BEGIN;
use crate::sql::{Echo, own_rows};
use crate::timeouts::{CLOSE_TIMEOUT, ROLLBACK_TIMEOUT, within};

pub(crate) enum SessionConnection {
    Own { connection: PgConnection, opened: Instant },
    Pool(PoolConnection<Postgres>),
}

impl SessionConnection {
    /// Closes the connection. Only then can the application's pool open another one.
    async fn close(self) {
        let _ = match self {
            Self::Own { connection, .. } => connection.close().await,
            Self::Pool(connection) => connection.close().await,
        };
    }
}

impl Deref for SessionConnection {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        match self {
            Self::Own { connection, .. } => connection,
            Self::Pool(connection) => connection,
        }
    }
}

impl DerefMut for SessionConnection {
    fn deref_mut(&mut self) -> &mut PgConnection {
        match self {
            Self::Own { connection, .. } => connection,
            Self::Pool(connection) => connection,
        }
    }
}

/// A connection in exclusive use. Dropping it closes it.
pub(crate) struct Session {
    /// `None` only after it was given back, closed or dropped.
    connection: Option<SessionConnection>,
    idle: Arc<IdleConnections>,
    unanswered: Arc<UnansweredWrites>,
    /// Whether the connection leads through a transaction-pooling proxy.
    pooled: bool,
    /// Whether [`GUARD`] holds in the session.
    is_guarded: bool,
    /// Released when the session is closed or given back.
    permit: Option<OwnedSemaphorePermit>,
    runtime: Handle,
}

/// What the closing of a connection waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Closing {
    Now,
    /// Until no statement is running.
    RolledBack,
    /// Until the server has answered, or has no answer to give. It may take as long as a standby is away.
    Answered,
}

impl Session {
    /// # Panics
    /// Outside of a runtime.
    pub(crate) fn new(
        connection: SessionConnection,
        idle: Arc<IdleConnections>,
        unanswered: Arc<UnansweredWrites>,
        pooled: bool,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        let (connection, permit) = (Some(connection), Some(permit));
        Self { connection, idle, unanswered, pooled, is_guarded: false, permit, runtime: Handle::current() }
    }

    /// Whether the connection is of the application's pool.
    fn is_from_pool(&self) -> bool {
        matches!(self.connection, Some(SessionConnection::Pool(_)))
    }

    /// On a connection of the application's pool, begins the transaction by sqlx, which must count it there.
    pub(crate) async fn begin(&mut self, begin: &str, limit: Duration) -> Result<(), sqlx::Error> {
        if !self.is_from_pool() {
            return Ok(());
        }
        self.is_guarded = !self.pooled;
        let begin = if self.is_guarded { format!("{BEGIN}{GUARD}{begin}") } else { begin.to_owned() };
        within(limit, PgTransactionManager::begin(self, Some(AssertSqlSafe(begin).into_sql_str()))).await
    }

    /// Runs the statements, and commits. With `Writes::Discard` the first of them rolls back. They ask for `echo`.
    pub(crate) async fn commit_after(
        &mut self,
        mut statements: String,
        echo: Echo,
        writes: Writes,
    ) -> Result<(), sqlx::Error> {
        let is_counted = self.is_counted();
        if !is_counted {
            statements.push_str("COMMIT");
        } else if self.is_guarded {
            statements.push_str(UNGUARD);
        }
        match writes {
            Writes::Keep => echo.expect_in(&sqlx::raw_sql(AssertSqlSafe(statements)).fetch_all(&mut **self).await?)?,
            Writes::Discard => roll_back_by(self, &statements, echo).await?,
        }
        if is_counted {
            PgTransactionManager::commit(self).await?;
            self.is_guarded = false;
        }
        Ok(())
    }

    /// Whether sqlx has begun the transaction and can end it. It cannot when the handler has left a nested one open.
    fn is_counted(&self) -> bool {
        self.is_from_pool() && depth(self) == 1
    }

    /// Keeps the connection for the next handler; no transaction may be open on it. If sqlx's count of open transactions is
    /// wrong, or [`GUARD`] still holds, the connection is closed instead; see
    /// [`prepare`](crate::connect::handler_connection::prepare).
    pub(crate) fn give_back(mut self) {
        let depth = depth(&self);
        let is_as_before = match self.is_from_pool() {
            true => depth == 0 && !self.is_guarded,
            false => depth >= required_depth(self.pooled),
        };
        if is_as_before {
            self.keep();
        }
    }

    fn keep(&mut self) {
        match self.connection.take() {
            Some(SessionConnection::Own { connection, opened }) => self.idle.keep(connection, opened),
            // It goes back to its pool when it is dropped.
            Some(SessionConnection::Pool(_)) | None => {}
        }
    }

    /// Rolls back the transaction after the statements in `first`, and gives the session back. If that fails, the session is
    /// closed, which rolls back too.
    pub(crate) async fn roll_back_after(mut self, first: String) -> Result<(), StoreError> {
        let late = |_| StoreError::new(StoreErrorKind::Timeout, format!("no ROLLBACK within {ROLLBACK_TIMEOUT:?}"));
        let rolled_back = timeout(ROLLBACK_TIMEOUT, self.roll_back_by_statements(first)).await.map_err(late)?;
        rolled_back.map_err(|error| match error {
            error if is_out_of_transaction(&error) => out_of_transaction(error),
            error if is_out_of_step(&error) && !self.pooled => left_unread(error),
            error => outage("roll back", error),
        })?;
        self.give_back();
        Ok(())
    }

    async fn roll_back_by_statements(&mut self, mut first: String) -> Result<(), sqlx::Error> {
        let echo = Echo::random();
        let skipped = self.is_counted() && first.is_empty();
        if !self.is_counted() {
            first.push_str(&format!("{ROLLBACK};SELECT {}", echo.sql()));
            roll_back_by(self, &first, echo).await?;
        } else {
            if skipped {
                skip_errors(self).await?;
            } else {
                first.push_str(&format!("SELECT {}", echo.sql()));
                roll_back_by(self, &first, echo).await?;
            }
            PgTransactionManager::rollback(self).await?;
        }
        // What was skipped may have left the answers out of step.
        if self.is_guarded || skipped {
            let unguard = if self.is_guarded { UNGUARD } else { "" };
            own_rows(self, unguard.to_owned()).await?;
            self.is_guarded = false;
        }
        Ok(())
    }

    /// Closes the connection at once, even if the server still works on a statement.
    pub(crate) fn close_now(mut self) {
        self.close(Closing::Now);
    }

    /// Closes the connection when a COMMIT is answered, or cannot be waiting for a standby or the disk; see
    /// [`unanswered`](crate::connect::unanswered). It keeps its permit until then.
    pub(crate) fn close_when_answered(mut self) {
        self.close(Closing::Answered);
    }

    /// Closes the connection in a task.
    fn close(&mut self, when: Closing) {
        let Some(mut connection) = self.connection.take() else { return };
        // A handler may be dropped outside of its runtime.
        let _inside = self.runtime.enter();
        if let SessionConnection::Pool(connection) = &mut connection {
            connection.close_on_drop();
        }
        let permit = self.permit.take();
        let unanswered = Arc::clone(&self.unanswered);
        tokio::spawn(async move {
            if when == Closing::Answered {
                unanswered.wait(&mut connection).await;
            }
            let closing = async {
                if when == Closing::RolledBack {
                    // `close` keeps the server from logging a lost client.
                    let _ = sqlx::raw_sql(ROLLBACK).execute(&mut *connection).await;
                }
                connection.close().await;
            };
            let _ = timeout(CLOSE_TIMEOUT, closing).await;
            drop(permit);
        });
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.close(Closing::RolledBack);
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
