//! The batcher: a few connections, each with a worker task that runs many verbs in one statement (group commit).
//!
//! While a statement runs, arriving verbs wait in a queue. The next statement takes those of one group together: one round
//! trip and one sync to the disk serve many. When no statement runs, a verb is sent at once. Only a worker that has just
//! answered several verbs lets their callers run first, for 1 ms at most. The tasks own the connections and await every
//! statement to its end, so a cancelled caller loses only its own answer.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use idem_core::{StoreError, StoreErrorKind, TimeOffset};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::yield_now;
use tokio::time::timeout;

use crate::batch::queue::{Job, QUEUE_CAPACITY, Queue};
use crate::batch::statement::{Batch, FunctionCalls, Message};
use crate::batch::verb::{Lookup, Presence, Verb, VerbOutcome, unexpected_answer};
use crate::config::PostgresConfig;
use crate::connect::options::{direct_options, expect_direct};
use crate::connect::settings::{local_settings, session_settings};
use crate::connect::source::ConnectSource;
use crate::connect::unanswered::UnansweredWrites;
use crate::error::{connect_error, is_connection_lost, is_of_partitions, is_unprepared, outage};
use crate::schema::name::Schema;
use crate::sql::{BEGIN, own_rows};
use crate::timeouts::{CLOSE_TIMEOUT, RETRY_LOCK_TIMEOUT, ROUND_TRIP, client_timeout, within};

/// The most bytes of stored data in one statement, for the same reason as [`MAX_BATCH`](super::queue::MAX_BATCH).
const MAX_BATCH_BYTES: usize = 4 * 1024 * 1024;

/// How many verbs may wait in addition to those in the queue. Further callers wait for room (backpressure).
const CHANNEL_CAPACITY: usize = 1024 - QUEUE_CAPACITY;

/// How long a connection may stay unused. Firewalls drop idle connections silently.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a worker that has answered several verbs lets other tasks run first, at most. If one of them keeps the thread busy,
/// the runtime's timer lets another thread continue the worker.
const YIELD_TIMEOUT: Duration = Duration::from_millis(1);

/// How many prepared statements a connection for verbs keeps: one for each function that it calls, and those for single
/// verbs.
const STATEMENT_CACHE_CAPACITY: usize = 16;

/// The most writes without an answer, for each worker. At the limit, the workers send only reads; see
/// [`unanswered`](crate::connect::unanswered). One may be lost in the network. After two the server is likely to keep silent.
const MOST_UNANSWERED: usize = 2;

/// Hands verbs to the workers, which end when all clones are dropped.
#[derive(Debug, Clone)]
pub(crate) struct Batcher {
    jobs: mpsc::Sender<Job>,
    settings: Arc<BatcherSettings>,
}

/// How the workers connect, and how their transactions begin.
#[derive(Clone)]
pub(crate) struct BatcherSettings {
    source: ConnectSource,
    unanswered: Arc<UnansweredWrites>,
    calls: FunctionCalls,
    /// Settings for a new exclusive session. `None` through a transaction pooler, which gives the session to another client
    /// after each transaction.
    session: Option<String>,
    /// How a transaction begins, with its settings where the session has none.
    begin: Option<String>,
    /// The same, for verbs whose batch has waited for a row for `lock_timeout`.
    begin_with_short_lock_wait: String,
    offset: TimeOffset,
    statement_timeout: Duration,
}

impl BatcherSettings {
    pub(crate) fn new(
        config: &PostgresConfig,
        source: ConnectSource,
        unanswered: Arc<UnansweredWrites>,
        schema: &Schema,
    ) -> Self {
        let (statement_timeout, lock_timeout) = (config.statement_timeout, config.lock_timeout);
        Self {
            source,
            unanswered,
            calls: FunctionCalls::new(schema, !config.pooled),
            session: (!config.pooled).then(|| session_settings(statement_timeout, lock_timeout)),
            begin: config.pooled.then(|| format!("{BEGIN}{}", local_settings(statement_timeout, lock_timeout))),
            begin_with_short_lock_wait: format!("{BEGIN}{}", local_settings(statement_timeout, RETRY_LOCK_TIMEOUT)),
            offset: config.offset.clone(),
            statement_timeout,
        }
    }

    /// Connects. Each step may take as long as a statement.
    async fn connect(&self) -> Result<PgConnection, sqlx::Error> {
        let limit = client_timeout(self.statement_timeout);
        // Overrides the URL: what sqlx prepares and has no room to remember stays in the session.
        let options = self.source.options().statement_cache_capacity(STATEMENT_CACHE_CAPACITY);
        let options = if self.session.is_some() { direct_options(options) } else { options };
        let mut connection = within(limit, options.connect()).await?;
        if let Some(session) = &self.session {
            within(limit, expect_direct(&mut connection)).await?;
            within(limit, sqlx::raw_sql(AssertSqlSafe(session.clone())).execute(&mut connection)).await?;
        }
        Ok(connection)
    }
}

