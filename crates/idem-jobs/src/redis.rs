//! A queue in Redis: a hash for each job, and a sorted set of those that are due, with another one for suspects.
//!
//! apalis 1.0 was tried first, with `apalis-redis`. The keys of one queue are in different slots of a Cluster, and a second job
//! with one id is not recognised.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use idem_core::engine::Context;
use idem_core::{OwnerToken, StoreError, StoreErrorKind};
use redis::aio::ConnectionLike;
use redis::{RedisError, Script, ScriptInvocation};

use crate::job::{Delivery, EnqueuedBefore, Job, JobId, QueuedJob, SUSPECT_FROM, Standing, Times};
use crate::queue::{EnqueueError, JobQueue};

/// A queue in Redis, over any asynchronous connection of the crate `redis`: use its `ConnectionManager`, or its
/// `ClusterConnection`. All keys of a queue are in one slot.
///
/// Give the connection a response timeout of [`queue_timeout`](crate::JobSettings::queue_timeout) or more. Its default of 500 ms is
/// too short for large payloads: a claim that it cuts off counts as a lost delivery. The server must have `noeviction`.
///
/// A job is added before the record of its request is settled. If the process dies in between, the repeat of the request finds
/// the job. A failover or a restart without persistence loses jobs, as it loses records.
#[derive(Clone)]
pub struct RedisQueue<C> {
    connection: C,
    prefix: Arc<str>,
    scripts: Arc<Scripts>,
}

struct Scripts {
    enqueue: Script,
    claim: Script,
    report: Script,
    end: Script,
    find: Script,
}

/// A report about a delivery.
struct Report {
    /// How many deliveries count as lost, if that changes.
    lost: Option<u32>,
    stays_claimed: bool,
    due_in: Option<Duration>,
}

impl<C: ConnectionLike + Clone> RedisQueue<C> {
    /// A queue whose keys begin with `{prefix-jobs}`; the braces are a part of them.
    pub fn new(connection: C, prefix: &str) -> Self {
        let scripts = Scripts {
            enqueue: Script::new(include_str!("../lua/enqueue.lua")),
            claim: Script::new(include_str!("../lua/claim.lua")),
            report: Script::new(include_str!("../lua/report.lua")),
            end: Script::new(include_str!("../lua/end.lua")),
            find: Script::new(include_str!("../lua/find.lua")),
        };
        Self { connection, prefix: format!("{{{prefix}-jobs}}").into(), scripts: Arc::new(scripts) }
    }

    fn due(&self) -> String {
        format!("{}due", self.prefix)
    }

    fn suspects(&self) -> String {
        format!("{}suspects", self.prefix)
    }

    fn jobs(&self) -> String {
        format!("{}job:", self.prefix)
    }

    /// A script about one job.
    fn about<'a>(&self, script: &'a Script, id: &JobId) -> ScriptInvocation<'a> {
        let mut invocation = script.prepare_invoke();
        invocation.key(format!("{}{id}", self.jobs())).key(self.due()).key(self.suspects()).arg(id.as_str());
        invocation
    }

    async fn report(&self, what: &str, of: &Delivery, report: Report) -> Result<bool, StoreError>
    where
        C: Send + Sync,
    {
        let Report { lost, stays_claimed, due_in } = report;
        let mut invocation = self.about(&self.scripts.report, &of.job.id);
        invocation
            .arg(of.number)
            .arg(lost.map_or(-1, i64::from))
            .arg(u8::from(stays_claimed))
            .arg(due_in.map_or(-1, millis))
            .arg(SUSPECT_FROM);
        invocation.invoke_async(&mut self.connection.clone()).await.map_err(|error| failed(what, error))
    }
}

