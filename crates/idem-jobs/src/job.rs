//! What a job is.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use idem_core::engine::Operation;
use idem_core::{Fingerprint, KeyError, OwnerToken, RecordId, Scope, StoreError, StoreErrorKind, TraceParent};

/// The most bytes of a payload: a queue is no storage. Keep a large input elsewhere, and its address in the payload.
pub(crate) const MAX_PAYLOAD_BYTES: usize = 1024 * 1024;

/// How many lost deliveries make a job a suspect.
///
/// A job that kills its process takes the other jobs of its worker with it. Were they all delivered together again, innocent ones
/// would be parked with it. So suspects are delivered one at a time. One lost delivery is normal in a deployment.
pub const SUSPECT_FROM: u32 = 2;

/// The address of a job: 64 lower-case hexadecimal digits, made of the record id of the request that asked for it.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(Arc<str>);

impl JobId {
    /// The id of the job that a request has. A request has at most one job, so that a rerun of the request finds it.
    #[must_use]
    pub fn of(request: &RecordId) -> Self {
        Self(request.downstream_key("job").into())
    }

    /// The digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Text that is no id of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the id of a job has 64 lower-case hexadecimal digits")]
#[non_exhaustive]
pub struct InvalidJobId;

impl FromStr for JobId {
    type Err = InvalidJobId;

    fn from_str(text: &str) -> Result<Self, InvalidJobId> {
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if text.len() == 64 && text.bytes().all(is_digit) { Ok(Self(text.into())) } else { Err(InvalidJobId) }
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl fmt::Debug for JobId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "JobId({self})")
    }
}

/// A piece of work, as its queue keeps it. `Debug` does not show the payload.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Job {
    /// Its id.
    pub id: JobId,
    /// Which handler runs it.
    pub name: String,
    /// Whose request asked for it; `None` if the service has one tenant.
    pub principal: Option<String>,
    /// The input of its handler.
    pub payload: Bytes,
    /// The trace of that request.
    pub trace: Option<TraceParent>,
}

impl Job {
    /// A job, read back by a queue.
    #[must_use]
    pub fn new(id: JobId, name: String, principal: Option<String>, payload: Bytes) -> Self {
        Self { id, name, principal, payload, trace: None }
    }

    /// Adds the trace of the request.
    #[must_use]
    pub fn trace(mut self, trace: Option<TraceParent>) -> Self {
        self.trace = trace;
        self
    }

    /// The operation that the worker runs. Its record says whether the job has run; the queue only wakes workers.
    ///
    /// # Errors
    /// [`StoreErrorKind::Corrupt`] when its queue gave back an id that is no key.
    pub(crate) fn operation(&self) -> Result<Operation, StoreError> {
        let name = format!("job:{}", self.name);
        let fingerprint = Fingerprint::of_bytes(&name, &self.payload);
        let scope = match &self.principal {
            Some(principal) => Scope::new(principal.as_str(), name),
            None => Scope::single_tenant(name),
        };
        let key = self.id.as_str().parse().map_err(|error: KeyError| {
            StoreError::new(StoreErrorKind::Corrupt, "the queue has a job whose id is no key").with_source(error)
        })?;
        Ok(Operation::new(scope, key, fingerprint).wait(Duration::ZERO).trace(self.trace))
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Job")
            .field("id", &self.id)
            .field("name", &self.name)
            .field("principal", &self.principal)
            .field("payload_bytes", &self.payload.len())
            .field("trace", &self.trace)
            .finish()
    }
}

/// The job that a request has already.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EnqueuedBefore {
    /// Its name.
    pub name: String,
    /// Its payload.
    pub payload: Bytes,
    /// The run of the request that enqueued it.
    pub by: OwnerToken,
}

impl EnqueuedBefore {
    /// What a queue has found.
    #[must_use]
    pub fn new(name: String, payload: Bytes, by: OwnerToken) -> Self {
        Self { name, payload, by }
    }
}

/// Where a job stands in time, by the queue's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is made by queues of other crates")]
pub struct Times {
    /// How long until its deadline; zero after it.
    pub remaining: Duration,
    /// How long ago it was enqueued.
    pub age: Duration,
}

/// A job that a worker has claimed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Delivery {
    /// The job.
    pub job: Job,
    /// Which delivery it is, from 1. A report about an earlier one is ignored.
    pub number: i64,
    /// How many deliveries before this one were lost: nobody reported how they ended, or they left no trace in the record of the
    /// job. An ordinary delivery counts as lost until it is reported, and that of a suspect from
    /// [`begin`](crate::JobQueue::begin) on.
    pub lost: u32,
    /// Whether the job is a suspect: it had [`SUSPECT_FROM`] lost deliveries before this one.
    pub is_suspect: bool,
    /// How long until the deadline, by the queue's clock; zero after it.
    pub remaining: Duration,
    /// How long ago the job was enqueued, by the queue's clock.
    pub age: Duration,
}

impl Delivery {
    /// A delivery, made by a queue.
    #[must_use]
    pub fn new(job: Job, number: i64, lost: u32, is_suspect: bool, times: Times) -> Self {
        let Times { remaining, age } = times;
        Self { job, number, lost, is_suspect, remaining, age }
    }
}

/// A job as its queue shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct QueuedJob {
    /// The job.
    pub job: Job,
    /// How long until its deadline, and since it was enqueued.
    pub times: Times,
    /// What the queue knows about it.
    pub standing: Standing,
}

/// What a queue knows about a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a queue has no other")]
pub enum Standing {
    /// It waits.
    Waiting,
    /// A worker holds it.
    Claimed,
    /// It has ended.
    Ended,
    /// It was parked: too many of its deliveries were lost.
    Parked,
}

impl QueuedJob {
    /// What a queue has found.
    #[must_use]
    pub fn new(job: Job, times: Times, standing: Standing) -> Self {
        Self { job, times, standing }
    }

    pub(crate) fn is_overdue(&self) -> bool {
        self.times.remaining.is_zero()
    }

    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.standing, Standing::Ended | Standing::Parked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_read_back_and_nothing_else_is_one() {
        let id = JobId::of(&RecordId::from_bytes([7; 32]));
        assert_eq!(id.as_str().parse(), Ok(id.clone()));
        for text in ["", "7", &id.as_str()[1..], &id.as_str().to_uppercase(), &"g".repeat(64), &"é".repeat(32)] {
            assert_eq!(text.parse::<JobId>(), Err(InvalidJobId), "{text}");
        }
    }

    #[test]
    fn debug_shows_no_payload() {
        let id = JobId::of(&RecordId::from_bytes([7; 32]));
        let job = Job::new(id, "report".into(), None, Bytes::from_static(b"secret"));
        assert!(!format!("{job:?}").contains("secret"));
    }
}
