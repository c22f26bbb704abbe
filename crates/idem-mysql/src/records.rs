//! The verbs: read the row under its lock, let the state machine decide, write.
//!
//! No decision depends on a count of affected rows, because sqlx asks the server for *found* rows. The row itself is read.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use idem_core::{
    Acquire, AcquireOutcome, Command, EraseOutcome, Origin, Outcome, OwnerAction, OwnerOutcome, OwnerToken, Record,
    RecordId, ResolveOutcome, StoreError, StoreErrorKind, TimeOffset, Timestamp, machine,
};
use sqlx::mysql::MySqlRow;
use sqlx::{MySqlPool, Row as _};
use tokio::time::timeout;

use crate::error::{TOO_LARGE, is_connection_useless, is_contended, may_be_done, store_error, unreadable};
use crate::row::{self, columns, columns_of_many};
use crate::server::Settings;
use crate::session::Session;
use crate::sql::{BEGIN, NOW, Sql, quoted};
use crate::timeouts::{SETTLEMENT_LOCK_WAIT, VERB_TIMEOUT};

/// How often a verb is repeated that other sessions were in the way of, in addition to each connection that the server may have
/// closed unnoticed. Each time one of them has made progress.
const ROUNDS: u32 = 10;

/// The tables of the store.
#[derive(Debug)]
pub(crate) struct Tables {
    pub(crate) records: String,
    pub(crate) repairs: String,
    pub(crate) identity: String,
    /// The database itself, not quoted.
    pub(crate) database: String,
    columns: String,
    /// What a batch reads.
    columns_of_many: String,
    /// Locks the row of a settlement. On MariaDB it waits for [`SETTLEMENT_LOCK_WAIT`] at most.
    pub(crate) settlement_lock: String,
    /// The server's `max_allowed_packet`, in bytes.
    max_packet: AtomicUsize,
}

impl Tables {
    pub(crate) fn new(database: String, settings: &Settings) -> Self {
        let place = quoted(&database);
        let settlement_lock = match settings.is_mariadb() {
            true => format!("{FOR_UPDATE} WAIT {}", SETTLEMENT_LOCK_WAIT.as_secs()),
            false => FOR_UPDATE.to_owned(),
        };
        Self {
            records: format!("{place}.idem_records"),
            repairs: format!("{place}.idem_repairs"),
            identity: format!("{place}.idem_identity"),
            database,
            columns: columns(),
            columns_of_many: columns_of_many(),
            settlement_lock,
            max_packet: AtomicUsize::new(settings.max_packet()),
        }
    }

    pub(crate) fn set_max_packet(&self, bytes: usize) {
        self.max_packet.store(bytes, Ordering::Relaxed);
    }

    /// Refuses a message that the server would answer by closing the connection.
    pub(crate) fn expect_fits(&self, sql: &Sql) -> Result<(), StoreError> {
        // One byte is the kind of the message, and COMMIT follows the statements.
        if sql.len() + 1 + HANDLER_COMMIT.len() < self.max_packet.load(Ordering::Relaxed) {
            return Ok(());
        }
        Err(StoreError::new(StoreErrorKind::Capacity, format!("could not write a record: {TOO_LARGE}")))
    }

    /// The statements that read a record and then the time. `lock` is empty, or locks the row.
    pub(crate) fn read(&self, sql: &mut Sql, id: &RecordId, lock: &str) {
        sql.push("SELECT ").push(&self.columns).push(" FROM ").push(&self.records).push(" WHERE id=");
        sql.bytes(id.as_bytes()).push(lock).push(";SELECT ").push(NOW);
    }

