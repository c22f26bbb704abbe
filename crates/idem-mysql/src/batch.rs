//! Group commit: verbs that wait share a transaction.
//!
//! While the server works on a batch, arriving verbs wait in a queue, and the next batch takes them together: two round trips and one
//! sync to the disk for all of them. A verb that comes alone is a batch of one.
//!
//! A batch does what is usual: it makes new records, changes records under their locks, and gives answers that change nothing. It never
//! waits for a locked row. Everything else it leaves to the transaction of a single verb, whose caller runs it: a locked row, a
//! takeover, a step that an earlier try may have done, and each verb of a batch that failed. Each verb may be repeated with its owner
//! token (law L8), so that is safe also if the batch was committed and its answer was lost.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use idem_core::{
    Acquire, Checkpoint, Command, Outcome, OwnerAction, OwnerToken, Record, RecordId, Settlement, StoreError,
    StoreErrorKind, StoredBody, Term, Timestamp, machine,
};
use sqlx::Row as _;
use sqlx::mysql::MySqlRow;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::timeout;

use crate::error::{store_error, unreadable};
use crate::records::{Records, is_done, misanswered};
use crate::row;
use crate::session::Session;
use crate::sql::{NOW, Sql};
use crate::timeouts::VERB_TIMEOUT;

/// How many batches run at once: while one waits for the disk, the server works on the other.
const MOST_RUNNING: usize = 3;

/// How long a task that has answered several verbs lets their callers run first, at most.
const YIELD_TIMEOUT: Duration = Duration::from_millis(1);

/// The most verbs of a batch. With more, the first of them would wait long for the last.
const MOST_VERBS: usize = 64;

/// The most bytes of answers and checkpoints in a batch, unless one verb alone has more. Four of these, as hexadecimal digits, fit into
/// the smallest `max_allowed_packet` that `self_test` does not report.
const MOST_BYTES: usize = 512 * 1024;

/// Begins a transaction at the isolation level of the session, which is READ COMMITTED. A connection for verbs runs nothing else.
const BEGIN_BATCH: &str = "START TRANSACTION READ WRITE;";

/// Takes a row's lock unless another session has it.
const UNLESS_LOCKED: &str = " FOR UPDATE SKIP LOCKED;";

/// A verb, with all that it needs.
#[derive(Debug, Clone)]
pub(crate) enum Verb {
    Acquire(Acquire),
    Renew(OwnerToken, Term),
    Checkpoint(OwnerToken, Checkpoint),
    Settle(OwnerToken, Settlement, Duration),
}

impl Verb {
    pub(crate) fn command(&self) -> Command<'_> {
        match self {
            Self::Acquire(request) => Command::Acquire(request),
            Self::Renew(owner, term) => Command::Owner(*owner, OwnerAction::Renew(*term)),
            Self::Checkpoint(owner, checkpoint) => Command::Owner(*owner, OwnerAction::Checkpoint(checkpoint)),
            Self::Settle(owner, settlement, retention) => {
                Command::Owner(*owner, OwnerAction::Settle(settlement, *retention))
            }
        }
    }

    fn is_acquire(&self) -> bool {
        matches!(self, Self::Acquire(_))
    }

    /// About how many bytes it writes.
    fn bytes(&self) -> usize {
        match self {
            Self::Checkpoint(_, checkpoint) => checkpoint.data.len(),
            Self::Settle(
                _,
                Settlement::Completed(response)
                | Settlement::FailedTerminal(response)
                | Settlement::FailedRetryable { response, .. },
                _,
            ) => {
                let fields = response.headers.iter().map(|field| field.name.len() + field.value.len());
                let body = if let StoredBody::Retained(body) = &response.body { body.len() } else { 0 };
                fields.sum::<usize>() + body
            }
            Self::Settle(_, Settlement::OutcomeUnknown | Settlement::Released, _) => 0,
            Self::Acquire(_) | Self::Renew(..) => 0,
        }
    }
}

/// How a verb fared in a batch.
#[derive(Debug)]
pub(crate) enum Batched {
    Done(Outcome),
    /// It needs a transaction of its own.
    Alone {
        /// Whether the batch may have done it.
        may_be_done: bool,
    },
}

struct Job {
    id: RecordId,
    verb: Verb,
    answer: oneshot::Sender<Batched>,
}

/// Runs verbs in batches, in tasks on the runtime that opened the store. Clones share it.
#[derive(Clone)]
pub(crate) struct Batcher(Arc<Shared>);

struct Shared {
    records: Records,
    runtime: Handle,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<Job>,
    /// The records of the batches that run. Another verb on one of them waits, because it would find the record locked.
    in_flight: HashSet<RecordId>,
    running: usize,
}

