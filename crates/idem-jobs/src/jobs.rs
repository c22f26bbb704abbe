//! Jobs from the side of the API: enqueue, find, answer.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use idem_core::engine::{Answer, Conclusion, Context, Contract, Disposition, ExecuteError, Idempotency, Operation};
use idem_core::{
    Acquisition, HeaderField, OwnerToken, Record, RecordId, Replay, ReplayKind, State, StoreError, StoreErrorKind,
    StoredBody, StoredResponse, Timestamp, Writes,
};
use idem_http::{Continuation, ResponseDirectives};
use serde::Serialize;
use serde_json::Value;
use tokio::sync::{Notify, Semaphore};
use tokio::time::timeout;

use crate::job::{Job, JobId, MAX_PAYLOAD_BYTES, QueuedJob, Standing};
use crate::queue::{EnqueueError, JobQueue};
use crate::settings::JobSettings;

/// `Retry-After` of a job that has not ended, in seconds.
const ASK_AGAIN: &str = "2";

/// Work that outlives its request. Clones share everything.
///
/// The request's record R and the job's record W are ordinary records. R keeps the 202. W has the operation `job:<name>`, the
/// id of the job as its key, and the result. The queue only wakes workers; W decides whether the job runs.
#[derive(Clone)]
pub struct Jobs {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) queue: Arc<dyn JobQueue>,
    /// Runs the jobs, under their contract.
    pub(crate) engine: Idempotency,
    pub(crate) settings: JobSettings,
    /// Wakes the worker of this process.
    pub(crate) enqueued: Notify,
    /// One suspect runs at a time, besides other jobs: if it stops the process, no other suspect is lost with it.
    pub(crate) suspect: Arc<Semaphore>,
}

/// A job that was enqueued, and the answer that says so.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Accepted {
    /// Its id.
    pub id: JobId,
    /// Where the client finds it.
    pub location: String,
    /// How long the record of the request has to be kept, so that a repeat never enqueues a second job while the first one can
    /// still run or has its result.
    pub retention: Duration,
}

/// How a job stands.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "callers must handle every state")]
pub enum JobState {
    /// It has not begun, or waits for its next attempt.
    Waiting {
        /// How many attempts have failed.
        failed_attempts: u32,
    },
    /// A worker runs it.
    Running {
        /// Which attempt it is.
        attempt: u32,
    },
    /// It has ended.
    Ended(Replay),
}

/// Jobs that cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidJobs {
    /// The engine runs jobs without a record if its store is unavailable. It is then unknown whether they ran.
    #[error("the engine of the jobs has dangerous_fail_open, by which a job can run without a record; remove it")]
    FailsOpen,
    /// The location is no path.
    #[error("`{0}` cannot begin a Location; it has visible ASCII characters, as in /jobs/")]
    Location(String),
    /// A job could still run when results of its time are no longer kept.
    #[error(
        "the deadline ({start_deadline:?}) and the longest run ({longest_run:?}) together are longer than results are \
         kept ({retention:?}), so that it would not be known whether a job has run; set the retention of the engine of \
         the jobs to more"
    )]
    Retention {
        /// The deadline.
        start_deadline: Duration,
        /// The engine's `renewal_limit`.
        longest_run: Duration,
        /// The retention of the engine.
        retention: Duration,
    },
    /// The queue could answer after another worker has the job.
    #[error(
        "the queue timeout ({queue_timeout:?}) must be less than a third of the visibility timeout \
         ({visibility_timeout:?}), in which a claim may answer late and a job is held again"
    )]
    QueueTimeout {
        /// The queue timeout.
        queue_timeout: Duration,
        /// The visibility timeout.
        visibility_timeout: Duration,
    },
}

/// Why a job ends without a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GiveUp {
    /// It did not start in time.
    Overdue,
    /// Too many of its deliveries were lost.
    Parked,
}

impl GiveUp {
    pub(crate) fn response(self) -> StoredResponse {
        let (name, title, status) = match self {
            Self::Overdue => ("job-overdue", "The job did not start before its deadline, and took no effect", 504),
            Self::Parked => ("job-parked", "The job was lost again and again without a result, and was given up", 500),
        };
        problem(name, title, status)
    }

    /// Fails the job for good.
    pub(crate) fn conclusion<T>(self, value: T) -> Conclusion<T> {
        Conclusion { value, disposition: Disposition::Fail { response: self.response() }, retention: None }
    }
}

/// A problem as the result of a job.
pub(crate) fn problem(name: &str, title: &str, status: u16) -> StoredResponse {
    let body = serde_json::json!({ "type": format!("about:blank#{name}"), "title": title, "status": status });
    let content_type = HeaderField { name: "content-type".into(), value: "application/problem+json".into() };
    StoredResponse { headers: [content_type].into(), ..StoredResponse::new(status, body.to_string()) }
}

