//! The opt-in that lets Redis back AtMostOnce, although it can lose records.

use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{
    Acquire, AcquireOutcome, Capabilities, Checkpoint, DurableStore, IdempotencyStore, Lease, LeaseRenewer, LiveRecord,
    OwnerOutcome, OwnerToken, Record, RecordId, Settlement, SettlementListener, StoreError, Term,
};

use crate::store::RedisStore;

/// A [`RedisStore`] that may back AtMostOnce: the application accepts that it can lose records.
///
/// A failover, or a restart without persistence, can lose acknowledged records. A repeat then runs the operation again.
/// See [`RedisStore::dangerous_accept_store_loss`].
#[derive(Debug, Clone)]
pub struct LossyRedisStore {
    inner: RedisStore,
    identity: OwnerToken,
}

impl RedisStore {
    /// Converts this store into one that may back AtMostOnce.
    ///
    /// AtMostOnce on Redis alone means "at most one run, unless Redis loses the record".
    /// [`self_test`](Self::self_test) reports how much Redis may lose. Persistence and
    /// [`min_replicas`](crate::RedisConfig::min_replicas) reduce that. If that is not enough, use a store that keeps what
    /// it acknowledged: Postgres, SQLite, or Postgres with Redis in front.
    #[must_use]
    pub fn dangerous_accept_store_loss(self) -> LossyRedisStore {
        LossyRedisStore { inner: self, identity: OwnerToken::random() }
    }
}

#[async_trait]
impl DurableStore for LossyRedisStore {
    async fn live_record(&self, id: &RecordId) -> Result<Option<LiveRecord>, StoreError> {
        self.inner.live_record(id).await
    }

    /// Differs in each process: a process does not trust another one's cached copies, as Redis may have lost the records.
    fn identity(&self) -> [u8; 16] {
        *self.identity.as_bytes()
    }

    fn may_be_copied(&self) -> bool {
        true
    }
}

#[async_trait]
impl IdempotencyStore for LossyRedisStore {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        self.inner.acquire(request).await
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.inner.renew(lease, term).await
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        self.inner.checkpoint(lease, checkpoint).await
    }

    async fn settle(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError> {
        self.inner.settle(lease, settlement, retention).await
    }

    async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        self.inner.peek(id).await
    }

    fn on_settled(&self, listener: Weak<dyn SettlementListener>) {
        self.inner.on_settled(listener);
    }

    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>> {
        self.inner.renewer()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
}