    /// The statement that reads these records with their ids, in any order; none without ids. `end` ends it, and may lock the rows.
    /// Of a large answer it says only that it is there, because other verbs wait for the whole message.
    pub(crate) fn read_all<'a>(&self, sql: &mut Sql, ids: impl Iterator<Item = &'a RecordId>, end: &str) {
        let mut is_first = true;
        for id in ids {
            if is_first {
                sql.push("SELECT ")
                    .push(&self.columns_of_many)
                    .push(" FROM ")
                    .push(&self.records)
                    .push(" WHERE id IN (");
            }
            sql.push(if is_first { "" } else { "," }).bytes(id.as_bytes());
            is_first = false;
        }
        if !is_first {
            sql.push(")").push(end);
        }
    }

    /// The statements by which COMMIT confirms that a row, locked before, is on the disk. They leave it as it is.
    ///
    /// InnoDB frees the locks of a transaction, and shows its rows to others, before it syncs the commit. If the server or its
    /// machine stops in between, the commit is lost. COMMIT of a later write syncs all before it.
    fn confirm(&self, sql: &mut Sql, id: &RecordId) {
        for step in ["+1", "-1"] {
            sql.push("UPDATE ").push(&self.records).push(" SET updated_at=updated_at").push(step).push(" WHERE id=");
            sql.bytes(id.as_bytes()).push(";");
        }
    }
}

/// Locks the row that is read until the transaction ends.
pub(crate) const FOR_UPDATE: &str = " FOR UPDATE";

const COMMIT: &str = "COMMIT";

/// The same in a session whose `completion_type` a handler may have changed.
pub(crate) const HANDLER_COMMIT: &str = "COMMIT AND NO CHAIN NO RELEASE";

/// A record as it was read, and the time after that.
pub(crate) struct Found {
    pub(crate) record: Option<Record>,
    pub(crate) now: Timestamp,
}

impl Found {
    pub(crate) fn of(rows: &[MySqlRow], offset: &TimeOffset) -> Result<Self, StoreError> {
        let Some((time, record)) = rows.split_last() else { return Err(misanswered()) };
        let now: i64 = time.try_get(0).map_err(unreadable)?;
        let record = record.first().map(row::read).transpose()?;
        Ok(Self { record, now: Timestamp::from_unix_micros(now.saturating_add(offset.micros())) })
    }

    /// Runs the command through the state machine. Returns the outcome, and the statements that write the next record if it
    /// differs.
    pub(crate) fn decide(
        &self,
        tables: &Tables,
        id: &RecordId,
        origin: Option<&Origin>,
        command: Command<'_>,
    ) -> Result<(Option<Sql>, Outcome), StoreError> {
        let before = self.record.as_ref();
        let (next, outcome) = machine::transition(before, command, self.now);
        let mut sql = Sql::default();
        match (before, &next) {
            (None, None) => return Ok((None, outcome)),
            (Some(before), Some(next)) if before == next => return Ok((None, outcome)),
            // An acquire makes a new record in the place of an expired one, whose principal may be erased.
            (Some(_), Some(next)) if machine::current(before, self.now).is_none() => {
                row::delete(&mut sql, &tables.records, id);
                row::insert(&mut sql, &tables.records, [(id, origin.ok_or_else(misanswered)?, next)]);
            }
            (Some(before), Some(next)) => row::update(&mut sql, &tables.records, id, before, next),
            // Only an acquire creates a record, and it has the origin.
            (None, Some(next)) => {
                row::insert(&mut sql, &tables.records, [(id, origin.ok_or_else(misanswered)?, next)]);
            }
            // It is left to the purge. A settlement under a lease that is over must find nothing to write.
            (Some(before), None) if machine::current(Some(before), self.now).is_none() => return Ok((None, outcome)),
            (Some(_), None) => row::delete(&mut sql, &tables.records, id),
        }
        if let (Command::Erase(request), Outcome::Erase(EraseOutcome::Erased)) = (command, &outcome) {
            row::erase_principal(&mut sql, &tables.records, &tables.repairs, request);
        }
        Ok((Some(sql), outcome))
    }
}

/// How a step of the state machine ended that was tried once.
enum Tried {
    Done(Outcome),
    /// Other sessions were in the way, or the connection was lost before anything was written. Nothing is done.
    InTheWay(sqlx::Error),
}

