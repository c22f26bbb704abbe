//! The way to the database: a few connections, each with a task of its own that carries many verbs at once.
//!
//! While a statement is on its way, the verbs that arrive wait in a queue, and the next statement takes them together:
//! one round trip and one sync to the disk serve many. When nothing is on its way a verb goes at once; no timer ever
//! holds one back. Since the tasks own the connections and see every statement to its end, a caller who goes away
//! cancels only its own answer, and no connection is ever left in the middle of something.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use idem_core::{StoreError, StoreErrorKind};
use sqlx::postgres::{PgConnectOptions, PgRow};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection};
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::time::timeout;

use crate::batch::Batch;
use crate::config::TimeOffset;
use crate::error::{connect_error, copy, is_connection_lost, store_error};
use crate::schema::Schema;
use crate::verb::{Answer, Verb};

/// The most verbs in one statement: enough to share its costs, few enough that the first is not kept waiting by the last.
const MAX_BATCH: usize = 64;

/// The most bytes of answers in one statement, for the same reason.
const MAX_BATCH_BYTES: usize = 4 * 1024 * 1024;

/// How many verbs may wait; further callers wait for room.
const QUEUE: usize = 1024;

/// How long a connection may stay unused. Firewalls forget quiet connections without telling.
const IDLE: Duration = Duration::from_secs(60);

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
    pub(crate) schema: Schema,
    pub(crate) prelude: String,
    pub(crate) offset: TimeOffset,
    pub(crate) statement_timeout: Duration,
}

impl Lanes {
    pub(crate) fn start(settings: &LaneSettings, connections: NonZeroU32) -> Self {
        let (sender, jobs) = mpsc::channel(QUEUE);
        let jobs = Arc::new(Mutex::new(jobs));
        for _ in 0..connections.get() {
            let lane = Lane { settings: settings.clone(), connection: None };
            tokio::spawn(lane.serve(Arc::clone(&jobs)));
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

struct Lane {
    settings: LaneSettings,
    /// `None` before it is needed, after it was not needed for a while, and after it failed.
    connection: Option<PgConnection>,
}

impl Lane {
    async fn serve(mut self, queue: Arc<Mutex<mpsc::Receiver<Job>>>) {
        let mut jobs = Vec::with_capacity(MAX_BATCH);
        loop {
            let next = async { queue.lock().await.recv_many(&mut jobs, MAX_BATCH).await };
            match timeout(IDLE, next).await {
                Ok(0) => break,
                Ok(_) => self.work(&mut jobs).await,
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
        // Whoever stopped waiting before its verb began does not want it any more.
        jobs.retain(|job| !job.answer.is_closed());
        while !jobs.is_empty() {
            let mut bytes = 0;
            let fits = jobs.iter().take_while(|job| {
                bytes += job.verb.weight();
                bytes <= MAX_BATCH_BYTES
            });
            let batch: Vec<Job> = jobs.drain(..fits.count().max(1)).collect();
            let answers = self.answers(&batch).await;
            for (job, answer) in batch.into_iter().zip(answers) {
                // Whoever stopped waiting since will ask again.
                let _ = job.answer.send(answer);
            }
        }
    }

    /// The answer to each job. What is wrong with one of them fails the statement that they share; each then gets a
    /// statement of its own, so that the error stays with the one that it belongs to.
    async fn answers(&mut self, jobs: &[Job]) -> Vec<Result<Answer, StoreError>> {
        match self.attempt(jobs).await {
            Ok(answers) => answers,
            Err(Failure::Refused(_)) if jobs.len() > 1 => {
                let mut answers = Vec::with_capacity(jobs.len());
                for job in jobs.chunks(1) {
                    let answer = self.attempt(job).await.map_err(Failure::into_error);
                    answers.extend(answer.unwrap_or_else(|error| vec![Err(error)]));
                }
                answers
            }
            Err(failure) => {
                let error = failure.into_error();
                tracing::warn!(error = &error as &dyn std::error::Error, verbs = jobs.len(), "a statement failed");
                let copies: Vec<_> = jobs.iter().skip(1).map(|_| Err(copy(&error))).collect();
                std::iter::once(Err(error)).chain(copies).collect()
            }
        }
    }

    /// Sends a statement. When its connection is gone, which is often noticed only by using it, it is sent once more
    /// over another one: every verb may be repeated.
    async fn attempt(&mut self, jobs: &[Job]) -> Result<Vec<Result<Answer, StoreError>>, Failure> {
        match self.send(jobs).await {
            Err(Failure::Lost(error)) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "a connection was lost");
                self.send(jobs).await
            }
            answer => answer,
        }
    }

    async fn send(&mut self, jobs: &[Job]) -> Result<Vec<Result<Answer, StoreError>>, Failure> {
        let settings = &self.settings;
        let limit = settings.statement_timeout + GRACE;
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => match timeout(limit, settings.options.connect()).await {
                Ok(connection) => connection.map_err(|error| Failure::Away(connect_error(error)))?,
                Err(_) => {
                    let message = format!("Postgres did not accept a connection within {limit:?}");
                    return Err(Failure::Away(StoreError::new(StoreErrorKind::Unavailable, message)));
                }
            },
        };
        let verbs = jobs.iter().map(|job| &job.verb);
        let mut batch = Batch::new(&settings.schema, &settings.prelude, settings.offset.micros(), verbs);
        let sql = std::mem::take(&mut batch.sql);
        // Whatever ends this early drops the connection, and with it the transaction.
        let rows: Vec<PgRow> = match timeout(limit, sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(&mut connection)).await
        {
            Ok(Ok(rows)) => rows,
            Ok(Err(error)) if is_connection_lost(&error) => return Err(Failure::Lost(store_error("do a verb", error))),
            Ok(Err(error)) => {
                let refused = Failure::Refused(store_error("do a verb", error));
                // The transaction has failed and is still open.
                let ended = timeout(limit, sqlx::raw_sql("ROLLBACK").execute(&mut connection)).await;
                self.connection = matches!(ended, Ok(Ok(_))).then_some(connection);
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

/// Why a statement has no answer.
enum Failure {
    /// The connection is gone; another may do.
    Lost(StoreError),
    /// The server said no to the statement as a whole, which did nothing.
    Refused(StoreError),
    /// There is no use in trying again now.
    Away(StoreError),
}

impl Failure {
    fn into_error(self) -> StoreError {
        match self {
            Self::Lost(error) | Self::Refused(error) | Self::Away(error) => error,
        }
    }
}
