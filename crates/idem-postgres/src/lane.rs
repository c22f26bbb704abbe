//! The way to the database: a few connections, each with a task of its own that carries many verbs at once.
//!
//! While a statement is on its way, the verbs that arrive wait in a queue, and the next statement takes them together,
//! those that ask or those that change something: one round trip and one sync to the disk serve many. When nothing is on
//! its way a verb goes at once; no timer ever holds one back. Since the tasks own the connections and see every statement to
//! its end, a caller who goes away cancels only its own answer, and no connection is ever left in the middle of something.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use idem_core::{StoreError, StoreErrorKind, TimeOffset, planted};
use sqlx::postgres::{PgConnectOptions, PgRow};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection};
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::task::yield_now;
use tokio::time::timeout;

use crate::batch::{Batch, Calls, Message};
use crate::connection::{expect_direct, no_session};
use crate::error::{copy, is_connection_lost, is_unprepared, store_error};
use crate::verb::{Answer, Verb, misanswered};

/// The most verbs in one statement: enough to share its costs, few enough that the first is not kept waiting by the last.
const MAX_BATCH: usize = 64;

/// The most bytes that one statement brings along, for the same reason.
const MAX_BATCH_BYTES: usize = 4 * 1024 * 1024;

/// How many verbs a lane chooses from: enough that those of either family fill a statement.
const WAITING: usize = 4 * MAX_BATCH;

/// How many more may wait; further callers wait for room.
const ARRIVING: usize = 1024 - WAITING;

/// How long a connection may stay unused. Firewalls forget quiet connections without telling.
const IDLE: Duration = Duration::from_secs(60);

/// How long a lane that has answered several lets others run first, at most. A task that yields goes on when its thread has come
/// to the others; should one of them keep that busy, another thread goes on with it then.
const STEP: Duration = Duration::from_millis(1);

/// How much longer than the server may take the client waits, for the way there and back.
const GRACE: Duration = Duration::from_secs(1);

struct Job {
    verb: Verb,
    answer: oneshot::Sender<Result<Answer, StoreError>>,
}

/// The way to the database. Its tasks end when all clones are gone.
#[derive(Debug, Clone)]
pub(crate) struct Lanes(mpsc::Sender<Job>);

/// How the lanes reach the database and what they say first.
#[derive(Clone)]
pub(crate) struct LaneSettings {
    pub(crate) options: PgConnectOptions,
    pub(crate) calls: Calls,
    /// What is said once on a new connection, so that it need not be said again with each statement. `None` where a session
    /// is given to somebody else after each transaction.
    pub(crate) session: Option<String>,
    /// How a transaction begins, where that is not known from the session.
    pub(crate) begin: Option<String>,
    /// The same, for verbs whose batch has waited for a row as long as it may.
    pub(crate) begin_impatient: String,
    pub(crate) offset: TimeOffset,
    pub(crate) statement_timeout: Duration,
}

impl LaneSettings {
    async fn connect(&self) -> Result<PgConnection, sqlx::Error> {
        let mut connection = self.options.connect().await?;
        if let Some(session) = &self.session {
            expect_direct(&mut connection).await?;
            sqlx::raw_sql(AssertSqlSafe(session.clone())).execute(&mut connection).await?;
        }
        Ok(connection)
    }
}

impl Lanes {
    pub(crate) fn start(settings: &LaneSettings, connections: NonZeroU32) -> Self {
        let (sender, arriving) = mpsc::channel(ARRIVING);
        let queue = Arc::new(Mutex::new(Queue::new(arriving)));
        for _ in 0..connections.get() {
            let lane = Lane { settings: settings.clone(), connection: None };
            tokio::spawn(lane.serve(Arc::clone(&queue)));
        }
        Self(sender)
    }

    /// Hands a verb over and awaits its answer.
    pub(crate) async fn run(&self, verb: Verb) -> Result<Answer, StoreError> {
        let (answer, answered) = oneshot::channel();
        let message = "the runtime in which the Postgres store was opened has ended";
        let gone = || StoreError::new(StoreErrorKind::Unavailable, message);
        self.0.send(Job { verb, answer }).await.map_err(|_| gone())?;
        answered.await.unwrap_or_else(|_| Err(gone().indeterminate()))
    }
}

