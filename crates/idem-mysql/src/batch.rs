//! Group commit: verbs that wait share a transaction.
//!
//! While the server works on a batch, arriving verbs wait in a queue, and the next batch takes them together: two round trips and one
//! sync to the disk for all of them. A verb that comes alone is a batch of one.
//!
//! A batch does what is usual: it makes new records, changes records under their locks, and gives answers that change nothing. It does
//! not wait for a locked row, but for a second at most for a record that another process is just making. Everything else it leaves to the transaction of a single verb, whose caller runs it: a locked row, a
//! takeover, a step that an earlier try may have done, and each verb of a batch that failed. Each verb may be repeated with its owner
//! token (law L8), so that is safe also if the batch was committed and its answer was lost.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fmt;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use idem_core::{
    Acquire, Checkpoint, Command, Origin, Outcome, OwnerAction, OwnerToken, Record, RecordId, Settlement, StoreError,
    StoreErrorKind, StoredBody, Term, Timestamp, machine,
};
use sqlx::Row as _;
use sqlx::mysql::MySqlRow;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::timeout;

use crate::error::{is_in_the_way, may_be_done, store_error, unreadable};
use crate::records::{Records, is_done, misanswered};
use crate::row;
use crate::session::Session;
use crate::sql::{BEGIN, NOW, Sql};
use crate::timeouts::VERB_TIMEOUT;

/// How many batches run at once: while one waits for the disk, the server works on the other.
pub(crate) const MOST_RUNNING: u32 = 3;

/// How long a task that has answered several verbs lets their callers run first, at most.
const YIELD_TIMEOUT: Duration = Duration::from_millis(1);

/// The most verbs of a batch. With more, the first of them would wait long for the last.
const MOST_VERBS: usize = 64;

/// The most bytes of answers and checkpoints in a batch, unless one verb alone has more. Four of these, as hexadecimal digits, fit into
/// the smallest `max_allowed_packet` that `self_test` does not report.
const MOST_BYTES: usize = 512 * 1024;

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
#[derive(Debug, Clone)]
pub(crate) enum Batched {
    Done(Outcome),
    /// It needs its own transaction.
    Alone {
        seen: Seen,
        /// Why the batch was not done, if it was tried.
        error: Option<StoreError>,
    },
}

impl Batched {
    fn alone(seen: Seen) -> Self {
        Self::Alone { seen, error: None }
    }
}

/// What the batch knows of a verb that it has not done.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Seen {
    /// The batch may have done it.
    pub(crate) may_be_done: bool,
    /// There is a record of another run, so the operation must not run without protection.
    pub(crate) has_other_run: bool,
}

impl Seen {
    /// All that both know.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            may_be_done: self.may_be_done || other.may_be_done,
            has_other_run: self.has_other_run || other.has_other_run,
        }
    }

    /// What an error says after this.
    pub(crate) fn flag(self, error: StoreError) -> StoreError {
        let error = if self.may_be_done { error.indeterminate() } else { error };
        if self.has_other_run { error.with_existing_record() } else { error }
    }
}

struct Job {
    id: RecordId,
    verb: Verb,
    claim: Claim,
    answer: oneshot::Sender<Batched>,
}

/// Who decides on a verb: its caller may take it back until the batch writes it.
#[derive(Debug, Clone, Default)]
struct Claim(Arc<AtomicBool>);

impl Claim {
    /// Whether this is the first one to take it.
    fn take(&self) -> bool {
        !self.0.swap(true, Ordering::SeqCst)
    }
}

/// A verb in a batch, which is awaited by [`answer`](Self::answer).
pub(crate) struct Ticket {
    claim: Claim,
    answered: oneshot::Receiver<Batched>,
}

impl Ticket {
    /// How the verb fared. It may be awaited again if the future is dropped.
    pub(crate) async fn answer(&mut self) -> Batched {
        // A task that ended early may have sent its statements.
        let unknown = Seen { may_be_done: true, has_other_run: false };
        (&mut self.answered).await.unwrap_or(Batched::alone(unknown))
    }

    /// Takes the verb back. False if the batch writes it, or has written it.
    pub(crate) fn take_back(&self) -> bool {
        self.claim.take()
    }
}