#[async_trait]
impl<C: ConnectionLike + Clone + Send + Sync + 'static> JobQueue for RedisQueue<C> {
    async fn enqueue(
        &self,
        _run: &Context,
        job: &Job,
        by: OwnerToken,
        deadline: Duration,
    ) -> Result<Option<EnqueuedBefore>, EnqueueError> {
        let mut enqueue = self.about(&self.scripts.enqueue, &job.id);
        let principal = job.principal.as_ref().map_or_else(String::new, |principal| format!("+{principal}"));
        enqueue.arg(&job.name).arg(principal).arg(job.payload.as_ref()).arg(by.as_bytes()).arg(millis(deadline));
        enqueue.arg(job.trace.map_or_else(String::new, |trace| trace.to_string()));
        let before = enqueue.invoke_async(&mut self.connection.clone()).await;
        let before: Option<(String, Vec<u8>, Vec<u8>)> = before.map_err(|error| failed("enqueue", error))?;
        let Some((name, payload, by)) = before else { return Ok(None) };
        let by = by.try_into().map_err(|_| corrupt("the run that added a job has not 16 bytes"))?;
        Ok(Some(EnqueuedBefore::new(name, payload.into(), OwnerToken::from_bytes(by))))
    }

    async fn claim(&self, most: NonZeroU32, with_suspect: bool, hold: Duration) -> Result<Vec<Delivery>, StoreError> {
        type Claimed = (String, String, String, Vec<u8>, String, i64, i64, bool, i64, i64);
        let mut claim = self.scripts.claim.prepare_invoke();
        claim.key(self.due()).key(self.suspects()).arg(most.get()).arg(u8::from(with_suspect)).arg(millis(hold));
        claim.arg(self.jobs()).arg(SUSPECT_FROM);
        let claimed = claim.invoke_async(&mut self.connection.clone()).await;
        let (claimed, damaged): (Vec<Claimed>, Vec<String>) = claimed.map_err(|error| failed("claim", error))?;
        for id in damaged {
            tracing::error!(job = id, "a job in Redis is damaged, and does not run");
        }
        let read = |(id, name, principal, payload, trace, number, lost, is_suspect, remaining, age): Claimed| {
            let Ok(parsed) = id.parse() else {
                tracing::error!(job = id, "the queue has a job whose id is none; it does not run");
                return None;
            };
            let job = job(parsed, name, &principal, payload, &trace);
            Some(Delivery::new(job, number, lost.try_into().unwrap_or(0), is_suspect, times(remaining, age)))
        };
        Ok(claimed.into_iter().filter_map(read).collect())
    }

    async fn begin(&self, suspect: &Delivery) -> Result<bool, StoreError> {
        self.report(
            "begin",
            suspect,
            Report { lost: Some(suspect.lost.saturating_add(1)), stays_claimed: true, due_in: None },
        )
        .await
    }

    async fn hold(&self, delivery: &Delivery, hold: Duration) -> Result<bool, StoreError> {
        self.report("hold", delivery, Report { lost: None, stays_claimed: true, due_in: Some(hold) }).await
    }

    async fn put_back(&self, delivery: &Delivery, delay: Duration, lost: u32) -> Result<(), StoreError> {
        let report = Report { lost: Some(lost), stays_claimed: false, due_in: Some(delay) };
        self.report("put back", delivery, report).await.map(drop)
    }

    async fn end(&self, ids: &[JobId], is_parked: bool, keep: Duration) -> Result<Vec<JobId>, StoreError> {
        let mut end = self.scripts.end.prepare_invoke();
        end.key(self.due()).key(self.suspects()).arg(u8::from(is_parked)).arg(millis(keep)).arg(self.jobs());
        for id in ids {
            end.arg(id.as_str());
        }
        let ended = end.invoke_async::<()>(&mut self.connection.clone()).await;
        ended.map(|()| Vec::new()).map_err(|error| failed("end", error))
    }

    async fn find(&self, id: &JobId) -> Result<Option<QueuedJob>, StoreError> {
        let found = self.about(&self.scripts.find, id).invoke_async(&mut self.connection.clone()).await;
        let found: Option<(String, String, Vec<u8>, String, i64, i64, u8)> =
            found.map_err(|error| failed("find", error))?;
        let Some((name, principal, payload, trace, remaining, age, standing)) = found else { return Ok(None) };
        let standing = match standing {
            0 => Standing::Waiting,
            1 => Standing::Claimed,
            2 => Standing::Ended,
            _ => Standing::Parked,
        };
        let job = job(id.clone(), name, &principal, payload, &trace);
        Ok(Some(QueuedJob::new(job, times(remaining, age), standing)))
    }

    async fn purge(&self, _most: NonZeroU32) -> Result<u32, StoreError> {
        // Jobs that have ended expire by themselves.
        Ok(0)
    }
}

impl<C> fmt::Debug for RedisQueue<C> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("RedisQueue").field("prefix", &self.prefix).finish_non_exhaustive()
    }
}

fn job(id: JobId, name: String, principal: &str, payload: Vec<u8>, trace: &str) -> Job {
    let principal = principal.strip_prefix('+').map(str::to_owned);
    Job::new(id, name, principal, Bytes::from(payload)).trace(trace.parse().ok())
}

/// From milliseconds; the time until the deadline is negative after it.
fn times(remaining: i64, age: i64) -> Times {
    let millis = |millis: i64| Duration::from_millis(millis.try_into().unwrap_or(0));
    Times { remaining: millis(remaining), age: millis(age) }
}

fn millis(duration: Duration) -> i64 {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    i64::try_from(duration.min(CENTURY).as_millis()).unwrap_or(i64::MAX)
}

fn corrupt(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, "the job queue in Redis has a job that cannot be read").with_source(error)
}

fn failed(what: &str, error: RedisError) -> StoreError {
    let message = format!("the job queue in Redis could not {what}");
    StoreError::new(StoreErrorKind::Unavailable, message).with_source(error)
}