/// What a look at the record says to an acquire.
pub(crate) enum Look {
    /// The answer, which changes nothing and grants nothing, as for most repeats.
    Answered(AcquireOutcome),
    /// The record has to be made, changed or confirmed.
    Open {
        /// Whether there is a record of another run. Then no error may let the operation run without protection.
        has_other_run: bool,
    },
}

/// Runs verbs on connections of a pool. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Records {
    pub(crate) pool: MySqlPool,
    pub(crate) tables: Arc<Tables>,
    pub(crate) offset: TimeOffset,
}

impl Records {
    /// The record with this id, expired or not, and the time.
    pub(crate) async fn read(&self, id: &RecordId) -> Result<Found, StoreError> {
        let mut sql = Sql::default();
        self.tables.read(&mut sql, id, "");
        let rows = self.fetch("read a record", sql).await?;
        Found::of(&rows, &self.offset)
    }

    /// Like [`read`](Self::read), and also confirms that what is read is on the disk. It waits for a transaction that changes the
    /// record.
    pub(crate) async fn read_confirmed(&self, id: &RecordId) -> Result<Found, StoreError> {
        let mut sql = Sql::new(BEGIN);
        self.tables.read(&mut sql, id, FOR_UPDATE);
        sql.push(";");
        self.tables.confirm(&mut sql, id);
        sql.push(COMMIT);
        let rows = self.fetch("read a record", sql).await?;
        Found::of(&rows, &self.offset)
    }

    /// Runs statements that leave all as it is. They are repeated on another connection if theirs was lost.
    pub(crate) async fn fetch(&self, what: &str, sql: Sql) -> Result<Vec<MySqlRow>, StoreError> {
        let text = sql.into_text();
        self.within(what, async {
            let mut rounds = self.rounds();
            loop {
                let mut session = Session::of(&self.pool).await.map_err(|error| store_error(what, error))?;
                match session.run(Sql::new(text.clone())).await {
                    Ok(rows) => {
                        session.give_back();
                        return Ok(rows);
                    }
                    Err(error) if is_connection_useless(&error) && rounds > 1 => rounds -= 1,
                    Err(error) => {
                        session.recover(&error).await;
                        return Err(store_error(what, error));
                    }
                }
            }
        })
        .await
    }

    /// How often a message is repeated; at least once.
    pub(crate) fn rounds(&self) -> u32 {
        ROUNDS.saturating_add(self.pool.size())
    }

    /// One step of the state machine, in one transaction. It is repeated if other sessions were in the way.
    pub(crate) async fn transition(
        &self,
        id: &RecordId,
        origin: Option<&Origin>,
        command: Command<'_>,
    ) -> Result<Outcome, StoreError> {
        self.within("write a record", async {
            let mut rounds = self.rounds();
            loop {
                rounds -= 1;
                match self.try_transition(id, origin, command).await? {
                    Tried::Done(outcome) => return Ok(outcome),
                    Tried::InTheWay(error) if rounds == 0 => return Err(store_error("write a record", error)),
                    Tried::InTheWay(_) => {}
                }
            }
        })
        .await
    }