impl Job {
    /// A caller that has gone repeats its verb.
    fn answer(self, batched: Batched) {
        let _ = self.answer.send(batched);
    }
}

/// Runs verbs in batches, in tasks on the runtime that opened the store. Clones share it.
#[derive(Clone)]
pub(crate) struct Batcher(Arc<Shared>);

struct Shared {
    records: Records,
    runtime: Handle,
    most_running: usize,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<Job>,
    /// The records of the batches that run. Another verb on one of them waits, because it would find the record locked or half made.
    in_flight: HashSet<RecordId>,
    running: usize,
}

impl Batcher {
    /// Must be called in the runtime that will run the batches, at most `most_running` at once.
    pub(crate) fn new(records: Records, most_running: usize) -> Self {
        Self(Arc::new(Shared { records, runtime: Handle::current(), most_running, waiting: Mutex::default() }))
    }

    /// Where the batches run.
    pub(crate) fn runtime(&self) -> &Handle {
        &self.0.runtime
    }

    /// Runs a verb in the next batch. If the ticket is dropped, the batch may still do it.
    pub(crate) fn submit(&self, id: RecordId, verb: Verb) -> Ticket {
        let (answer, answered) = oneshot::channel();
        let claim = Claim::default();
        let is_to_start = {
            let mut waiting = self.0.lock();
            waiting.jobs.push_back(Job { id, verb, claim: claim.clone(), answer });
            let is_to_start = waiting.running < self.0.most_running;
            waiting.running += usize::from(is_to_start);
            is_to_start
        };
        if is_to_start {
            let runner = Runner { shared: Arc::clone(&self.0), is_counted: true, in_flight: Vec::new() };
            self.0.runtime.spawn(runner.run());
        }
        Ticket { claim, answered }
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

    /// The verbs of the next batch, each on another record, but for acquires; `None` if there is none.
    fn next(&mut self) -> Option<Vec<Job>> {
        let shared = Arc::clone(&self.shared);
        let mut waiting = shared.lock();
        for id in self.in_flight.drain(..) {
            waiting.in_flight.remove(&id);
        }
        let (mut taken, mut passed_over, mut acquired) = (Vec::new(), VecDeque::new(), HashSet::new());
        let mut bytes = 0;
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
            // Acquires of one record share a batch, as many repeats come at once.
            let shares = job.verb.is_acquire() && acquired.contains(&job.id);
            if !shares && !waiting.in_flight.insert(job.id) {
                passed_over.push_back(job);
                continue;
            }
            if !shares {
                self.in_flight.push(job.id);
            }
            if job.verb.is_acquire() {
                acquired.insert(job.id);
            }
            bytes += more;
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
        for job in forsaken {
            job.answer(Batched::alone(Seen::default()));
        }
    }
}

/// Runs a batch, and answers its callers.
///
/// If a new record was made elsewhere meanwhile, the verbs that make new records are left to their callers, and the others are tried once
/// more.
async fn run_batch(records: &Records, jobs: Vec<Job>) {
    let Err((error, rest)) = run_once(records, jobs).await else { return };
    let (new, rest): (Vec<_>, Vec<_>) = rest.into_iter().partition(|job| job.verb.is_acquire());
    // If one of them is the reason, it has met a record of another run; the server does not say which one.
    let seen = Seen { may_be_done: false, has_other_run: true };
    let is_to_try = !new.is_empty();
    for job in new {
        job.answer(Batched::Alone { seen, error: Some(error.clone()) });
    }
    let rest = match is_to_try && !rest.is_empty() {
        true => run_once(records, rest).await.err(),
        false => Some((error, rest)),
    };
    if let Some((error, jobs)) = rest {
        for job in jobs {
            job.answer(Batched::Alone { seen: Seen::default(), error: Some(error.clone()) });
        }
    }
}

/// Runs a batch, and answers its verbs.
///
/// # Errors
/// The verbs that other sessions were in the way of. Nothing of them is done.
async fn run_once(records: &Records, jobs: Vec<Job>) -> Result<(), (StoreError, Vec<Job>)> {
    let mut batch = Batch { records, jobs, written: Vec::new(), after: Vec::new(), may_be_done: false };
    let ran = timeout(VERB_TIMEOUT, batch.run()).await;
    let Batch { jobs, written, after, may_be_done, .. } = batch;
    // The locks of the batch are free now.
    for (job, seen) in after {
        job.answer(Batched::alone(seen));
    }
    let error = match ran {
        Ok(Ok(())) => {
            jobs.into_iter().zip(written).for_each(|(job, outcome)| job.answer(Batched::Done(outcome)));
            return Ok(());
        }
        Ok(Err(Failed::InTheWay(error))) => {
            tracing::debug!(error = &error as &dyn std::error::Error, "other sessions were in the way of a batch");
            return Err((error, jobs));
        }
        Ok(Err(Failed::Else(error))) => error,
        Err(_) => StoreError::new(StoreErrorKind::Timeout, format!("a batch took longer than {VERB_TIMEOUT:?}")),
    };
    tracing::debug!(
        verbs = jobs.len(),
        error = &error as &dyn std::error::Error,
        "a batch failed; each of its verbs is run alone"
    );
    let seen = Seen { may_be_done, has_other_run: false };
    for job in jobs {
        job.answer(Batched::Alone { seen, error: Some(error.clone()) });
    }
    Ok(())
}

/// Why a batch was not done.
enum Failed {
    /// Other sessions were in the way, and nothing is done.
    InTheWay(StoreError),
    Else(StoreError),
}

/// A batch that runs.
struct Batch<'a> {
    records: &'a Records,
    /// The verbs that are not answered. After the decision these are those that write something.
    jobs: Vec<Job>,
    /// Their outcomes, in the same order.
    written: Vec<Outcome>,
    /// Verbs of owners that need their own transactions, and would wait for the locks of this one.
    after: Vec<(Job, Seen)>,
    may_be_done: bool,
}

