//! A handler's transaction, whose answer is sealed when it ends.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{Lease, OwnerOutcome, Settlement, StoreError, StoreTransaction, Writes};

use crate::sealer::{Run, Sealer};

/// Wraps the transaction of the wrapped store, which the handler uses.
pub(crate) struct EncryptedTransaction {
    inner: Box<dyn StoreTransaction>,
    sealer: Arc<Sealer>,
    lease: Lease,
}

impl EncryptedTransaction {
    pub(crate) fn new(inner: Box<dyn StoreTransaction>, sealer: Arc<Sealer>, lease: Lease) -> Self {
        Self { inner, sealer, lease }
    }
}

#[async_trait]
impl StoreTransaction for EncryptedTransaction {
    /// It consumes the transaction, so that it is never repeated, and a refusal needs no second look.
    async fn finish(
        self: Box<Self>,
        settlement: &Settlement,
        retention: Duration,
        writes: Writes,
    ) -> Result<OwnerOutcome, StoreError> {
        let settlement = self.sealer.seal_settlement(Run::of_lease(&self.lease), settlement)?;
        self.inner.finish(&settlement, retention, writes).await
    }

    fn as_any_mut(&mut self) -> &mut (dyn Any + Send) {
        self.inner.as_any_mut()
    }
}

impl fmt::Debug for EncryptedTransaction {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_tuple("EncryptedTransaction").field(&self.inner).finish()
    }
}
