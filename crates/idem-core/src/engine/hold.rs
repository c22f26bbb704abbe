//! What a run holds until its record is settled, and whether it still holds its lease when it begins.

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::context::Context;
use super::late_acquires::{give_back_when_taken, never_answered};
use super::renewal::Renewal;
use crate::machine::{Lease, OwnerOutcome};
use crate::store::{StoreError, StoreErrorKind};

/// The most renewals before a run. A store that takes a third of a lease for each of them is too slow to run anything under it.
const ROUNDS: u32 = 3;

/// Held from the acquire to the settlement.
pub(super) struct Held {
    /// `None` when there is no lease to renew.
    pub(super) renewal: Option<Renewal>,
    /// Cancelled when the lease is lost or about to end unrenewed, and when this is dropped.
    pub(super) lost: CancellationToken,
    /// Whether an acquire of this run got no answer, so that the store may still execute it.
    pub(super) is_acquire_unclear: bool,
    /// The permit of one operation that [may run](super::Settings::max_running).
    pub(super) _permit: OwnedSemaphorePermit,
}

/// Why an operation does not run although it was acquired.
pub(super) enum Refusal {
    /// Another owner has its record, or may have it by now.
    Lost,
    /// The store did not confirm the lease.
    Unconfirmed(StoreError),
}

/// Whether a lease that was requested, or renewed, at `held_from` certainly holds now. A third of it may have passed:
/// renewals are due then, and a clock that runs a little fast does no harm.
pub(super) fn is_recent(context: &Context, held_from: Instant) -> bool {
    held_from.elapsed() < context.shared().settings.lease / 3
}

/// A part of the operation that goes on after its end, such as a task that a timeout has left, owns nothing any more.
impl Drop for Held {
    fn drop(&mut self) {
        self.lost.cancel();
    }
}

impl Held {
    /// Gives the renewals their whole time again, from the last one on: the settlement goes on behind the answer.
    pub(super) fn renew_behind(&mut self, context: &Context) {
        if self.renewal.take().is_some()
            && let Some(renewed_at) = context.renewed_at()
        {
            self.renewal = Some(context.start_renewal(renewed_at));
        }
        self.expect_the_end();
    }

    /// From now on, a refused renewal is not reported: it may come after the settlement.
    pub(super) fn expect_the_end(&self) {
        if let Some(renewal) = &self.renewal {
            renewal.expect_the_end();
        }
    }

    /// Releases what an unanswered acquire of this run may take late. Call it when nothing runs under the owner token
    /// of `lease`.
    pub(super) fn give_back_late_acquire(&self, context: &Context, lease: &Lease) {
        if self.is_acquire_unclear {
            give_back_when_taken(
                context.shared(),
                context.subject(),
                never_answered(lease.id, lease.fingerprint, lease.owner),
            );
        }
    }

    /// Renews the lease directly before the operation runs: another owner may have taken over since it was requested.
    /// When it returns `Ok`, the lease [is recent](is_recent).
    pub(super) async fn confirm(&mut self, context: &Context) -> Result<(), Refusal> {
        let Some(lease) = context.lease() else { return Ok(()) };
        let shared = context.shared();
        for _ in 0..ROUNDS {
            let sent = Instant::now();
            match shared.bounded(context.subject(), shared.store().renew(lease, context.term())).await {
                // The renewals have reported the loss of the lease meanwhile: the operation would have to stop at once.
                Ok(OwnerOutcome::Applied) if context.lost().is_cancelled() => return Err(Refusal::Lost),
                Ok(OwnerOutcome::Applied) if is_recent(context, sent) => {
                    self.renewal = Some(context.start_renewal(sent));
                    return Ok(());
                }
                Ok(OwnerOutcome::Applied) => {}
                Ok(OwnerOutcome::LeaseLost) => return Err(Refusal::Lost),
                Err(error) => return Err(Refusal::Unconfirmed(error)),
            }
        }
        let message = "the store takes more than a third of a lease to renew it; lengthen the lease";
        Err(Refusal::Unconfirmed(StoreError::new(StoreErrorKind::Timeout, message)))
    }
}