impl Batch<'_> {
    /// Runs it in one transaction. Verbs that write nothing are answered before the others are committed.
    async fn run(&mut self) -> Result<(), Failed> {
        let failed = |error| Failed::Else(store_error("run a batch of verbs", error));
        let mut session = Session::of(&self.records.pool).await.map_err(failed)?;
        let (tables, has_owners) = (&self.records.tables, self.jobs.iter().any(|job| !job.verb.is_acquire()));
        let mut sql = Sql::new(if has_owners { BEGIN } else { "" });
        let ids = |is_acquire: bool| {
            self.jobs.iter().filter(move |job| job.verb.is_acquire() == is_acquire).map(|job| &job.id)
        };
        tables.read_all(&mut sql, ids(true), ";");
        tables.read_all(&mut sql, ids(false), UNLESS_LOCKED);
        sql.push("SELECT ").push(NOW);
        let rows = match session.run(sql).await {
            Ok(rows) => rows,
            Err(error) => {
                session.recover(&error).await;
                return Err(failed(error));
            }
        };
        let sql = match self.decide(&rows) {
            Ok(sql) => sql,
            Err(error) => {
                session.roll_back().await;
                return Err(Failed::Else(error));
            }
        };
        let sql = match (sql, has_owners) {
            (None, false) => {
                session.give_back();
                return Ok(());
            }
            (None, true) => {
                session.roll_back().await;
                return Ok(());
            }
            (Some(sql), has_owners) => {
                let mut message = Sql::new(if has_owners { "" } else { BEGIN });
                message.push(sql.text_so_far()).push("COMMIT");
                message
            }
        };
        self.may_be_done = true;
        match session.run(sql).await {
            Ok(_) => {
                session.give_back();
                Ok(())
            }
            Err(error) => {
                self.may_be_done = may_be_done(&error);
                let is_in_the_way = !self.may_be_done && is_in_the_way(&error);
                session.recover(&error).await;
                Err(if is_in_the_way {
                    Failed::InTheWay(store_error("run a batch of verbs", error))
                } else {
                    failed(error)
                })
            }
        }
    }

    /// Lets the state machine decide each verb, answers those that write nothing, and returns the statements of the others.
    fn decide(&mut self, rows: &[MySqlRow]) -> Result<Option<Sql>, StoreError> {
        let (time, rows) = rows.split_last().ok_or_else(misanswered)?;
        let now: i64 = time.try_get(0).map_err(unreadable)?;
        let now = Timestamp::from_unix_micros(now.saturating_add(self.records.offset.micros()));
        let mut found = HashMap::with_capacity(rows.len());
        for read in rows {
            let record = if row::is_whole(read).map_err(unreadable)? { row::read(read).ok() } else { None };
            found.insert(row::id(read).map_err(unreadable)?, record);
        }
        let mut changes = Changes::default();
        let mut written = Vec::new();
        for job in mem::take(&mut self.jobs) {
            let before = match found.get(&job.id) {
                // The transaction of the verb reads it, or tells its error.
                Some(None) => {
                    self.alone(job, Seen { may_be_done: false, has_other_run: true });
                    continue;
                }
                Some(Some(record)) => Some(record),
                // An acquire before this one makes it.
                None => changes.new.get(&job.id).map(|(_, record)| record),
            };
            let is_new = changes.new.contains_key(&job.id);
            let current = before.filter(|before| machine::current(Some(before), now).is_some());
            let has_other_run = match &job.verb {
                Verb::Acquire(request) => current.is_some_and(|record| record.owner != request.owner),
                _ => false,
            };
            let alone = Seen { may_be_done: false, has_other_run: has_other_run && !is_new };
            let (next, outcome) = machine::transition(before, job.verb.command(), now);
            let is_unchanged = next.as_ref() == before;
            match (&job.verb, before, next) {
                // It holds if the batch is committed.
                _ if is_new && is_unchanged && !is_done(&outcome) => written.push((job, outcome)),
                // An earlier try has done it, and its COMMIT may not be on the disk. Without a row, one may be locked.
                _ if is_new || (is_unchanged && is_done(&outcome)) => self.alone(job, alone),
                (_, Some(_), _) if is_unchanged => job.answer(Batched::Done(outcome)),
                // Nothing is written for a caller that has gone, or has taken it back.
                (Verb::Acquire(request), None, Some(next)) if !job.answer.is_closed() && job.claim.take() => {
                    changes.new.insert(job.id, (request.origin.clone(), next));
                    written.push((job, outcome));
                }
                // An acquire has no lock. A row that was not found is absent, or is locked. One that is over is left to the purge.
                (Verb::Acquire(_), ..) | (_, None, _) => self.alone(job, alone),
                _ if current.is_none() => self.alone(job, alone),
                (_, Some(before), Some(next)) => {
                    changes.changed.push((job.id, before.clone(), next));
                    written.push((job, outcome));
                }
                (_, Some(_), None) => {
                    changes.removed.push(job.id);
                    written.push((job, outcome));
                }
            }
        }
        (self.jobs, self.written) = written.into_iter().unzip();
        if self.jobs.is_empty() {
            return Ok(None);
        }
        let sql = changes.into_sql(&self.records.tables.records);
        self.records.tables.expect_fits(&sql)?;
        Ok(Some(sql))
    }

    /// Leaves a verb to its caller, at once unless this batch may hold the lock of its record.
    fn alone(&mut self, job: Job, seen: Seen) {
        if job.verb.is_acquire() {
            job.answer(Batched::alone(seen));
        } else {
            self.after.push((job, seen));
        }
    }
}

/// What a batch writes.
#[derive(Default)]
struct Changes {
    /// In the order of their ids, so that batches of other processes do not wait for each other in a circle.
    new: BTreeMap<RecordId, (Origin, Record)>,
    changed: Vec<(RecordId, Record, Record)>,
    removed: Vec<RecordId>,
}

impl Changes {
    fn into_sql(self, table: &str) -> Sql {
        let mut sql = Sql::default();
        if !self.new.is_empty() {
            row::insert(&mut sql, table, self.new.iter().map(|(id, (origin, record))| (id, origin, record)));
        }
        // A checkpoint may be large, and few verbs change it.
        let (kept, changed): (Vec<_>, Vec<_>) =
            self.changed.into_iter().partition(|(_, before, next)| before.checkpoint == next.checkpoint);
        for changed in [kept, changed] {
            match &changed[..] {
                [] => {}
                // Columns that have not changed are not sent.
                [(id, before, next)] => row::update(&mut sql, table, id, before, next),
                changed => row::update_all(&mut sql, table, changed),
            }
        }
        self.removed.iter().for_each(|id| row::delete(&mut sql, table, id));
        sql
    }
}