/// What no lane has taken yet.
struct Queue {
    arriving: mpsc::Receiver<Job>,
    /// Has come before what is arriving.
    waiting: Vec<Job>,
    /// Whether the oldest was left behind the last time.
    has_passed_over: bool,
}

impl Queue {
    fn new(arriving: mpsc::Receiver<Job>) -> Self {
        Self { arriving, waiting: Vec::with_capacity(WAITING), has_passed_over: false }
    }

    /// The verbs of the next statement, of one family: each function that a statement calls costs as much as several verbs
    /// do, so that clients who begin and clients who settle had better not share one. The family that more are waiting of goes
    /// first, as a few stragglers would fill no statement; the oldest is passed over once at most. None when nobody is left
    /// to ask for anything.
    ///
    /// Cancel-safe: what has arrived and is not returned stays here.
    async fn next(&mut self) -> Vec<Job> {
        if self.waiting.is_empty() {
            self.arriving.recv_many(&mut self.waiting, WAITING).await;
        }
        while self.waiting.len() < WAITING
            && let Ok(job) = self.arriving.try_recv()
        {
            self.waiting.push(job);
        }
        let Some(oldest) = self.waiting.first().map(|job| job.verb.family()) else { return Vec::new() };
        let of_its_family = self.waiting.iter().filter(|job| job.verb.family() == oldest).count();
        let others = self.waiting.len() - of_its_family;
        self.has_passed_over = !self.has_passed_over && of_its_family < others.min(MAX_BATCH);
        let family = if self.has_passed_over { oldest.other() } else { oldest };
        self.waiting.extract_if(.., |job| job.verb.family() == family).take(MAX_BATCH).collect()
    }
}

struct Lane {
    settings: LaneSettings,
    /// `None` before it is needed, after it was not needed for a while, and after it failed.
    connection: Option<PgConnection>,
}

impl Lane {
    async fn serve(mut self, queue: Arc<Mutex<Queue>>) {
        loop {
            let next = async { queue.lock().await.next().await };
            match timeout(IDLE, next).await {
                Ok(jobs) if jobs.is_empty() => break,
                Ok(mut jobs) => {
                    let are_many = jobs.len() > 1;
                    self.work(&mut jobs).await;
                    if are_many {
                        // Those who were answered just now are about to run, and to ask for the next thing.
                        let _ = timeout(STEP, yield_now()).await;
                    }
                }
                Err(_) => self.disconnect().await,
            }
        }
        self.disconnect().await;
    }

    async fn disconnect(&mut self) {
        if let Some(connection) = self.connection.take() {
            // Nothing is open on it; it only says goodbye.
            let _ = timeout(GRACE, connection.close()).await;
        }
    }

    async fn work(&mut self, jobs: &mut Vec<Job>) {
        loop {
            // Whoever stopped waiting before its verb began does not want it any more.
            jobs.retain(|job| !job.answer.is_closed());
            let mut bytes = 0;
            let fits = jobs.iter().take_while(|job| {
                bytes += job.verb.weight();
                bytes <= MAX_BATCH_BYTES
            });
            let count = fits.count().max(1).min(jobs.len());
            if count == 0 {
                return;
            }
            self.answer(jobs.drain(..count).collect()).await;
        }
    }

    /// Answers a batch. What is wrong with one verb fails the statement that they share; each then gets a statement of its
    /// own, so that the error stays with the one that it belongs to.
    async fn answer(&mut self, batch: Vec<Job>) {
        match self.attempt(&batch, Patience::Full).await {
            Ok(answers) => {
                for (job, answer) in batch.into_iter().zip(answers) {
                    job.tell(answer);
                }
            }
            Err(Failure::Refused(error)) if batch.len() > 1 => {
                // What waited for a row has waited as long as it may.
                let waited = error.kind() == StoreErrorKind::Timeout;
                let patience = if waited { Patience::None } else { Patience::Full };
                let may_be_done = error.is_indeterminate();
                let mut rest = batch.into_iter();
                while let Some(job) = rest.next() {
                    if job.answer.is_closed() {
                        continue;
                    }
                    match self.attempt(std::slice::from_ref(&job), patience).await {
                        Ok(answers) => job.tell(answers.into_iter().next().unwrap_or_else(|| Err(misanswered()))),
                        Err(Failure::Refused(error)) if may_be_done => job.tell(Err(error.indeterminate())),
                        Err(Failure::Refused(error)) => job.tell(Err(error)),
                        Err(Failure::Lost(error) | Failure::Away(error)) => {
                            tell_all(std::iter::once(job).chain(rest), error);
                            return;
                        }
                    }
                }
            }
            Err(Failure::Refused(error) | Failure::Lost(error) | Failure::Away(error)) => tell_all(batch, error),
        }
    }

