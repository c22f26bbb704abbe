//! The one writer: verbs that change records, in a task of its own.
//!
//! SQLite has one writer at a time, so writing verbs queue here instead of fighting for its lock. While one commit is
//! on its way, verbs that arrive gather, and the next commit takes them all (group commit): one sync to the disk
//! serves many verbs, and none waits longer than it would for its own. Since the task does the work, a caller that is
//! dropped midway leaves nothing half done.

use std::sync::Arc;
use std::time::Duration;

use idem_core::memory::Clock;
use idem_core::{
    Acquire, Checkpoint, Command, Origin, Outcome, OwnerAction, OwnerToken, Record, RecordId, Settlement, StoreError,
    StoreErrorKind, Term, Timestamp, machine,
};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection, SqliteConnection};
use tokio::sync::{mpsc, oneshot};

use crate::error::store_error;
use crate::row::{load, save};

/// The most verbs in one commit: enough to share a sync, few enough that the first is not kept waiting by the last.
const MAX_BATCH: usize = 128;

/// How many verbs may wait; further callers wait for room.
const QUEUE: usize = 1024;

/// A verb that may change a record: [`Command`], owned.
pub(crate) enum Verb {
    Acquire(Acquire),
    Renew(RecordId, OwnerToken, Term),
    Checkpoint(RecordId, OwnerToken, Checkpoint),
    Settle(RecordId, OwnerToken, Settlement, Duration),
}

impl Verb {
    fn command(&self) -> (&RecordId, Option<&Origin>, Command<'_>) {
        match self {
            Self::Acquire(request) => (&request.id, Some(&request.origin), Command::Acquire(request)),
            Self::Renew(id, owner, term) => (id, None, Command::Owner(*owner, OwnerAction::Renew(*term))),
            Self::Checkpoint(id, owner, checkpoint) => {
                (id, None, Command::Owner(*owner, OwnerAction::Checkpoint(checkpoint)))
            }
            Self::Settle(id, owner, settlement, retention) => {
                (id, None, Command::Owner(*owner, OwnerAction::Settle(settlement, *retention)))
            }
        }
    }
}

struct Job {
    verb: Verb,
    answer: oneshot::Sender<Result<Outcome, StoreError>>,
}

/// The way to the writer. The task ends when all clones are gone.
#[derive(Debug, Clone)]
pub(crate) struct Writer(mpsc::Sender<Job>);

impl Writer {
    pub(crate) fn start(options: SqliteConnectOptions, clock: Arc<dyn Clock>) -> Self {
        let (sender, jobs) = mpsc::channel(QUEUE);
        tokio::spawn(Task { connection: None, options, clock }.serve(jobs));
        Self(sender)
    }

    /// Hands a verb over and awaits its answer.
    pub(crate) async fn run(&self, verb: Verb) -> Result<Outcome, StoreError> {
        let (answer, answered) = oneshot::channel();
        let message = "the runtime in which the SQLite store was opened has ended";
        let gone = || StoreError::new(StoreErrorKind::Unavailable, message);
        self.0.send(Job { verb, answer }).await.map_err(|_| gone())?;
        answered.await.unwrap_or_else(|_| Err(gone().indeterminate()))
    }
}

struct Task {
    /// `None` before the first batch and after a failed one: the next begins on a new connection.
    connection: Option<SqliteConnection>,
    options: SqliteConnectOptions,
    clock: Arc<dyn Clock>,
}

impl Task {
    async fn serve(mut self, mut jobs: mpsc::Receiver<Job>) {
        let mut batch = Vec::with_capacity(MAX_BATCH);
        while jobs.recv_many(&mut batch, MAX_BATCH).await > 0 {
            // Whoever stopped waiting before its verb began does not want it any more.
            batch.retain(|job| !job.answer.is_closed());
            let answers = match self.commit(&batch).await {
                Ok(answers) => answers,
                Err(error) => {
                    tracing::warn!(error = &error as &dyn std::error::Error, verbs = batch.len(), "a commit failed");
                    batch.iter().map(|_| Err(copy(&error))).collect()
                }
            };
            for (job, answer) in batch.drain(..).zip(answers) {
                // Whoever stopped waiting since will ask again.
                let _ = job.answer.send(answer);
            }
        }
        if let Some(connection) = self.connection.take() {
            // Nothing is open on it; closing only tidies up the write-ahead log.
            let _ = connection.close().await;
        }
    }

    /// Does a batch in one transaction. A record that cannot be read is its own verb's error; anything else that goes
    /// wrong rolls back the whole batch, and the connection is not used again.
    async fn commit(&mut self, batch: &[Job]) -> Result<Vec<Result<Outcome, StoreError>>, StoreError> {
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.options.connect().await.map_err(|error| store_error("open the database", error))?,
        };
        let begun = sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut connection).await;
        begun.map_err(|error| store_error("begin a write", error))?;
        // Read after the lock was given: no other writer can have a later time.
        let now = self.clock.now();
        let mut answers = Vec::with_capacity(batch.len());
        for job in batch {
            let (id, origin, command) = job.verb.command();
            answers.push(match transition(&mut connection, id, origin, command, now).await {
                Err(error) if error.kind() != StoreErrorKind::Corrupt => return Err(error),
                answer => answer,
            });
        }
        let committed = sqlx::raw_sql("COMMIT").execute(&mut connection).await;
        committed.map_err(|error| store_error("commit", error).indeterminate())?;
        self.connection = Some(connection);
        Ok(answers)
    }
}

/// One step of the state machine on one row, inside a transaction that holds the write lock.
pub(crate) async fn transition(
    connection: &mut SqliteConnection,
    id: &RecordId,
    origin: Option<&Origin>,
    command: Command<'_>,
    now: Timestamp,
) -> Result<Outcome, StoreError> {
    let before: Option<Record> = load(connection, id).await?;
    let (next, outcome) = machine::transition(before.as_ref(), command, now);
    if next != before {
        save(connection, id, origin, next.as_ref()).await?;
    }
    Ok(outcome)
}

/// The same error for another caller; its source stays with the first, in the log.
fn copy(error: &StoreError) -> StoreError {
    let copy = StoreError::new(error.kind(), error.to_string());
    if error.is_indeterminate() { copy.indeterminate() } else { copy }
}
