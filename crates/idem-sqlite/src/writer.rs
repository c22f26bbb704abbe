//! The one writer: a task that runs the verbs that change records.
//!
//! SQLite has one writer at a time, so writing verbs queue here instead of competing for its lock. Verbs that arrive during a
//! commit gather, and the next commit takes them all (group commit). One sync to the disk serves many verbs, and none waits
//! longer than it would alone. The task does the work, so a caller that is dropped midway leaves nothing half done.
//!
//! It shares no code with the batcher of `idem-postgres`. That one sends one statement per batch over one of several
//! connections, and separates verbs that may not share a statement. This one runs each verb separately through the state
//! machine, in one transaction.
//!
//! The task may panic, for example in its clock, or end with its runtime. Its callers then get an error at once, and the next
//! caller starts it again.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::memory::Clock;
use idem_core::{
    Acquire, Checkpoint, Command, Erase, EraseOutcome, Lease, LeaseRenewer, Origin, Outcome, OwnerAction, OwnerOutcome,
    OwnerToken, RecordId, Resolution, Resolve, Settlement, StoreError, StoreErrorKind, StoredBody, Term, machine,
};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection, SqliteConnection};
use tokio::sync::{mpsc, oneshot};

use crate::error::store_error;
use crate::queue::Queue;
use crate::row::{Row, Source, load, save};

/// The most verbs in one commit: enough to share a sync, few enough that the first verb does not wait long for the last.
const MAX_BATCH: usize = 128;

/// The most bytes in one commit, unless a single verb has more. Each byte is in memory several times.
const MAX_BATCH_BYTES: usize = 4 * 1024 * 1024;

/// A verb that may change a record: [`Command`], owned.
pub(crate) enum Verb {
    Acquire(Acquire),
    Renew(RecordId, OwnerToken, Term),
    Checkpoint(RecordId, OwnerToken, Checkpoint),
    Settle(RecordId, OwnerToken, Settlement, Duration),
    Resolve(Box<Resolve>),
    Erase(Erase),
}

impl Verb {
    /// About how many bytes the verb carries.
    fn weight(&self) -> usize {
        match self {
            Self::Checkpoint(_, _, checkpoint) => checkpoint.data.len(),
            Self::Settle(
                _,
                _,
                Settlement::Completed(response)
                | Settlement::FailedTerminal(response)
                | Settlement::FailedRetryable { response, .. },
                _,
            ) => match &response.body {
                StoredBody::Retained(body) => body.len(),
                StoredBody::NotRetained => 0,
            },
            // Operators resolve few records at a time, each with an answer as large as a settlement's.
            Self::Resolve(request) => match &request.resolution {
                Resolution::Completed(response)
                | Resolution::FailedTerminal(response)
                | Resolution::FailedRetryable { response, .. } => match &response.body {
                    StoredBody::Retained(body) => body.len(),
                    StoredBody::NotRetained => 0,
                },
                Resolution::OutcomeUnknown => 0,
            },
            Self::Acquire(_) | Self::Renew(..) | Self::Settle(..) | Self::Erase(_) => 0,
        }
    }

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
            Self::Resolve(request) => (&request.id, None, Command::Resolve(request)),
            Self::Erase(request) => (&request.id, None, Command::Erase(request)),
        }
    }
}

pub(crate) struct Job {
    verb: Verb,
    answer: oneshot::Sender<Result<Outcome, StoreError>>,
}

/// A handle to the writer.
#[derive(Debug, Clone)]
pub(crate) struct Writer(Queue<Job>);

impl Writer {
    pub(crate) fn start(options: SqliteConnectOptions, clock: Arc<dyn Clock>) -> Self {
        let task = move || Task { connection: None, options: options.clone(), clock: Arc::clone(&clock) };
        Self(Queue::start(move |jobs| task().serve(jobs)))
    }

    /// Another writer on the current runtime, which opens its connection when it needs one.
    pub(crate) fn another(&self) -> Self {
        Self(self.0.another())
    }

    /// Runs a verb and awaits its outcome. If the caller is gone before its batch begins, the verb does not run.
    pub(crate) async fn run(&self, verb: Verb) -> Result<Outcome, StoreError> {
        self.0.ask(|answer| Job { verb, answer }).await?
    }

    /// Settles the run that holds `lease`.
    pub(crate) async fn settle(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError> {
        self.run_as_owner(Verb::Settle(lease.id, lease.owner, settlement.clone(), retention)).await
    }

    /// Runs a verb that only an owner may do.
    pub(crate) async fn run_as_owner(&self, verb: Verb) -> Result<OwnerOutcome, StoreError> {
        match self.run(verb).await? {
            Outcome::Owner(outcome) => Ok(outcome),
            Outcome::Acquire(_) | Outcome::Resolve(_) | Outcome::Erase(_) => Err(misanswered()),
        }
    }
}

#[async_trait]
impl LeaseRenewer for Writer {
    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.run_as_owner(Verb::Renew(lease.id, lease.owner, term)).await
    }
}

/// The error of an outcome for another verb: the state machine answers an acquire with an acquire's outcome, and an owner's
/// verb with an owner's.
pub(crate) fn misanswered() -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, "the writer answered another verb than it was asked").indeterminate()
}