impl Jobs {
    /// Jobs in `queue`, which `engine` runs. The contract of `engine` is that of the jobs, and its retention is how long their
    /// results are kept.
    ///
    /// `engine` needs the store of the requests' engine, and should be [attached](Idempotency::attached_to) to that one.
    ///
    /// # Errors
    /// [`InvalidJobs`].
    pub fn new(queue: Arc<dyn JobQueue>, engine: Idempotency, settings: JobSettings) -> Result<Self, InvalidJobs> {
        if engine.settings().fails_open() {
            return Err(InvalidJobs::FailsOpen);
        }
        let location = &settings.location_prefix;
        if location.is_empty() || !location.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(InvalidJobs::Location(location.clone()));
        }
        let JobSettings { queue_timeout, visibility_timeout, .. } = settings;
        let (start_deadline, retention) = (settings.start_deadline, engine.settings().record_retention());
        let longest_run = engine.settings().longest_lease();
        if start_deadline.saturating_add(longest_run) > retention {
            return Err(InvalidJobs::Retention { start_deadline, longest_run, retention });
        }
        if queue_timeout.saturating_mul(3) >= visibility_timeout {
            return Err(InvalidJobs::QueueTimeout { queue_timeout, visibility_timeout });
        }
        let (enqueued, suspect) = (Notify::new(), Arc::new(Semaphore::new(1)));
        Ok(Self { shared: Arc::new(Shared { queue, engine, settings, enqueued, suspect }) })
    }

    /// Enqueues the job of a request, and returns what to answer it: 202.
    ///
    /// `run` is the context of the request. If it has a transaction in the queue's database, the job commits with the record
    /// of the request, or not at all. Otherwise the job is enqueued at once; a repeat after a crash finds it.
    ///
    /// `name` chooses the worker's handler, which gets `payload` as JSON of at most 1 MiB. If an earlier run of the request has
    /// enqueued a job of this name, that job stays, with its payload.
    ///
    /// # Errors
    /// [`EnqueueError`]. Answer 503 if it [may be repeated](EnqueueError::is_retryable), and 500 otherwise.
    ///
    /// # Cancellation safety
    /// If the future is dropped, the job may be enqueued. A repeat finds it.
    pub async fn enqueue(
        &self,
        run: &Context,
        name: &str,
        payload: &(impl Serialize + Sync),
    ) -> Result<Accepted, EnqueueError> {
        let is_fit = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        if !(1..=64).contains(&name.len()) || !name.bytes().all(is_fit) {
            return Err(EnqueueError::InvalidName { name: name.to_owned() });
        }
        let payload = serde_json::to_vec(payload)?;
        if payload.len() > MAX_PAYLOAD_BYTES {
            return Err(EnqueueError::PayloadTooLarge { bytes: payload.len() });
        }
        let lease = run.lease().ok_or(EnqueueError::NotProtected)?;
        let Shared { queue, engine, settings, enqueued, .. } = &*self.shared;
        let job = Job {
            id: JobId::of(&lease.id),
            name: name.to_owned(),
            principal: run.principal().map(str::to_owned),
            payload: payload.into(),
            trace: run.trace(),
        };
        let enqueue = queue.enqueue(run, &job, lease.owner, settings.start_deadline);
        let before = timeout(settings.queue_timeout, enqueue).await.map_err(|_| EnqueueError::Queue(self.late()))??;
        match before {
            Some(before) if before.name != job.name || before.by == lease.owner && before.payload != job.payload => {
                return Err(EnqueueError::OtherJob { name: before.name });
            }
            _ => enqueued.notify_one(),
        }
        let engine = engine.settings();
        let retention = settings.start_deadline.saturating_add(engine.longest_lease());
        let retention = retention.saturating_add(engine.record_retention());
        Ok(Accepted { location: format!("{}{}", settings.location_prefix, job.id), id: job.id, retention })
    }

    /// How a job stands; `None` if there is no such job, its result is no longer kept, or another principal's request has
    /// enqueued it.
    ///
    /// It fails a job that has not started before its deadline, if no worker has done that yet.
    ///
    /// # Errors
    /// [`ExecuteError`] when queue or store cannot be asked.
    pub async fn state(&self, principal: Option<&str>, id: &JobId) -> Result<Option<JobState>, ExecuteError> {
        match self.find(id).await? {
            Some(queued) if queued.job.principal.as_deref() == principal => self.state_of(&queued).await,
            _ => Ok(None),
        }
    }

    /// The answer to `GET /jobs/{id}`, with the state as JSON: for `id` as it stands in the path, and only for the principal that
    /// asked for the job.
    ///
    /// | job | answer |
    /// |---|---|
    /// | unknown, no longer kept, or another principal's | 404 |
    /// | waiting or running | 200, `state` and `attempt`, with `Retry-After` |
    /// | ended | 200, `state` `completed`, `failed` or `unknown`, and the `result`: status, and body if it is JSON |
    /// | completed with a `Location`, with [`see_other`](JobSettings::see_other) | 303 |
    /// | store or queue away | 503 |
    #[must_use = "it is the answer"]
    pub async fn status(&self, principal: Option<&str>, id: &str) -> Response<Full<Bytes>> {
        let state = match id.parse() {
            Ok(id) => self.state(principal, &id).await,
            Err(_) => Ok(None),
        };
        match state {
            Ok(Some(state)) => self.shown(id, &state),
            Ok(None) => json(StatusCode::NOT_FOUND, &serde_json::json!({ "title": "There is no such job" })),
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, job = id, "a job could not be looked up");
                let mut away =
                    json(StatusCode::SERVICE_UNAVAILABLE, &serde_json::json!({ "title": "Ask again later" }));
                away.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
                away
            }
        }
    }

    fn shown(&self, id: &str, state: &JobState) -> Response<Full<Bytes>> {
        let document = |state: &str, attempt: u32| -> Value {
            serde_json::json!({ "id": id, "state": state, "attempt": attempt })
        };
        let (name, attempt) = match state {
            JobState::Waiting { failed_attempts } => ("waiting", *failed_attempts),
            JobState::Running { attempt } => ("running", *attempt),
            JobState::Ended(replay) => return self.shown_result(replay, document),
        };
        let mut shown = json(StatusCode::OK, &document(name, attempt));
        shown.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static(ASK_AGAIN));
        shown
    }

    fn shown_result(&self, replay: &Replay, document: impl Fn(&str, u32) -> Value) -> Response<Full<Bytes>> {
        let location = location_of(&replay.response);
        if let Some(location) = location.filter(|_| self.shared.settings.see_other)
            && replay.kind == ReplayKind::Completed
        {
            let mut elsewhere = Response::new(Full::default());
            *elsewhere.status_mut() = StatusCode::SEE_OTHER;
            if let Ok(location) = HeaderValue::from_bytes(location) {
                elsewhere.headers_mut().insert(header::LOCATION, location);
                return elsewhere;
            }
        }
        let state = match replay.kind {
            ReplayKind::Completed => "completed",
            ReplayKind::Failed => "failed",
            ReplayKind::OutcomeUnknown => "unknown",
        };
        let body = match &replay.response.body {
            StoredBody::Retained(body) => serde_json::from_slice(body).unwrap_or_default(),
            StoredBody::NotRetained => Value::Null,
        };
        let mut shown = document(state, replay.attempt);
        shown["result"] = serde_json::json!({ "status": replay.response.status, "body": body });
        if let Some(location) = location.and_then(|location| std::str::from_utf8(location).ok()) {
            shown["result"]["location"] = location.into();
        }
        json(StatusCode::OK, &shown)
    }

    pub(crate) async fn find(&self, id: &JobId) -> Result<Option<QueuedJob>, ExecuteError> {
        self.bounded(self.shared.queue.find(id)).await.map_err(ExecuteError::NotAdmitted)
    }

    /// `None` if its result is no longer kept.
    async fn state_of(&self, queued: &QueuedJob) -> Result<Option<JobState>, ExecuteError> {
        let operation = queued.job.operation().map_err(ExecuteError::NotAdmitted)?;
        let record = self.shared.engine.find(&operation).await.map_err(ExecuteError::NotAdmitted)?;
        if let Some(replay) = record.as_ref().and_then(Record::replay) {
            return Ok(Some(JobState::Ended(replay)));
        }
        let is_claimed = queued.standing == Standing::Claimed;
        // A run that is one transaction has no record until it commits.
        let is_forgotten = self.may_be_forgotten(queued.times.age) && record.is_none() && !is_claimed;
        if queued.has_ended() || is_forgotten {
            return Ok(None);
        }
        Ok(Some(match record {
            Some(Record { state: State::InProgress { .. }, attempt, owner, .. }) if owner != OwnerToken::NOBODY => {
                JobState::Running { attempt }
            }
            Some(record) if is_claimed => JobState::Running { attempt: record.attempt.saturating_add(1) },
            Some(record) => JobState::Waiting { failed_attempts: record.attempt },
            None if is_claimed => JobState::Running { attempt: 1 },
            None if queued.is_overdue() => self.give_up(operation, GiveUp::Overdue).await?,
            None => JobState::Waiting { failed_attempts: 0 },
        }))
    }

    /// Fails a job that does not run and has not ended. Its record decides between this and a worker that begins just now.
    pub(crate) async fn give_up(&self, operation: Operation, why: GiveUp) -> Result<JobState, ExecuteError> {
        let fail = move |context: Context| async move {
            // What has started goes on.
            if why == GiveUp::Overdue && context.acquisition() != Acquisition::Fresh {
                let disposition = Disposition::Release { writes: Writes::Discard };
                return Conclusion { value: (), disposition, retention: None };
            }
            why.conclusion(())
        };
        match self.shared.engine.execute(operation.clone(), fail, move || why.conclusion(())).await? {
            Answer::Replay(replay) => return Ok(JobState::Ended(replay)),
            Answer::InProgress { .. } => return Ok(JobState::Running { attempt: 1 }),
            Answer::Ran { .. } | Answer::Backoff { .. } | Answer::Mismatch => {}
        }
        let record = self.shared.engine.find(&operation).await.map_err(ExecuteError::NotAdmitted)?;
        Ok(match record.as_ref().and_then(Record::replay) {
            Some(replay) => JobState::Ended(replay),
            None => JobState::Waiting { failed_attempts: record.map_or(0, |record| record.attempt) },
        })
    }

    /// Whether a job of this age may have had a record that has expired. If there is no record, it is then unknown whether the job ran.
    pub(crate) fn may_be_forgotten(&self, age: Duration) -> bool {
        age >= self.shared.engine.settings().record_retention()
    }

    /// After how many lost deliveries a job is parked.
    pub(crate) fn max_lost_deliveries(&self) -> u32 {
        let Shared { engine, settings, .. } = &*self.shared;
        match engine.contract() {
            // Steps are undone in the last attempts.
            Contract::AtLeastOnce => settings.max_lost_deliveries.saturating_add(engine.settings().attempt_limit()),
            Contract::AtMostOnce | Contract::Transactional => settings.max_lost_deliveries,
        }
    }

    /// Waits for the queue, but not for longer than the queue timeout.
    pub(crate) async fn bounded<T>(&self, verb: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        timeout(self.shared.settings.queue_timeout, verb).await.unwrap_or_else(|_| Err(self.late()))
    }

    fn late(&self) -> StoreError {
        let message = format!("the job queue did not answer within {:?}", self.shared.settings.queue_timeout);
        StoreError::new(StoreErrorKind::Timeout, message)
    }
}

