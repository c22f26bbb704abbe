//! A handler's transaction, which updates the fast store when it ends.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{DurableStore, Lease, OwnerOutcome, Settlement, StoreError, StoreTransaction, Writes};

use crate::shared::Shared;

/// Wraps the durable store's transaction, which the handler uses.
pub(crate) struct HybridTransaction<D: DurableStore + ?Sized> {
    inner: Box<dyn StoreTransaction>,
    locked: Locked<D>,
}

impl<D: DurableStore + ?Sized> HybridTransaction<D> {
    pub(crate) fn new(inner: Box<dyn StoreTransaction>, shared: Arc<Shared<D>>, lease: Lease) -> Self {
        Self { inner, locked: Locked { shared, lease: Some(lease) } }
    }
}

#[async_trait]
impl<D: DurableStore + ?Sized> StoreTransaction for HybridTransaction<D> {
    async fn finish(
        self: Box<Self>,
        settlement: &Settlement,
        retention: Duration,
        writes: Writes,
    ) -> Result<OwnerOutcome, StoreError> {
        let Self { inner, mut locked } = *self;
        let outcome = locked.shared.decide(inner.finish(settlement, retention, writes)).await?;
        if let Some(lease) = &locked.lease {
            locked.shared.ended(lease, settlement, outcome).await;
        }
        locked.lease = None;
        Ok(outcome)
    }

    fn as_any_mut(&mut self) -> &mut (dyn Any + Send) {
        self.inner.as_any_mut()
    }
}

/// The lock of a run that has not ended. Dropping the transaction rolls it back, and removes the lock.
struct Locked<D: DurableStore + ?Sized> {
    shared: Arc<Shared<D>>,
    lease: Option<Lease>,
}

impl<D: DurableStore + ?Sized> Drop for Locked<D> {
    fn drop(&mut self) {
        if let Some(lease) = &self.lease {
            self.shared.dropped(lease);
        }
    }
}

impl<D: DurableStore + ?Sized> fmt::Debug for HybridTransaction<D> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("HybridTransaction").field(&self.inner).finish()
    }
}
