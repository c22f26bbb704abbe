//! Releases leases that an unanswered acquire takes late.
//!
//! When a stalled store resumes, it executes what is still in its sockets. By then the engine has answered that nothing
//! ran, so such an acquire takes a lease without an owner. Its key would be stuck for a lease, and under AtMostOnce its
//! outcome would be reported as unknown although nothing ran. The engine releases such a lease as soon as it appears.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tracing::Instrument as _;

use super::observer::{EventKind, Subject};
use super::shared::{FIRST_PAUSE, LAST_PAUSE, MOST_LATE_ACQUIRES, Shared};
use crate::fingerprint::Fingerprint;
use crate::machine::{Lease, OwnerOutcome, Settlement};
use crate::record::{Acquisition, OwnerToken};
use crate::record_id::RecordId;
use crate::store::StoreErrorKind;

/// How soon the store is asked again after its first answer: it executes stalled commands about then.
const SOON: Duration = Duration::from_secs(1);

/// The lease that an unanswered acquire would have returned. Stores look only at its id and its owner.
pub(super) fn never_answered(id: RecordId, fingerprint: Fingerprint, owner: OwnerToken) -> Lease {
    Lease { id, fingerprint, owner, attempt: 0, acquisition: Acquisition::Fresh, checkpoint: None }
}

/// Releases `lease` in the background if it appears. Ends when the store has answered for as long as a lease lasts.
///
/// No operation may run under its owner token, now or later.
pub(super) fn give_back_when_taken(shared: &Arc<Shared>, subject: &Subject, lease: Lease) {
    if Handle::try_current().is_err() {
        tracing::error!(record = %lease.id, "an acquire without an answer is not waited for: its runtime has ended");
        shared.observe(subject, None, EventKind::AcquireForgotten);
        return;
    }
    match Arc::clone(&shared.late_acquires).try_acquire_owned() {
        Ok(permit) => {
            shared.group.tasks.spawn(give_back(Arc::clone(shared), subject.clone(), lease, permit).in_current_span());
        }
        Err(_) => {
            tracing::error!(record = %lease.id, "an acquire without an answer is not waited for: {MOST_LATE_ACQUIRES} are already");
            shared.observe(subject, None, EventKind::AcquireForgotten);
        }
    }
}

async fn give_back(shared: Arc<Shared>, subject: Subject, lease: Lease, _permit: OwnedSemaphorePermit) {
    let length = shared.settings.lease;
    let give_up_at = Instant::now() + shared.settings.renewal_limit;
    // A lease that appears later is stuck for a third of its time at most.
    let looks = [SOON.min(length / 6), length / 3, length * 2 / 3, length];
    let mut answered: Option<(Instant, usize)> = None;
    let mut pause = FIRST_PAUSE;
    let mut has_woken = false;
    loop {
        let is_last = shared.group.closing.is_cancelled() || Instant::now() >= give_up_at;
        let released = tokio::select! {
            released = release(&shared, &subject, &lease) => released,
            () = shared.group.giving_up.cancelled() => return,
        };
        let next = match released {
            Released::Answered { applied } => {
                if applied && !std::mem::replace(&mut has_woken, true) {
                    shared.waiters.wake(&lease.id);
                }
                pause = FIRST_PAUSE;
                let (since, done) = answered.unwrap_or_else(|| (Instant::now(), 0));
                answered = Some((since, done + 1));
                match looks.get(done) {
                    Some(look) => since + *look,
                    None => return,
                }
            }
            // The store stalls, or stalls again.
            Released::Unanswered => {
                answered = None;
                pause = (pause * 2).min(LAST_PAUSE);
                Instant::now() + pause
            }
            Released::Unreadable => return,
        };
        if is_last {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep_until(next) => {}
            () = shared.group.closing.cancelled() => {}
        }
    }
}

enum Released {
    Answered {
        applied: bool,
    },
    Unanswered,
    /// The record cannot be read, so it cannot be released.
    Unreadable,
}

async fn release(shared: &Shared, subject: &Subject, lease: &Lease) -> Released {
    let Ok(_permit) = shared.late_releases.acquire().await else { return Released::Unanswered };
    let release = shared.store().settle(lease, &Settlement::Released, shared.settings.retention);
    match shared.bounded(subject, release).await {
        Ok(outcome) => Released::Answered { applied: outcome == OwnerOutcome::Applied },
        Err(error) if error.kind() == StoreErrorKind::Corrupt => Released::Unreadable,
        Err(_) => Released::Unanswered,
    }
}