    async fn try_transition(
        &self,
        id: &RecordId,
        origin: Option<&Origin>,
        command: Command<'_>,
    ) -> Result<Tried, StoreError> {
        let mut session = Session::of(&self.pool).await.map_err(|error| store_error("write a record", error))?;
        let mut sql = Sql::new(BEGIN);
        self.tables.read(&mut sql, id, FOR_UPDATE);
        let rows = match session.run(sql).await {
            Ok(rows) => rows,
            Err(error) => {
                session.recover(&error).await;
                let again = is_contended(&error) || is_connection_useless(&error);
                return if again { Ok(Tried::InTheWay(error)) } else { Err(store_error("lock a record", error)) };
            }
        };
        let decided = Found::of(&rows, &self.offset).and_then(|found| {
            let (sql, outcome) = found.decide(&self.tables, id, origin, command)?;
            sql.as_ref().map_or(Ok(()), |sql| self.tables.expect_fits(sql))?;
            Ok((sql, outcome))
        });
        let (sql, outcome) = match decided {
            Ok((Some(mut sql), outcome)) => {
                sql.push(COMMIT);
                (sql, Ok(outcome))
            }
            // An earlier try has done it, and its COMMIT may not be on the disk.
            Ok((None, outcome)) if is_done(&outcome) => {
                let mut sql = Sql::default();
                self.tables.confirm(&mut sql, id);
                sql.push(COMMIT);
                (sql, Ok(outcome))
            }
            Ok((None, outcome)) => (Sql::new("ROLLBACK"), Ok(outcome)),
            Err(error) => (Sql::new("ROLLBACK"), Err(error)),
        };
        match session.run(sql).await {
            Ok(_) => {
                session.give_back();
                outcome.map(Tried::Done)
            }
            // Nothing was to be written.
            Err(_) if outcome.is_err() => outcome.map(Tried::Done),
            Err(error) => {
                session.recover(&error).await;
                if is_contended(&error) {
                    return Ok(Tried::InTheWay(error));
                }
                let is_unknown = may_be_done(&error);
                let error = store_error("commit", error);
                Err(if is_unknown { error.indeterminate() } else { error })
            }
        }
    }

    /// Looks for the answer to a request without taking a lock.
    pub(crate) async fn look(&self, request: &Acquire) -> Result<Look, StoreError> {
        let found = self.read(&request.id).await?;
        let (next, outcome) = machine::acquire(found.record.as_ref(), request, found.now);
        // What an earlier try has acquired is confirmed before it runs.
        if next == found.record && !matches!(outcome, AcquireOutcome::Acquired(_)) {
            return Ok(Look::Answered(outcome));
        }
        let current = machine::current(found.record.as_ref(), found.now);
        Ok(Look::Open { has_other_run: current.is_some_and(|record| record.owner != request.owner) })
    }

    pub(crate) async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        match self.transition(&request.id, Some(&request.origin), Command::Acquire(request)).await? {
            Outcome::Acquire(outcome) => Ok(outcome),
            Outcome::Owner(_) | Outcome::Resolve(_) | Outcome::Erase(_) => Err(misanswered()),
        }
    }

    /// Does what only the owner of a record may do.
    pub(crate) async fn act(
        &self,
        id: &RecordId,
        owner: OwnerToken,
        action: OwnerAction<'_>,
    ) -> Result<OwnerOutcome, StoreError> {
        owner_outcome(self.transition(id, None, Command::Owner(owner, action)).await?)
    }

    /// Gives up after [`VERB_TIMEOUT`]. Whether something was done is then unknown.
    async fn within<T>(&self, what: &str, work: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        timeout(VERB_TIMEOUT, work).await.unwrap_or_else(|_| {
            let message = format!("could not {what}: the server did not answer within {VERB_TIMEOUT:?}");
            Err(StoreError::new(StoreErrorKind::Timeout, message))
        })
    }
}

/// Whether the command was done, now or by an earlier try.
pub(crate) fn is_done(outcome: &Outcome) -> bool {
    matches!(
        outcome,
        Outcome::Acquire(AcquireOutcome::Acquired(_))
            | Outcome::Owner(OwnerOutcome::Applied)
            | Outcome::Resolve(ResolveOutcome::Resolved)
            | Outcome::Erase(EraseOutcome::Erased)
    )
}

/// The outcome of an owner's action.
pub(crate) fn owner_outcome(outcome: Outcome) -> Result<OwnerOutcome, StoreError> {
    match outcome {
        Outcome::Owner(outcome) => Ok(outcome),
        Outcome::Acquire(_) | Outcome::Resolve(_) | Outcome::Erase(_) => Err(misanswered()),
    }
}

/// The error of an outcome for another verb, or of rows that a statement does not return.
pub(crate) fn misanswered() -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, "the server answered something else than it was asked").indeterminate()
}
