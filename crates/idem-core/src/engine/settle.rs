//! From the end of a run to its settled record.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use tracing::Instrument as _;

use super::context::Context;
use super::hold::Held;
use super::observer::{EventKind, Subject};
use super::shared::{FIRST_PAUSE, LAST_PAUSE, Shared};
use crate::machine::{Lease, OwnerOutcome, Settlement, is_settled_so};
use crate::record::{Failure, Record, State};
use crate::store::{FINISH_TIMEOUT, StoreError, StoreErrorKind, StoreTransaction, Writes};

/// How long a caller waits for its operation's settlement, or for the record of a step, when the store does not take it.
///
/// Long enough for a store to restart, and shorter than the default patience of HTTP clients and proxies.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// How a settlement ended for the caller.
pub(super) enum Settled {
    /// The record is settled, or will be: the run's own answer holds.
    Ours,
    /// The record has another answer, which holds: another owner's, or one that the handler has settled in its transaction.
    Lost,
    /// The handler's transaction cannot be committed, and there is no record.
    Failed(StoreError),
    /// It is not known what the record says: whether a transaction was committed, or what another owner wrote.
    Unclear(StoreError),
}

/// How to settle a run.
#[derive(Clone)]
pub(super) struct SettlementPlan {
    pub(super) settlement: Settlement,
    pub(super) writes: Writes,
    pub(super) retention: Duration,
}

impl Shared {
    /// Settles a run that holds a lease.
    ///
    /// If the store does not take it in time, the settlement goes on in the background, for at most the renewal limit,
    /// and the lease is renewed meanwhile. The caller gets its answer if the lease still holds; if not, another owner
    /// may answer differently.
    pub(super) async fn settle_leased(
        self: &Arc<Self>,
        context: &Context,
        lease: &Lease,
        plan: &SettlementPlan,
        mut held: Held,
    ) -> Settled {
        held.expect_the_end();
        let answer = self
            .persist(context.subject(), PATIENCE, || self.store().settle(lease, &plan.settlement, plan.retention))
            .await;
        match answer {
            Ok(outcome) => {
                held.give_back_late_acquire(context, lease);
                if outcome == OwnerOutcome::Applied { Settled::Ours } else { Settled::Lost }
            }
            // Another owner wrote the record, such as a newer version that took over. This run cannot know what that
            // owner answers to other callers.
            Err(error) if error.kind() == StoreErrorKind::Corrupt => {
                tracing::error!(record = %lease.id, error = &error as &dyn std::error::Error, "a settlement was given up");
                context.observe(EventKind::SettlementLost);
                Settled::Unclear(error)
            }
            Err(error) => {
                tracing::error!(record = %lease.id, error = &error as &dyn std::error::Error, "settlement is delayed");
                context.observe(EventKind::SettlementDelayed);
                // The renewals may be late to say so.
                let is_lost = context.is_lease_lost();
                if !is_lost {
                    held.renew_behind(context);
                }
                let behind = settle_behind(context.clone(), lease.clone(), plan.clone(), held);
                self.group.tasks.spawn(behind.in_current_span());
                if is_lost { Settled::Unclear(error) } else { Settled::Ours }
            }
        }
    }

    /// Settles a run inside its transaction.
    pub(super) async fn settle_transaction(
        self: &Arc<Self>,
        context: &Context,
        lease: &Lease,
        plan: &SettlementPlan,
        transaction: Box<dyn StoreTransaction>,
        held: &Held,
    ) -> Settled {
        held.expect_the_end();
        let settled = self.commit(context, lease, plan, transaction).await;
        // However it ended, nothing runs under its owner token any more.
        held.give_back_late_acquire(context, lease);
        settled
    }

    async fn commit(
        self: &Arc<Self>,
        context: &Context,
        lease: &Lease,
        plan: &SettlementPlan,
        transaction: Box<dyn StoreTransaction>,
    ) -> Settled {
        let finish = transaction.finish(&plan.settlement, plan.retention, plan.writes);
        let late =
            |_| StoreError::new(StoreErrorKind::Timeout, format!("no answer to COMMIT within {FINISH_TIMEOUT:?}"));
        let answer = tokio::time::timeout(FINISH_TIMEOUT, finish).await.map_err(late).flatten();
        let error = match answer {
            Ok(OwnerOutcome::Applied) => return Settled::Ours,
            Ok(OwnerOutcome::LeaseLost) => return Settled::Lost,
            Err(error) => error,
        };
        tracing::error!(record = %lease.id, error = &error as &dyn std::error::Error, "a transaction failed to end");
        context.observe(EventKind::StoreFailed(&error));
        if plan.writes == Writes::Discard && plan.settlement == Settlement::Released {
            // Nothing was to be kept, and nothing is.
            release_behind(context, lease.clone());
            return Settled::Ours;
        }
        if error.kind() == StoreErrorKind::TransactionFailed {
            release_behind(context, lease.clone());
            return Settled::Failed(error);
        }
        // The answer may have been lost on the way: the record says what happened.
        match self.persist(context.subject(), PATIENCE, || self.store().peek(&lease.id)).await {
            // A record that another caller settles keeps the owner of its run, also if that run was rolled back.
            Ok(Some(record)) if is_of(&record, lease) && is_settled_so(&record.state, &plan.settlement) => {
                Settled::Ours
            }
            Ok(_) => {
                release_behind(context, lease.clone());
                Settled::Unclear(error)
            }
            Err(_) => Settled::Unclear(error),
        }
    }

