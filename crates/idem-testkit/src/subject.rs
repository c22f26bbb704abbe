//! The store under test, with its time and its purging.

use std::any::Any;
use std::fmt;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::memory::ManualClock;
use idem_core::{
    Acquire, AcquireOutcome, Checkpoint, IdempotencyStore, Inspect, Lease, Operate, OwnerOutcome, Purge, Record,
    RecordId, Settlement, Term, TimeOffset, Timestamp,
};

use crate::fixture::{KEPT, request};

/// A case of the conformance suite: it panics when the store breaks its contract.
pub type Case = for<'a> fn(&'a Subject) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// Moves the store's time in tests.
///
/// A store that reads a clock in its process takes a [`ManualClock`]. A store whose server keeps the time adds an offset to it.
pub trait TimeControl: fmt::Debug + Send + Sync + 'static {
    /// Moves the store's time forward, for every verb that starts afterwards.
    fn advance(&self, by: Duration);
}

impl TimeControl for TimeOffset {
    fn advance(&self, by: Duration) {
        TimeOffset::advance(self, by);
    }
}

impl TimeControl for ManualClock {
    fn advance(&self, by: Duration) {
        ManualClock::advance(self, by);
    }
}

/// Counts what a store's server still holds, for servers that delete expired records themselves.
#[async_trait]
pub trait Remaining: fmt::Debug + Send + Sync + 'static {
    /// How many of the subject's records the server holds now, expired ones included.
    async fn remaining(&self) -> u64;
}

/// How expired records go away.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Purging {
    /// By calls of [`Purge`].
    Called(Arc<dyn Purge>),
    /// By the server, which has no verb for it.
    OfItsOwn(Arc<dyn Remaining>),
}

/// A store under test.
///
/// # Isolation
/// Every test uses fresh record ids, so many tests may keep their records in one database. Time and purge must belong to one
/// subject only: tests that run at once must not move each other's clock or purge each other's records. Give each subject a
/// schema, a database or a key prefix.
pub struct Subject {
    /// The store.
    pub store: Arc<dyn IdempotencyStore>,
    /// How its expired records go away.
    pub purging: Purging,
    /// Its time.
    pub time: Arc<dyn TimeControl>,
    /// How far the store's time may be from where the test put it. Times are compared within it. It is zero for a manual
    /// clock. For a server's clock, which goes on, it is as long as a test may take.
    pub precision: Duration,
    /// Its repairs; `None` if it has none.
    pub operate: Option<Arc<dyn Operate>>,
    /// Shows its records; `None` if it cannot.
    pub inspect: Option<Arc<dyn Inspect>>,
    /// Whether the store keeps where records came from.
    pub keeps_origins: bool,
    keep: Vec<Box<dyn Any + Send + Sync>>,
}

impl Subject {
    /// A subject whose time stands still unless it is moved.
    #[must_use]
    pub fn new(store: Arc<dyn IdempotencyStore>, purge: Arc<dyn Purge>, time: Arc<dyn TimeControl>) -> Self {
        Self {
            store,
            purging: Purging::Called(purge),
            time,
            precision: Duration::ZERO,
            operate: None,
            inspect: None,
            keeps_origins: true,
            keep: Vec::new(),
        }
    }

    /// A subject whose server deletes expired records. Its `time` must bring that forward as well: after
    /// [`advance`](TimeControl::advance), the server holds what it would hold then.
    #[must_use]
    pub fn purging_itself(
        store: Arc<dyn IdempotencyStore>,
        remaining: Arc<dyn Remaining>,
        time: Arc<dyn TimeControl>,
    ) -> Self {
        Self {
            store,
            purging: Purging::OfItsOwn(remaining),
            time,
            precision: Duration::ZERO,
            operate: None,
            inspect: None,
            keeps_origins: true,
            keep: Vec::new(),
        }
    }

    /// Sets how far the time may be off. Default zero; at most 10 s, so that a test reaches the end of a lease only by moving
    /// the time.
    ///
    /// # Panics
    /// When `precision` is more than 10 s.
    #[must_use]
    pub fn with_precision(mut self, precision: Duration) -> Self {
        assert!(precision <= Duration::from_secs(10), "a precision of more than 10 s proves nothing");
        self.precision = precision;
        self
    }