    /// Sends a statement. When its connection is gone, which is often noticed only by using it, it is sent once more
    /// over another one: every verb may be repeated.
    async fn attempt(&mut self, jobs: &[Job], patience: Patience) -> Result<Answers, Failure> {
        let (verbs, places) = shared(jobs);
        let answers = match self.send(&verbs, patience).await {
            Err(Failure::Lost(error)) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "a connection was lost");
                // What was sent first may have been done, whatever becomes of the repetition.
                let sent = self.send(&verbs, patience).await;
                sent.map_err(|failure| planted!(failure.indeterminate(), "lost-answer-counts-as-nothing" => failure))
            }
            answers => answers,
        }?;
        let answer = |&place: &usize| match answers.get(place) {
            Some(Ok(answer)) => Ok(answer.clone()),
            Some(Err(error)) => Err(copy(error)),
            None => Err(misanswered()),
        };
        Ok(places.iter().map(answer).collect())
    }

    async fn send(&mut self, verbs: &[Cow<'_, Verb>], patience: Patience) -> Result<Answers, Failure> {
        let settings = &self.settings;
        let limit = settings.statement_timeout + GRACE;
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => match timeout(limit, settings.connect()).await {
                Ok(connection) => connection.map_err(|error| Failure::Away(no_session(error)))?,
                Err(_) => {
                    let message = format!("Postgres did not accept a connection within {limit:?}");
                    return Err(Failure::Away(StoreError::new(StoreErrorKind::Unavailable, message)));
                }
            },
        };
        let begin = match patience {
            Patience::Full => settings.begin.as_deref(),
            Patience::None => Some(settings.begin_impatient.as_str()),
        };
        let verbs = verbs.iter().map(AsRef::as_ref);
        let (message, batch) = Batch::new(&settings.calls, begin, settings.offset.micros(), verbs);
        let asked = async {
            match message {
                Message::Text(sql) => sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(&mut connection).await,
                Message::Prepared(call) => call.fetch_all(&mut connection).await,
            }
        };
        // Whatever ends this early drops the connection, and with it the transaction.
        let rows: Vec<PgRow> = match timeout(limit, asked).await {
            Ok(Ok(rows)) => rows,
            Ok(Err(error)) if is_connection_lost(&error) || is_unprepared(&error) => {
                return Err(Failure::Lost(store_error("do a verb", error)));
            }
            Ok(Err(error)) => {
                let refused = Failure::Refused(store_error("do a verb", error));
                // One that has begun is still open; one that was only a message has ended with it.
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
                let message = format!("Postgres did not answer within {limit:?}");
                return Err(Failure::Away(StoreError::new(StoreErrorKind::Timeout, message)));
            }
        };
        self.connection = Some(connection);
        batch.answers(&rows).map_err(Failure::Away)
    }
}

type Answers = Vec<Result<Answer, StoreError>>;

/// How long a statement may wait for somebody else's row.
#[derive(Clone, Copy)]
enum Patience {
    Full,
    None,
}