/// Shows no credentials.
impl fmt::Debug for BatcherSettings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("BatcherSettings").field("session", &self.session).finish_non_exhaustive()
    }
}

impl Batcher {
    /// Workers on the current runtime, each with a connection that is made when it is needed.
    pub(crate) fn start(settings: BatcherSettings, connections: NonZeroU32) -> Self {
        let settings = Arc::new(settings);
        let (jobs, arriving) = mpsc::channel(CHANNEL_CAPACITY);
        let queue = Arc::new(Mutex::new(Queue::new(arriving)));
        let workers = usize::try_from(connections.get()).unwrap_or(usize::MAX);
        let most = workers.saturating_mul(MOST_UNANSWERED).min(Semaphore::MAX_PERMITS);
        // The workers share them, so that a worker can write although its own earlier writes have no answer.
        let permits = Arc::new(Semaphore::new(most));
        for _ in 0..connections.get() {
            let (settings, queue) = (Arc::clone(&settings), Arc::clone(&queue));
            let permits = Arc::clone(&permits);
            tokio::spawn(async move {
                // A worker may panic, for example in the application's tracing subscriber. The callers of its verbs then get an
                // error, and a new worker replaces it.
                loop {
                    let worker = BatchWorker::new(Arc::clone(&settings), Arc::clone(&permits));
                    match tokio::spawn(worker.serve(Arc::clone(&queue))).await {
                        Err(error) if error.is_panic() => yield_now().await,
                        _ => break,
                    }
                }
            });
        }
        Self { jobs, settings }
    }

    /// A batcher with one worker on the current runtime, which may be another one.
    pub(crate) fn another(&self) -> Self {
        Self::start((*self.settings).clone(), NonZeroU32::MIN)
    }

    /// Runs a verb with others, and awaits its answer.
    pub(crate) async fn run(&self, verb: Verb) -> Result<VerbOutcome, StoreError> {
        let (answer, answered) = oneshot::channel();
        self.jobs.send(Job { verb, answer }).await.map_err(|_| runtime_ended())?;
        answered.await.unwrap_or_else(|_| {
            let message = "the task that sends the store's statements has ended: it panicked, or its runtime ended";
            Err(StoreError::new(StoreErrorKind::Unavailable, message).indeterminate())
        })
    }

    /// Refuses once the workers have ended.
    pub(crate) fn expect_open(&self) -> Result<(), StoreError> {
        if self.jobs.is_closed() { Err(runtime_ended()) } else { Ok(()) }
    }
}

fn runtime_ended() -> StoreError {
    let message = "the runtime in which the Postgres store was opened has ended; open it again";
    StoreError::new(StoreErrorKind::Unavailable, message)
}

struct BatchWorker {
    settings: Arc<BatcherSettings>,
    /// `None` before it is needed, after it was not needed for a while, and after it failed.
    connection: Option<PgConnection>,
    /// For connections that send a write, or wait for the answer to one.
    permits: Arc<Semaphore>,
    /// The permit for the current batch; `None` if it may not write.
    permit: Option<OwnedSemaphorePermit>,
    /// `true` until the server says that records are in partitions.
    is_one_table: bool,
}

impl BatchWorker {
    fn new(settings: Arc<BatcherSettings>, permits: Arc<Semaphore>) -> Self {
        Self { settings, connection: None, permits, permit: None, is_one_table: true }
    }

    async fn serve(mut self, queue: Arc<Mutex<Queue>>) {
        loop {
            let next = async { queue.lock().await.next().await };
            match timeout(IDLE_TIMEOUT, next).await {
                Ok(jobs) if jobs.is_empty() => break,
                Ok(mut jobs) => {
                    let are_many = jobs.len() > 1;
                    self.run_jobs(&mut jobs).await;
                    if are_many {
                        // The callers that were just answered are about to send their next verbs.
                        let _ = timeout(YIELD_TIMEOUT, yield_now()).await;
                    }
                }
                Err(_) => self.disconnect().await,
            }
        }
        self.disconnect().await;
    }

    async fn disconnect(&mut self) {
        if let Some(connection) = self.connection.take() {
            let _ = timeout(ROUND_TRIP, connection.close()).await;
        }
    }

