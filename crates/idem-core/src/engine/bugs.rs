//! What [planted bugs](crate::planted) of the engine do.

use std::sync::Arc;

use tokio::time::Instant;

use super::Shared;
use super::admit::{Admission, Admitted};
use super::heartbeat::Heartbeat;
use super::settle::{Ending, Settled};
use crate::machine::{Acquire, Lease};
use crate::record::Acquisition;
use crate::store::StoreTransaction;

/// The right to execute, which nobody gave.
pub(super) fn unasked(request: &Acquire) -> Admission {
    let lease =
        Lease { id: request.id, owner: request.owner, attempt: 1, acquisition: Acquisition::Fresh, checkpoint: None };
    Admission::Run(Admitted { lease, transaction: None, renew: true, acquired_at: Instant::now() })
}

impl Shared {
    /// Settles after the caller was answered.
    pub(super) fn settle_behind(self: &Arc<Self>, lease: Lease, ending: Ending, heartbeat: Heartbeat) -> Settled {
        let shared = Arc::clone(self);
        self.tasks.spawn(async move {
            let _ = shared.store().settle(&lease, &ending.settlement, ending.retention).await;
            drop(heartbeat);
            shared.waiters.wake(&lease.id);
        });
        Settled::Ours
    }

    /// Commits after the caller was answered.
    pub(super) fn commit_behind(&self, ending: &Ending, transaction: Box<dyn StoreTransaction>) -> Settled {
        let Ending { settlement, writes, retention } = ending.clone();
        self.tasks.spawn(async move { transaction.finish(&settlement, retention, writes).await });
        Settled::Ours
    }
}