struct Task {
    /// `None` before the first batch and after a failed one; the next batch opens a new connection.
    connection: Option<SqliteConnection>,
    options: SqliteConnectOptions,
    clock: Arc<dyn Clock>,
}

impl Task {
    async fn serve(mut self, mut jobs: mpsc::Receiver<Job>) {
        let mut waiting = Vec::with_capacity(MAX_BATCH);
        while jobs.recv_many(&mut waiting, MAX_BATCH).await > 0 {
            while !waiting.is_empty() {
                self.work(&mut waiting).await;
            }
        }
        if let Some(connection) = self.connection.take() {
            // The connection has no open transaction; closing it only tidies up the write-ahead log.
            let _ = connection.close().await;
        }
    }

    /// Runs as many verbs as fit into one commit.
    async fn work(&mut self, waiting: &mut Vec<Job>) {
        // A verb does not run if its caller has stopped waiting before.
        waiting.retain(|job| !job.answer.is_closed());
        let mut bytes = 0;
        let fits = waiting.iter().take_while(|job| {
            bytes += job.verb.weight();
            bytes <= MAX_BATCH_BYTES
        });
        let count = fits.count().max(1).min(waiting.len());
        let batch: Vec<Job> = waiting.drain(..count).collect();
        let answers = match self.commit(&batch).await {
            Ok(answers) => answers,
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, verbs = batch.len(), "a commit failed");
                batch.iter().map(|_| Err(error.clone())).collect()
            }
        };
        for (job, answer) in batch.into_iter().zip(answers) {
            // A caller that stopped waiting meanwhile will ask again.
            let _ = job.answer.send(answer);
        }
    }

    /// Commits a batch in one transaction. An error of the transaction rolls back the whole batch, and the connection is not
    /// used again.
    async fn commit(&mut self, batch: &[Job]) -> Result<Vec<Result<Outcome, StoreError>>, StoreError> {
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.options.connect().await.map_err(|error| store_error("open the database", error))?,
        };
        let verbs: Vec<_> = batch.iter().map(|job| job.verb.command()).collect();
        let erases = batch.iter().any(|job| matches!(job.verb, Verb::Erase(_)));
        if erases {
            erase_for_good(&mut connection).await.map_err(|error| store_error("prepare an erasure", error))?;
        }
        let answers = transitions(&mut connection, "BEGIN IMMEDIATE;", &verbs, self.clock.as_ref(), "COMMIT").await?;
        // The setting would make each further write dearer.
        self.connection = Some(connection).filter(|_| !erases);
        Ok(answers)
    }
}

/// Makes this connection overwrite what it removes or replaces. It would make each further write dearer: do not keep the connection.
pub(crate) async fn erase_for_good(connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
    sqlx::raw_sql("PRAGMA main.secure_delete = ON").execute(connection).await.map(drop)
}

/// Runs verbs through the state machine, one after another, on rows that are read and written once. That takes two exchanges
/// with the thread of the connection, however many verbs there are. `begin` takes the write lock, unless the connection has
/// it; `end` comes after the last write.
///
/// A record that cannot be read fails its own verbs only; any other error fails all verbs.
pub(crate) async fn transitions(
    connection: &mut SqliteConnection,
    begin: &str,
    verbs: &[(&RecordId, Option<&Origin>, Command<'_>)],
    clock: &dyn Clock,
    end: &str,
) -> Result<Vec<Result<Outcome, StoreError>>, StoreError> {
    let mut ids: Vec<RecordId> = verbs.iter().map(|(id, ..)| **id).collect();
    ids.sort_unstable();
    ids.dedup();
    let rows = load(connection, begin, &ids)
        .await
        .map_err(|error| store_error("begin a write, or read what it is about", error))?;
    // The clock is read under the write lock, so that no writer before this one has a later time.
    let now = clock.now();
    let mut changed = HashMap::<RecordId, Option<Row>>::new();
    let answers = verbs.iter().map(|(id, origin, command)| {
        let stored = rows.get(*id).map(Result::as_ref).transpose().map_err(StoreError::clone)?;
        let before = changed.get(*id).map_or(stored, Option::as_ref);
        let (next, outcome) = machine::transition(before.map(|row| &row.record), *command, now);
        if next.as_ref() != before.map(|row| &row.record) {
            // Only an acquire creates a record, and it has the origin. That of an expired record may be erased.
            let created_at = next.as_ref().map(|next| next.created_at);
            let kept = before.filter(|before| created_at == Some(before.record.created_at) || origin.is_none());
            let source = kept.map(|row| row.source.clone()).or_else(|| origin.map(Source::from));
            let source = source.map(|source| match outcome {
                Outcome::Erase(EraseOutcome::Erased) => source.erased(),
                _ => source,
            });
            let next = next.zip(source).map(|(record, source)| Row { record, source });
            changed.insert(**id, next);
        }
        Ok(outcome)
    });
    let answers = answers.collect();
    let (mut present, mut gone) = (Vec::new(), Vec::new());
    for (id, next) in changed {
        match next {
            Some(row) => present.push((id, row)),
            None => gone.push(id),
        }
    }
    let saved = save(connection, &present, &gone, end).await;
    saved.map_err(|error| match end {
        "" => store_error("write a record", error),
        // The error does not say which of the statements failed.
        _ => store_error("commit", error).indeterminate(),
    })?;
    Ok(answers)
}