    async fn run_jobs(&mut self, jobs: &mut Vec<Job>) {
        loop {
            // A verb whose caller was cancelled before it began is not run.
            jobs.retain(|job| !job.answer.is_closed());
            let may_wait = jobs.iter().any(|job| job.verb.may_write());
            self.permit = if may_wait { Arc::clone(&self.permits).try_acquire_owned().ok() } else { None };
            if !self.may_write() {
                for job in jobs.extract_if(.., |job| job.verb.always_writes()) {
                    job.reply(Err(unanswered()));
                }
            }
            if jobs.is_empty() {
                return;
            }
            let mut bytes = 0;
            let fits = jobs.iter().take_while(|job| {
                bytes += job.verb.payload_bytes();
                bytes <= MAX_BATCH_BYTES
            });
            let count = fits.count().max(1).min(jobs.len());
            self.run_and_reply(jobs.drain(..count).collect()).await;
            self.permit = None;
        }
    }

    /// Whether a write may be sent. Reads go on in any case.
    fn may_write(&self) -> bool {
        self.permit.is_some()
    }

    /// Closes a connection that has not answered a write, once that is over.
    fn close_when_answered(&mut self, mut connection: PgConnection) {
        // What is not sent yet need not be executed.
        if connection.should_flush() {
            return;
        }
        let (waiting, permit) = (Arc::clone(&self.settings.unanswered), self.permit.take());
        tokio::spawn(async move {
            waiting.wait(&mut connection).await;
            let _ = timeout(CLOSE_TIMEOUT, connection.close()).await;
            drop(permit);
        });
    }

    /// Runs a batch and answers its verbs. If one verb makes the shared statement fail, each verb gets a separate statement,
    /// so that only the faulty one gets the error.
    async fn run_and_reply(&mut self, batch: Vec<Job>) {
        match self.run_batch(&batch, LockWait::Configured).await {
            Ok(answers) => {
                // Before the answers: another worker may need it for the callers' next verbs.
                self.permit = None;
                for (job, answer) in batch.into_iter().zip(answers) {
                    job.reply(answer);
                }
            }
            Err(SendError::Refused(error)) if batch.len() > 1 => {
                let waited = error.kind() == StoreErrorKind::Timeout;
                let lock_wait = if waited { LockWait::Short } else { LockWait::Configured };
                let may_be_done = error.is_indeterminate();
                let mut rest = batch.into_iter();
                while let Some(job) = rest.next() {
                    if job.answer.is_closed() {
                        continue;
                    }
                    match self.run_batch(std::slice::from_ref(&job), lock_wait).await {
                        Ok(answers) => {
                            job.reply(answers.into_iter().next().unwrap_or_else(|| Err(unexpected_answer())))
                        }
                        Err(SendError::Refused(error)) if may_be_done => job.reply(Err(error.indeterminate())),
                        Err(SendError::Refused(error)) => job.reply(Err(error)),
                        Err(SendError::ConnectionLost(error) | SendError::Unavailable(error)) => {
                            fail_all(std::iter::once(job).chain(rest), error);
                            return;
                        }
                    }
                }
            }
            Err(SendError::Refused(error) | SendError::ConnectionLost(error) | SendError::Unavailable(error)) => {
                fail_all(batch, error)
            }
        }
    }