/// The verbs of a batch, each record read once, and for each job which of them it is: many repeats of one request that
/// arrive together share one answer, which may be large. Of several acquires of one record the first is one; the others
/// look at what it finds or makes.
fn shared(jobs: &[Job]) -> (Vec<Cow<'_, Verb>>, Vec<usize>) {
    let mut verbs: Vec<Cow<'_, Verb>> = Vec::with_capacity(jobs.len());
    let (mut acquires, mut looks) = (HashSet::new(), HashMap::new());
    let places = jobs.iter().map(|job| {
        let look = match &job.verb {
            Verb::Acquire { request, lock } if !acquires.insert(request.id) => Some((request.id, Some(*lock), false)),
            Verb::Look { id, lock, confirmed } => Some((*id, *lock, *confirmed)),
            _ => None,
        };
        let place = verbs.len();
        match look {
            None => verbs.push(Cow::Borrowed(&job.verb)),
            Some((id, lock, confirmed)) => {
                let known = *looks.entry((id, lock, confirmed)).or_insert(place);
                if known != place {
                    return known;
                }
                verbs.push(Cow::Owned(Verb::Look { id, lock, confirmed }));
            }
        }
        place
    });
    let places = places.collect();
    (verbs, places)
}

impl Job {
    fn tell(self, answer: Result<Answer, StoreError>) {
        // Whoever stopped waiting since will ask again.
        let _ = self.answer.send(answer);
    }
}

fn tell_all(jobs: impl IntoIterator<Item = Job>, error: StoreError) {
    tracing::warn!(error = &error as &dyn std::error::Error, "a statement failed");
    let mut jobs = jobs.into_iter();
    let first = jobs.next();
    for job in jobs {
        job.tell(Err(copy(&error)));
    }
    if let Some(first) = first {
        first.tell(Err(error));
    }
}

/// Why a statement has no answer.
enum Failure {
    /// The connection is gone, or does not know any more what it was told at its beginning; another may do.
    Lost(StoreError),
    /// The server said no to the statement as a whole, which did nothing.
    Refused(StoreError),
    /// There is no use in trying again now.
    Away(StoreError),
}

impl Failure {
    /// The same, where the statement may have been done all the same.
    fn indeterminate(self) -> Self {
        match self {
            Self::Lost(error) => Self::Lost(error.indeterminate()),
            Self::Refused(error) => Self::Refused(error.indeterminate()),
            Self::Away(error) => Self::Away(error.indeterminate()),
        }
    }
}

#[cfg(test)]
mod tests {
    use idem_core::RecordId;

    use super::*;
    use crate::verb::Family;

    #[tokio::test]
    async fn the_larger_family_goes_first_and_the_oldest_is_passed_over_once_at_most() {
        let (sender, arriving) = mpsc::channel(WAITING);
        let mut queue = Queue::new(arriving);
        let arrive = |family, count| {
            for _ in 0..count {
                let id = RecordId::from_bytes([7; 32]);
                let verb = match family {
                    Family::Asks => Verb::Look { id, lock: None, confirmed: false },
                    Family::Changes => Verb::Remove { id, version: 1 },
                };
                assert!(sender.try_send(Job { verb, answer: oneshot::channel().0 }).is_ok(), "there is room");
            }
        };
        let mut next = async || {
            let jobs = queue.next().await;
            let family = jobs.first().map(|job| job.verb.family());
            assert!(jobs.iter().all(|job| Some(job.verb.family()) == family), "one family");
            (family, jobs.len())
        };
        arrive(Family::Asks, 1);
        arrive(Family::Changes, 1);
        assert_eq!(next().await, (Some(Family::Asks), 1), "the oldest of as many");
        arrive(Family::Asks, 2);
        arrive(Family::Changes, 1);
        assert_eq!(next().await, (Some(Family::Changes), 2), "as many again");
        arrive(Family::Changes, 3);
        assert_eq!(next().await, (Some(Family::Changes), 3), "more are waiting of it");
        arrive(Family::Changes, 5);
        assert_eq!(next().await, (Some(Family::Asks), 2), "once at most");
        arrive(Family::Asks, 6);
        assert_eq!(next().await, (Some(Family::Asks), 6), "others were the oldest then");
        assert_eq!(next().await, (Some(Family::Changes), 5));
        arrive(Family::Asks, MAX_BATCH);
        arrive(Family::Changes, MAX_BATCH + 1);
        assert_eq!(next().await, (Some(Family::Asks), MAX_BATCH), "it fills a statement");
        assert_eq!(next().await, (Some(Family::Changes), MAX_BATCH));
        assert_eq!(next().await, (Some(Family::Changes), 1));
        drop(sender);
        assert_eq!(next().await, (None, 0), "nobody is left");
    }
}