    /// Repeats a verb that is safe to repeat until the store answers, or for `patience`. The last try comes at its end,
    /// so that it does not miss a store that has recovered by then.
    ///
    /// It repeats after every error but one. Rotated credentials, revoked privileges and full proxies look like a wrong
    /// configuration, and pass. Only a record that cannot be read stays so.
    pub(super) async fn persist<T, V>(
        &self,
        subject: &Subject,
        patience: Duration,
        verb: impl Fn() -> V,
    ) -> Result<T, StoreError>
    where
        V: Future<Output = Result<T, StoreError>>,
    {
        let give_up_at = Instant::now() + patience;
        let mut pause = FIRST_PAUSE;
        loop {
            match self.bounded(subject, verb()).await {
                Err(error) if error.kind() != StoreErrorKind::Corrupt && Instant::now() < give_up_at => {}
                answer => return answer,
            }
            let left = give_up_at.saturating_duration_since(Instant::now());
            tokio::time::sleep(pause.min(left)).await;
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    /// [`persist`](Self::persist) after the answer, until a shutdown runs out of time. After that there is one try.
    async fn persist_behind<T, V>(&self, subject: &Subject, patience: Duration, verb: impl Fn() -> V) -> Option<T>
    where
        V: Future<Output = Result<T, StoreError>>,
    {
        if self.group.giving_up.is_cancelled() {
            return self.bounded(subject, verb()).await.ok();
        }
        tokio::select! {
            answer = self.persist(subject, patience, verb) => answer.ok(),
            () = self.group.giving_up.cancelled() => None,
        }
    }
}

/// Continues a settlement after the caller got its answer, for at most the renewal limit.
async fn settle_behind(context: Context, lease: Lease, plan: SettlementPlan, held: Held) {
    let shared = context.shared();
    let _counted = DelayedSettlement::count(&shared.group.behind);
    let settle = || shared.store().settle(&lease, &plan.settlement, plan.retention);
    let answer = shared.persist_behind(context.subject(), shared.settings.renewal_limit, settle).await;
    // The operation of a settlement that was given up took effect: its record must not be released.
    if answer.is_some() {
        held.give_back_late_acquire(&context, &lease);
    }
    let is_settled = match answer {
        Some(OwnerOutcome::Applied) => true,
        // Its handler may have settled it in a transaction, and returned another answer.
        Some(OwnerOutcome::LeaseLost) => {
            let record = shared.bounded(context.subject(), shared.store().peek(&lease.id)).await;
            record.is_ok_and(|record| record.is_some_and(|record| is_settled_by(&record, &lease)))
        }
        None => false,
    };
    if is_settled {
        context.observe(EventKind::SettlementDone);
    } else {
        tracing::error!(record = %lease.id, "a settlement was given up");
        context.observe(EventKind::SettlementLost);
    }
    drop(held);
    shared.waiters.wake(&lease.id);
}

/// Counts a settlement that continues after its answer.
struct DelayedSettlement<'a>(&'a AtomicUsize);

impl<'a> DelayedSettlement<'a> {
    fn count(behind: &'a AtomicUsize) -> Self {
        behind.fetch_add(1, Ordering::Relaxed);
        Self(behind)
    }
}

impl Drop for DelayedSettlement<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether the run, or its handler in a transaction, has settled the record. An unknown outcome was written by another caller after
/// the lease: it keeps the run's token, but not its answer.
pub(super) fn is_settled_by(record: &Record, lease: &Lease) -> bool {
    let is_answered =
        !matches!(record.state, State::InProgress { .. } | State::Failed { failure: Failure::OutcomeUnknown, .. });
    is_of(record, lease) && is_answered
}

/// Whether no other run has begun since.
fn is_of(record: &Record, lease: &Lease) -> bool {
    record.owner == lease.owner && record.attempt == lease.attempt
}

/// Releases a key in the background, for as long as its lease lasts; then the lease is over.
pub(super) fn release_behind(context: &Context, lease: Lease) {
    let (shared, subject) = (Arc::clone(context.shared()), context.subject().clone());
    let tasks = shared.group.tasks.clone();
    let release = async move {
        let settings = &shared.settings;
        let release = || shared.store().settle(&lease, &Settlement::Released, settings.retention);
        if shared.persist_behind(&subject, settings.lease.min(settings.renewal_limit), release).await.is_some() {
            shared.waiters.wake(&lease.id);
        }
    };
    tasks.spawn(release.in_current_span());
}