impl Batcher {
    /// Must be called in the runtime that will run the batches.
    pub(crate) fn new(records: Records) -> Self {
        Self(Arc::new(Shared { records, runtime: Handle::current(), waiting: Mutex::default() }))
    }

    /// Runs a verb in the next batch.
    ///
    /// # Cancellation safety
    /// If the future is dropped, the batch may still do it.
    pub(crate) async fn run(&self, id: RecordId, verb: Verb) -> Batched {
        let (answer, answered) = oneshot::channel();
        let is_to_start = {
            let mut waiting = self.0.lock();
            waiting.jobs.push_back(Job { id, verb, answer });
            let is_to_start = waiting.running < MOST_RUNNING;
            waiting.running += usize::from(is_to_start);
            is_to_start
        };
        if is_to_start {
            let runner = Runner { shared: Arc::clone(&self.0), is_counted: true, in_flight: Vec::new() };
            self.0.runtime.spawn(runner.run());
        }
        // A task that ended early may have sent its statements.
        answered.await.unwrap_or(Batched::Alone { may_be_done: true })
    }
}

impl fmt::Debug for Batcher {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Batcher").field("running", &self.0.lock().running).finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // No change is left half done by a panic.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A task that runs batches until no verb waits.
struct Runner {
    shared: Arc<Shared>,
    is_counted: bool,
    in_flight: Vec<RecordId>,
}

impl Runner {
    async fn run(mut self) {
        while let Some(jobs) = self.next() {
            let is_busy = jobs.len() > 1;
            run_batch(&self.shared.records, jobs).await;
            if is_busy {
                // The callers that were answered come back with their next verbs, which the next batch takes.
                let _ = timeout(YIELD_TIMEOUT, yield_now()).await;
            }
        }
    }