#[async_trait]
impl Continuation for Jobs {
    async fn final_answer(&self, request: &RecordId, first: &StoredResponse) -> Result<Option<Replay>, ExecuteError> {
        let id = JobId::of(request);
        let expected = format!("{}{id}", self.shared.settings.location_prefix);
        if first.status != StatusCode::ACCEPTED || location_of(first) != Some(expected.as_bytes()) {
            return Ok(None);
        }
        let state = match self.find(&id).await? {
            Some(queued) => self.state_of(&queued).await?,
            None => None,
        };
        Ok(match state {
            Some(JobState::Ended(replay)) => Some(replay),
            Some(JobState::Waiting { .. } | JobState::Running { .. }) => None,
            // Its result was kept for as long as it was to be, or the queue has lost the job.
            None => Some(lost()),
        })
    }
}

/// The answer about a job that is gone: its outcome is unknown.
fn lost() -> Replay {
    Replay {
        response: StoredResponse::outcome_unknown(),
        kind: ReplayKind::OutcomeUnknown,
        attempt: 0,
        settled_at: Timestamp::from_unix_micros(0),
    }
}

impl Accepted {
    /// The answer: 202 with `Location`, and the id and the state as JSON. It has the
    /// [`ResponseDirectives`] that keep the record of the request for long enough, so keep its extensions. Frameworks
    /// with another response type take its fields.
    #[must_use]
    pub fn into_http(self) -> Response<Full<Bytes>> {
        let mut accepted =
            json(StatusCode::ACCEPTED, &serde_json::json!({ "id": self.id.as_str(), "state": "waiting" }));
        if let Ok(location) = HeaderValue::from_str(&self.location) {
            accepted.headers_mut().insert(header::LOCATION, location);
        }
        accepted.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static(ASK_AGAIN));
        accepted.extensions_mut().insert(ResponseDirectives::new().retain_for(self.retention));
        accepted
    }
}

fn json(status: StatusCode, document: &Value) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(document.to_string()));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

fn location_of(response: &StoredResponse) -> Option<&[u8]> {
    response.headers.iter().find(|field| field.name.eq_ignore_ascii_case(b"location")).map(|field| field.value.as_ref())
}

impl fmt::Debug for Jobs {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shared { queue, engine, settings, .. } = &*self.shared;
        formatter
            .debug_struct("Jobs")
            .field("queue", queue)
            .field("engine", engine)
            .field("settings", settings)
            .finish_non_exhaustive()
    }
}
