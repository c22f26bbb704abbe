//! What bugs of the engine do. This file is in patched copies of the tree only.

use std::sync::Arc;

use tokio::time::Instant;

use super::admit::{Admission, Admitted};
use super::hold::Held;
use super::settle::{SettlementPlan, Settled};
use super::shared::Shared;
use crate::machine::{Acquire, Lease};
use crate::record::Acquisition;
use crate::store::StoreTransaction;

/// The right to execute, which nobody gave.
pub(super) fn unasked(shared: &Shared, request: &Acquire, otherwise: Admission) -> Admission {
    let Some(permit) = shared.permit() else { return otherwise };
    let Acquire { id, fingerprint, owner, .. } = *request;
    let lease = Lease { id, fingerprint, owner, attempt: 1, acquisition: Acquisition::Fresh, checkpoint: None };
    let acquired_at = Instant::now();
    Admission::Run(Admitted { lease, transaction: None, renew: true, acquired_at, is_unclear: false, permit })
}

impl Shared {
    /// Settles after the caller was answered.
    pub(super) fn settle_after_the_answer(self: &Arc<Self>, lease: Lease, plan: SettlementPlan, held: Held) -> Settled {
        let shared = Arc::clone(self);
        self.group.tasks.spawn(async move {
            let _ = shared.store().settle(&lease, &plan.settlement, plan.retention).await;
            drop(held);
            shared.waiters.wake(&lease.id);
        });
        Settled::Ours
    }

    /// Commits after the caller was answered.
    pub(super) fn commit_after_the_answer(&self, plan: &SettlementPlan, transaction: Box<dyn StoreTransaction>) -> Settled {
        let SettlementPlan { settlement, writes, retention } = plan.clone();
        self.group.tasks.spawn(async move { transaction.finish(&settlement, retention, writes).await });
        Settled::Ours
    }
}