    /// Names the repairs of the store, for the cases of [`resolving`](crate::resolving).
    #[must_use]
    pub fn operated_by(mut self, operate: Arc<dyn Operate>) -> Self {
        self.operate = Some(operate);
        self
    }

    /// Names what shows its records, for the cases of [`inspecting`](crate::inspecting).
    #[must_use]
    pub fn inspected_by(mut self, inspect: Arc<dyn Inspect>) -> Self {
        self.inspect = Some(inspect);
        self
    }

    /// Says that the store does not keep where records came from.
    #[must_use]
    pub fn without_origins(mut self) -> Self {
        self.keeps_origins = false;
        self
    }

    /// Keeps `value` for as long as the subject: a temporary directory, a server, a pool.
    #[must_use]
    pub fn keeping(mut self, value: impl Any + Send + Sync) -> Self {
        self.keep.push(Box::new(value));
        self
    }

    /// Moves the time to where something that ends in `duration` has surely ended; on a manual clock exactly there.
    pub fn advance_to_end_of(&self, duration: Duration) {
        self.time.advance(duration + self.precision);
    }

    /// Moves the time to where something that ends in `duration` is surely not over yet; on a manual clock, one microsecond
    /// before its end. Returns how much is left.
    pub fn advance_to_just_before(&self, duration: Duration) -> Duration {
        let left = (self.precision * 2).max(Duration::from_micros(1));
        self.time.advance(duration - left);
        left
    }

    /// The store's time, as it writes it into records.
    ///
    /// # Panics
    /// When the store cannot answer, or refuses a fresh key.
    pub async fn now(&self) -> Timestamp {
        let lease = self.lease(&request()).await;
        let record = self.record(&lease.id).await;
        self.settle(&lease, &Settlement::Released).await;
        record.created_at
    }

    pub(crate) async fn acquire(&self, request: &Acquire) -> AcquireOutcome {
        self.store.acquire(request).await.expect("acquire: the store could not answer")
    }

    /// An acquire that must succeed.
    #[track_caller]
    pub(crate) fn lease<'a>(&'a self, request: &'a Acquire) -> impl Future<Output = Lease> + Send + 'a {
        let caller = std::panic::Location::caller();
        async move {
            match self.acquire(request).await {
                AcquireOutcome::Acquired(lease) => lease,
                other => panic!("expected Acquired at {caller}, got {other:?}"),
            }
        }
    }

    pub(crate) async fn renew(&self, lease: &Lease, term: Term) -> OwnerOutcome {
        self.store.renew(lease, term).await.expect("renew: the store could not answer")
    }

    pub(crate) async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> OwnerOutcome {
        self.store.checkpoint(lease, checkpoint).await.expect("checkpoint: the store could not answer")
    }

    /// Settles with a retention of [`KEPT`].
    pub(crate) async fn settle(&self, lease: &Lease, settlement: &Settlement) -> OwnerOutcome {
        self.store.settle(lease, settlement, KEPT).await.expect("settle: the store could not answer")
    }

    pub(crate) async fn peek(&self, id: &RecordId) -> Option<Record> {
        self.store.peek(id).await.expect("peek: the store could not answer")
    }

    /// A record that must exist.
    pub(crate) async fn record(&self, id: &RecordId) -> Record {
        self.peek(id).await.expect("peek found no record")
    }

    /// Purges, and returns how many records went; zero if the server purges without a call.
    pub(crate) async fn purge(&self, limit: u32) -> u32 {
        let limit = NonZeroU32::new(limit).expect("a limit of zero purges nothing");
        match &self.purging {
            Purging::Called(purge) => purge.purge(limit).await.expect("purge: the store could not answer"),
            Purging::OfItsOwn(_) => 0,
        }
    }

    /// Purges until there is nothing left to purge.
    pub(crate) async fn drain(&self) {
        for _ in 0..100_000 {
            if self.purge(1_000).await < 1_000 {
                return;
            }
        }
        panic!("purge never ran out of expired records");
    }
}

impl fmt::Debug for Subject {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Subject")
            .field("store", &self.store)
            .field("time", &self.time)
            .field("precision", &self.precision)
            .finish_non_exhaustive()
    }
}
