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
use idem_core::{StoreError, StoreErrorKind};
use redis::aio::ConnectionLike;
use redis::{RedisError, Script, ScriptInvocation};

use crate::job::{Delivery, Job, JobId, QueuedJob, SUSPECT_FROM};
use crate::queue::{EnqueueError, JobQueue};

/// A queue in Redis, over any asynchronous connection of the crate `redis`: use its `ConnectionManager`, or its
/// `ClusterConnection`. All keys of a queue are in one slot.
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
    hold: Script,
    end: Script,
    find: Script,
}

/// What [`JobQueue::find`] reads, by the server's clock.
const FIND: &str = "
    local time = redis.call('TIME')
    local job = redis.call('HMGET', KEYS[1], 'name', 'principal', 'payload', 'deadline', 'parked')
    if not job[1] then return nil end
    return { job[1], job[2], job[3], job[4] - time[1] * 1000 - math.floor(time[2] / 1000), job[5] or '0' }";

impl<C: ConnectionLike + Clone> RedisQueue<C> {
    /// A queue whose keys begin with `prefix`, such as `shop:jobs:`.
    pub fn new(connection: C, prefix: &str) -> Self {
        let scripts = Scripts {
            enqueue: Script::new(include_str!("../lua/enqueue.lua")),
            claim: Script::new(include_str!("../lua/claim.lua")),
            hold: Script::new(include_str!("../lua/hold.lua")),
            end: Script::new(include_str!("../lua/end.lua")),
            find: Script::new(FIND),
        };
        Self { connection, prefix: format!("{{{prefix}}}").into(), scripts: Arc::new(scripts) }
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

    fn key(&self, id: &JobId) -> String {
        format!("{}job:{id}", self.prefix)
    }

    /// A script about one job.
    fn about<'a>(&self, script: &'a Script, id: &JobId) -> ScriptInvocation<'a> {
        let mut invocation = script.prepare_invoke();
        invocation.key(self.key(id)).key(self.due()).key(self.suspects()).arg(id.as_str());
        invocation
    }

    /// Makes a claimed job due after `delay`.
    async fn delay(&self, what: &str, of: &Delivery, delay: Duration, is_report: bool) -> Result<bool, StoreError>
    where
        C: Send + Sync,
    {
        let mut hold = self.about(&self.scripts.hold, &of.job.id);
        hold.arg(of.number).arg(millis(delay)).arg(-i64::from(is_report)).arg(SUSPECT_FROM);
        hold.invoke_async(&mut self.connection.clone()).await.map_err(|error| failed(what, error))
    }
}

#[async_trait]
impl<C: ConnectionLike + Clone + Send + Sync + 'static> JobQueue for RedisQueue<C> {
    async fn enqueue(&self, _run: &Context, job: &Job, deadline: Duration) -> Result<(), EnqueueError> {
        let mut enqueue = self.about(&self.scripts.enqueue, &job.id);
        let principal = job.principal.as_ref().map_or_else(String::new, |principal| format!("+{principal}"));
        enqueue.arg(&job.name).arg(principal).arg(job.payload.as_ref()).arg(millis(deadline));
        let enqueued = enqueue.invoke_async(&mut self.connection.clone()).await;
        let name: String = enqueued.map_err(|error| failed("enqueue", error))?;
        if name == job.name { Ok(()) } else { Err(EnqueueError::OtherJob { name }) }
    }

    async fn claim(&self, most: NonZeroU32, with_suspect: bool, hold: Duration) -> Result<Vec<Delivery>, StoreError> {
        type Claimed = (String, String, String, Vec<u8>, i64, i64, i64);
        let mut claim = self.scripts.claim.prepare_invoke();
        claim.key(self.due()).key(self.suspects()).arg(most.get()).arg(u8::from(with_suspect)).arg(millis(hold));
        claim.arg(self.jobs()).arg(SUSPECT_FROM);
        let claimed = claim.invoke_async(&mut self.connection.clone()).await;
        let claimed: Vec<Claimed> = claimed.map_err(|error| failed("claim", error))?;
        let read = |(id, name, principal, payload, number, unreported, remaining): Claimed| {
            let job = job(id.parse().map_err(corrupt)?, name, &principal, payload);
            let unreported = u32::try_from(unreported).unwrap_or(0);
            Ok(Delivery { job, number, unreported, remaining: until(remaining) })
        };
        claimed.into_iter().map(read).collect()
    }

    async fn hold(&self, delivery: &Delivery, hold: Duration) -> Result<bool, StoreError> {
        self.delay("hold", delivery, hold, false).await
    }

    async fn put_back(&self, delivery: &Delivery, delay: Duration) -> Result<(), StoreError> {
        self.delay("put back", delivery, delay, true).await.map(drop)
    }

    async fn end(&self, id: &JobId, is_parked: bool, keep: Duration) -> Result<(), StoreError> {
        let mut end = self.about(&self.scripts.end, id);
        end.arg(u8::from(is_parked)).arg(millis(keep));
        end.invoke_async::<bool>(&mut self.connection.clone()).await.map(drop).map_err(|error| failed("end", error))
    }

    async fn find(&self, id: &JobId) -> Result<Option<QueuedJob>, StoreError> {
        type Found = Option<(String, String, Vec<u8>, i64, String)>;
        let mut find = self.scripts.find.prepare_invoke();
        find.key(self.key(id));
        let found: Found =
            find.invoke_async(&mut self.connection.clone()).await.map_err(|error| failed("find", error))?;
        Ok(found.map(|(name, principal, payload, remaining, parked)| QueuedJob {
            job: job(id.clone(), name, &principal, payload),
            is_overdue: remaining <= 0,
            is_parked: parked == "1",
        }))
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

fn job(id: JobId, name: String, principal: &str, payload: Vec<u8>) -> Job {
    Job { id, name, principal: principal.strip_prefix('+').map(str::to_owned), payload: Bytes::from(payload) }
}

/// The time until a deadline, in milliseconds; zero after it.
fn until(remaining_ms: i64) -> Duration {
    Duration::from_millis(remaining_ms.try_into().unwrap_or(0))
}

fn millis(duration: Duration) -> i64 {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    i64::try_from(duration.min(CENTURY).as_millis()).unwrap_or(i64::MAX)
}

fn corrupt(error: impl std::error::Error + Send + Sync + 'static) -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, "the job queue in Redis has a job that cannot be read").with_source(error)
}

fn failed(what: &str, error: RedisError) -> StoreError {
    let message = format!("the job queue in Redis could not {what}");
    StoreError::new(StoreErrorKind::Unavailable, message).with_source(error)
}
