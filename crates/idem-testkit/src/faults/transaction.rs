//! The transaction that injects faults.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{OwnerOutcome, Settlement, StoreError, StoreTransaction, Writes};

use super::plan::{Plan, Verb};

#[derive(Debug)]
pub(super) struct FaultyTransaction {
    pub(super) inner: Box<dyn StoreTransaction>,
    pub(super) plan: Arc<Plan>,
}

#[async_trait]
impl StoreTransaction for FaultyTransaction {
    async fn finish(
        self: Box<Self>,
        settlement: &Settlement,
        retention: Duration,
        writes: Writes,
    ) -> Result<OwnerOutcome, StoreError> {
        // A call that fails before it is executed drops the inner transaction, which rolls it back.
        let (inner, settlement) = (self.inner, settlement.clone());
        self.plan.call(Verb::Finish, async move { inner.finish(&settlement, retention, writes).await }).await
    }

    fn as_any_mut(&mut self) -> &mut (dyn Any + Send) {
        self.inner.as_any_mut()
    }
}