    /// The verbs of the next batch, each on another record; `None` if there is none.
    fn next(&mut self) -> Option<Vec<Job>> {
        let shared = Arc::clone(&self.shared);
        let mut waiting = shared.lock();
        for id in self.in_flight.drain(..) {
            waiting.in_flight.remove(&id);
        }
        let (mut taken, mut passed_over, mut bytes) = (Vec::new(), VecDeque::new(), 0);
        while taken.len() < MOST_VERBS
            && let Some(job) = waiting.jobs.pop_front()
        {
            // Its caller has gone, and nothing was sent.
            if job.answer.is_closed() {
                continue;
            }
            let more = job.verb.bytes();
            if !taken.is_empty() && bytes + more > MOST_BYTES {
                passed_over.push_back(job);
                break;
            }
            if !waiting.in_flight.insert(job.id) {
                passed_over.push_back(job);
                continue;
            }
            bytes += more;
            self.in_flight.push(job.id);
            taken.push(job);
        }
        // They keep their turn.
        while let Some(job) = passed_over.pop_back() {
            waiting.jobs.push_front(job);
        }
        if taken.is_empty() {
            // Under the lock, so that the next verb starts a task. Those that were passed over are of tasks that go on.
            waiting.running -= 1;
            self.is_counted = false;
            return None;
        }
        Some(taken)
    }
}

/// After a panic, or with the end of its runtime.
impl Drop for Runner {
    fn drop(&mut self) {
        if !self.is_counted {
            return;
        }
        let mut waiting = self.shared.lock();
        for id in self.in_flight.drain(..) {
            waiting.in_flight.remove(&id);
        }
        waiting.running -= 1;
        // Nothing would run them. Their callers run them alone.
        let forsaken = if waiting.running == 0 { mem::take(&mut waiting.jobs) } else { VecDeque::new() };
        drop(waiting);
        drop(forsaken);
    }
}

/// Runs a batch, and answers its callers.
async fn run_batch(records: &Records, jobs: Vec<Job>) {
    let mut may_be_done = false;
    let done = timeout(VERB_TIMEOUT, try_batch(records, &jobs, &mut may_be_done)).await;
    let done = done.unwrap_or_else(|_| Err(StoreError::new(StoreErrorKind::Timeout, "a batch took too long")));
    match done {
        Ok(done) => {
            for (job, batched) in jobs.into_iter().zip(done) {
                // A caller that has gone repeats its verb.
                let _ = job.answer.send(batched);
            }
        }
        Err(error) => {
            tracing::debug!(
                verbs = jobs.len(),
                error = &error as &dyn std::error::Error,
                "a batch failed; each of its verbs is run alone"
            );
            for job in jobs {
                let _ = job.answer.send(Batched::Alone { may_be_done });
            }
        }
    }
}

/// Runs a batch in one transaction. After an error, nothing is done unless `may_be_done`.
async fn try_batch(records: &Records, jobs: &[Job], may_be_done: &mut bool) -> Result<Vec<Batched>, StoreError> {
    let failed = |error| store_error("run a batch of verbs", error);
    let mut session = Session::of(&records.pool).await.map_err(failed)?;
    let changes_rows = jobs.iter().any(|job| !job.verb.is_acquire());
    let mut sql = Sql::new(if changes_rows { BEGIN_BATCH } else { "" });
    let tables = &records.tables;
    tables.read_all(&mut sql, jobs.iter().filter(|job| job.verb.is_acquire()).map(|job| &job.id), ";");
    tables.read_all(&mut sql, jobs.iter().filter(|job| !job.verb.is_acquire()).map(|job| &job.id), UNLESS_LOCKED);
    sql.push("SELECT ").push(NOW);
    let rows = match session.run(sql).await {
        Ok(rows) => rows,
        Err(error) => {
            session.recover(&error).await;
            return Err(failed(error));
        }
    };
    let decided = decide(records, jobs, &rows).and_then(|(sql, decided)| {
        tables.expect_fits(&sql)?;
        Ok((sql, decided))
    });
    let (mut sql, decided) = match decided {
        Ok(decided) => decided,
        Err(error) => {
            if session.run(Sql::new("ROLLBACK")).await.is_ok() {
                session.give_back();
            }
            return Err(error);
        }
    };
    let has_changes = sql.len() > 0;
    match (has_changes, changes_rows) {
        // Without a transaction, one statement is all that is written: it makes new records.
        (true, false) => {}
        (true, true) => {
            sql.push("COMMIT");
        }
        (false, true) => {
            sql.push("ROLLBACK");
        }
        (false, false) => {
            session.give_back();
            return Ok(decided);
        }
    }
    *may_be_done = has_changes;
    match session.run(sql).await {
        Ok(_) => {
            session.give_back();
            Ok(decided)
        }
        // The answers stand; only locks were to be given back, and closing the session does that.
        Err(_) if !has_changes => Ok(decided),
        Err(error) => {
            *may_be_done = crate::error::may_be_done(&error);
            session.recover(&error).await;
            Err(failed(error))
        }
    }
}

/// Lets the state machine decide each verb, and writes the statements for what has changed.
fn decide(records: &Records, jobs: &[Job], rows: &[MySqlRow]) -> Result<(Sql, Vec<Batched>), StoreError> {
    let (time, rows) = rows.split_last().ok_or_else(misanswered)?;
    let now: i64 = time.try_get(0).map_err(unreadable)?;
    let now = Timestamp::from_unix_micros(now.saturating_add(records.offset.micros()));
    let mut found: HashMap<RecordId, Result<Record, StoreError>> = HashMap::with_capacity(rows.len());
    for read in rows {
        found.insert(row::id(read).map_err(unreadable)?, row::read(read));
    }
    let table = &records.tables.records;
    let (mut sql, mut new, mut changed) = (Sql::default(), Vec::new(), Vec::new());
    let decided = jobs.iter().map(|job| {
        let alone = Batched::Alone { may_be_done: false };
        let before = match found.get(&job.id) {
            None => None,
            Some(Ok(record)) => Some(record),
            // The transaction of the verb tells the error.
            Some(Err(_)) => return alone,
        };
        let (next, outcome) = machine::transition(before, job.verb.command(), now);
        match (&job.verb, before, next) {
            (Verb::Acquire(request), None, Some(next)) => new.push((job.id, &request.origin, next)),
            (_, Some(before), next) if next.as_ref() == Some(before) => {
                // An earlier try has done it, and its COMMIT may not be on the disk.
                if is_done(&outcome) {
                    return alone;
                }
            }
            // An acquire has no lock. A row that was not found is absent, or is locked.
            (Verb::Acquire(_), ..) | (_, None, _) => return alone,
            // It is left to the purge.
            (_, Some(before), _) if machine::current(Some(before), now).is_none() => return alone,
            (_, Some(before), Some(next)) => changed.push((job.id, before, next)),
            (_, Some(_), None) => row::delete(&mut sql, table, &job.id),
        }
        Batched::Done(outcome)
    });
    let decided = decided.collect();
    match &changed[..] {
        [] => {}
        // Columns that have not changed are not sent.
        [(id, before, next)] => row::update(&mut sql, table, id, before, next),
        changed => row::update_all(&mut sql, table, changed.iter().map(|(id, _, next)| (id, next))),
    }
    // In the order of their ids, so that batches of other processes do not wait for each other in a circle.
    new.sort_unstable_by_key(|(id, ..)| *id);
    if !new.is_empty() {
        row::insert(&mut sql, table, new.iter().map(|(id, origin, record)| (id, *origin, record)));
    }
    Ok((sql, decided))
}