    /// Sends a statement. If the connection turns out to be lost, sends it once more over another one: every verb may be
    /// repeated.
    async fn run_batch(&mut self, jobs: &[Job], lock_wait: LockWait) -> Result<VerbOutcomes, SendError> {
        let may_write = self.may_write();
        let (verbs, positions) = deduplicate(jobs, may_write);
        let answers = match self.send(&verbs, lock_wait).await {
            Err(SendError::ConnectionLost(error)) => {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "a statement is sent once more over another connection"
                );
                // The first statement may have been done, however the second one ends.
                let sent = self.send(&verbs, lock_wait).await;
                sent.map_err(|failure| failure.indeterminate())
            }
            answers => answers,
        }?;
        let answer = |(job, &position): (&Job, &usize)| match answers.get(position) {
            Some(Ok(VerbOutcome::Found(Lookup { presence: Presence::Absent, .. })))
                if !may_write && matches!(job.verb, Verb::Acquire { .. }) =>
            {
                Err(unanswered())
            }
            Some(answer) => answer.clone(),
            None => Err(unexpected_answer()),
        };
        Ok(jobs.iter().zip(&positions).map(answer).collect())
    }

    async fn send(&mut self, verbs: &[Cow<'_, Verb>], lock_wait: LockWait) -> Result<VerbOutcomes, SendError> {
        let settings = &self.settings;
        let limit = client_timeout(settings.statement_timeout);
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => settings
                .connect()
                .await
                .map_err(|error| SendError::Unavailable(connect_error(error, settings.begin.is_some())))?,
        };
        let begin = match lock_wait {
            LockWait::Configured => settings.begin.as_deref(),
            LockWait::Short => Some(settings.begin_with_short_lock_wait.as_str()),
        };
        let verbs = verbs.iter().map(AsRef::as_ref);
        let may_write = verbs.clone().any(Verb::may_write);
        let (message, batch) = Batch::new(&settings.calls, begin, settings.offset.micros(), self.is_one_table, verbs);
        let asked = async {
            match message {
                Message::Text(sql) if settings.session.is_none() => own_rows(&mut connection, sql).await,
                Message::Text(sql) => sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(&mut connection).await,
                Message::Prepared(call) => call.fetch_all(&mut connection).await,
            }
        };
        // An early return drops the connection, which ends the transaction.
        let rows: Vec<PgRow> = match timeout(limit, asked).await {
            Ok(Ok(rows)) => rows,
            Ok(Err(error)) if is_connection_lost(&error) || is_unprepared(&error) => {
                return Err(SendError::ConnectionLost(outage("read or write records", error)));
            }
            Ok(Err(error)) if is_of_partitions(&error) && self.is_one_table => {
                self.is_one_table = false;
                return Err(SendError::ConnectionLost(outage("read or write records", error)));
            }
            Ok(Err(error)) => {
                let refused = SendError::Refused(outage("read or write records", error));
                // An explicit transaction is still open; an implicit one has ended with its message.
                let ended = match begin {
                    Some(_) => timeout(limit, sqlx::raw_sql("ROLLBACK").execute(&mut connection))
                        .await
                        .is_ok_and(|it| it.is_ok()),
                    None => true,
                };
                self.connection = ended.then_some(connection);
                return Err(refused);
            }
            Err(_) => {
                if may_write {
                    self.close_when_answered(connection);
                }
                let message = format!("Postgres did not answer within {limit:?}");
                return Err(SendError::Unavailable(StoreError::new(StoreErrorKind::Timeout, message)));
            }
        };
        self.connection = Some(connection);
        batch.answers(&rows).map_err(SendError::Unavailable)
    }
}

type VerbOutcomes = Vec<Result<VerbOutcome, StoreError>>;

/// How long a statement may wait for a locked row.
#[derive(Clone, Copy)]
enum LockWait {
    /// For `lock_timeout`.
    Configured,
    /// For [`RETRY_LOCK_TIMEOUT`].
    Short,
}

/// The verbs of a batch without duplicate lookups, and for each job the position of its verb. Many repeats of one request that
/// arrive together share one answer, which may be large. Of several acquires of one record, all but the first become lookups;
/// without `may_write` the first does too.
fn deduplicate(jobs: &[Job], may_write: bool) -> (Vec<Cow<'_, Verb>>, Vec<usize>) {
    let mut verbs: Vec<Cow<'_, Verb>> = Vec::with_capacity(jobs.len());
    let (mut acquires, mut looks) = (HashSet::new(), HashMap::new());
    let positions = jobs.iter().map(|job| {
        let look = match &job.verb {
            Verb::Acquire { request, lock } if !acquires.insert(request.id) || !may_write => {
                Some((request.id, Some(*lock), false))
            }
            Verb::Lookup { id, lock, confirmed } => Some((*id, *lock, *confirmed)),
            _ => None,
        };
        let position = verbs.len();
        match look {
            None => verbs.push(Cow::Borrowed(&job.verb)),
            Some((id, lock, confirmed)) => {
                let known = *looks.entry((id, lock, confirmed)).or_insert(position);
                if known != position {
                    return known;
                }
                verbs.push(Cow::Owned(Verb::Lookup { id, lock, confirmed }));
            }
        }
        position
    });
    let positions = positions.collect();
    (verbs, positions)
}

/// The error of a write that was not sent.
fn unanswered() -> StoreError {
    let message = "earlier writes have no answer yet, so no more are sent; do commits wait for a standby that is away?";
    StoreError::new(StoreErrorKind::Unavailable, message)
}

fn fail_all(jobs: impl IntoIterator<Item = Job>, error: StoreError) {
    tracing::warn!(error = &error as &dyn std::error::Error, "a statement failed");
    for job in jobs {
        job.reply(Err(error.clone()));
    }
}

/// Why a statement failed.
enum SendError {
    /// The connection is lost, or its session has lost its prepared statements; another may succeed.
    ConnectionLost(StoreError),
    /// The server refused the statement as a whole, which did nothing.
    Refused(StoreError),
    /// Another try would not help now.
    Unavailable(StoreError),
}

impl SendError {
    /// The same error of a statement that may have been done.
    fn indeterminate(self) -> Self {
        match self {
            Self::ConnectionLost(error) => Self::ConnectionLost(error.indeterminate()),
            Self::Refused(error) => Self::Refused(error.indeterminate()),
            Self::Unavailable(error) => Self::Unavailable(error.indeterminate()),
        }
    }
}
