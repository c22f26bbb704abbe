//! From the end of a run to its settled record.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tracing::Instrument as _;

use super::Shared;
use super::heartbeat::Heartbeat;
use super::observer::Event;
use crate::machine::{Lease, OwnerOutcome, Settlement};
use crate::planted;
use crate::record::Record;
use crate::store::{StoreError, StoreErrorKind, StoreTransaction, Writes};

/// How long a caller waits for its operation's settlement when the store does not take it.
///
/// Long enough for a store to restart, and shorter than the default patience of HTTP clients and proxies.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long to wait for the end of a transaction: longer than for a verb, because it may wait for other writers.
const COMMIT_PATIENCE: Duration = Duration::from_secs(10);

/// The first and the longest pause between two tries of a settlement.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(2);

/// How a settlement ended, as far as the caller is concerned.
pub(super) enum Settled {
    /// The record is settled, or will be: the run's own answer holds.
    Ours,
    /// Somebody else owns the record: its answer holds, and this run's does not.
    Lost,
    /// It is not known what the record says: whether a transaction was committed, or what somebody else has written.
    Unclear(StoreError),
}

/// How a run shall be settled.
#[derive(Clone)]
pub(super) struct Ending {
    pub(super) settlement: Settlement,
    pub(super) writes: Writes,
    pub(super) retention: Duration,
}

impl Shared {
    /// Settles a run that holds a lease. When the store does not take it in time, the caller gets its answer and the
    /// settlement goes on in the background, with the lease alive, for as long as a lease may be held.
    pub(super) async fn settle_leased(
        self: &Arc<Self>,
        lease: &Lease,
        ending: &Ending,
        heartbeat: Heartbeat,
    ) -> Settled {
        heartbeat.expect_the_end();
        planted!("answer-before-the-settlement" => return self.settle_behind(lease.clone(), ending.clone(), heartbeat));
        let answer = self.persist(PATIENCE, || self.store().settle(lease, &ending.settlement, ending.retention)).await;
        match answer {
            Ok(OwnerOutcome::Applied) => self.settled(),
            Ok(OwnerOutcome::LeaseLost) => Settled::Lost,
            // Somebody else has written it, such as a newer version that took over: what everybody else is told by then this
            // run cannot know.
            Err(error) if error.kind() == StoreErrorKind::Corrupt => {
                tracing::error!(record = %lease.id, error = &error as &dyn std::error::Error, "a settlement was given up");
                self.observe(&Event::SettlementLost);
                Settled::Unclear(error)
            }
            Err(error) => {
                tracing::error!(record = %lease.id, error = &error as &dyn std::error::Error, "settlement is delayed");
                self.observe(&Event::SettlementDelayed);
                let (shared, limit) = (Arc::clone(self), self.settings.held_at_most);
                let (lease, ending) = (lease.clone(), ending.clone());
                let behind = async move {
                    let settle = || shared.store().settle(&lease, &ending.settlement, ending.retention);
                    let settled = tokio::select! {
                        answer = shared.persist(limit, settle) => matches!(answer, Ok(OwnerOutcome::Applied)),
                        () = shared.closing.cancelled() => false,
                    };
                    drop(heartbeat);
                    if settled {
                        shared.settled();
                    } else {
                        tracing::error!(record = %lease.id, "a settlement was given up");
                        shared.observe(&Event::SettlementLost);
                    }
                    shared.waiters.wake(&lease.id);
                };
                self.tasks.spawn(behind.in_current_span());
                Settled::Ours
            }
        }
    }

    /// Settles a run inside its transaction.
    pub(super) async fn settle_transaction(
        self: &Arc<Self>,
        lease: &Lease,
        ending: &Ending,
        transaction: Box<dyn StoreTransaction>,
    ) -> Settled {
        planted!("answer-before-the-commit" => return self.commit_behind(ending, transaction));
        let finish = transaction.finish(&ending.settlement, ending.retention, ending.writes);
        let late =
            |_| StoreError::new(StoreErrorKind::Timeout, format!("no answer to COMMIT within {COMMIT_PATIENCE:?}"));
        let answer = tokio::time::timeout(COMMIT_PATIENCE, finish).await.map_err(late).flatten();
        let error = match answer {
            Ok(OwnerOutcome::Applied) => return self.settled(),
            Ok(OwnerOutcome::LeaseLost) => return Settled::Lost,
            Err(error) => error,
        };
        tracing::error!(record = %lease.id, error = &error as &dyn std::error::Error, "a transaction failed to end");
        self.observe(&Event::StoreFailed(&error));
        if ending.writes == Writes::Discard && ending.settlement == Settlement::Released {
            // Nothing was to be kept, and nothing is.
            release_behind(self, lease.clone());
            return Settled::Ours;
        }
        // The answer may have been lost on the way: what the record says is what happened.
        match self.persist(PATIENCE, || self.store().peek(&lease.id)).await {
            Ok(Some(record)) if is_settled_by(&record, lease) => self.settled(),
            Ok(_) => {
                release_behind(self, lease.clone());
                Settled::Unclear(error)
            }
            Err(_) => Settled::Unclear(error),
        }
    }

    fn settled(&self) -> Settled {
        self.observe(&Event::Settled);
        Settled::Ours
    }

    /// Repeats a verb that is safe to repeat until the store answers, or for `patience`: the last try comes at its end, not at
    /// the last pause that fits, so that a store that is back within it is not missed.
    async fn persist<T, V>(&self, patience: Duration, verb: impl Fn() -> V) -> Result<T, StoreError>
    where
        V: Future<Output = Result<T, StoreError>>,
    {
        let give_up_at = Instant::now() + patience;
        let mut pause = FIRST_PAUSE;
        loop {
            match self.bounded(verb()).await {
                Err(error) if error.is_retryable() && Instant::now() < give_up_at => {}
                answer => return answer,
            }
            let left = give_up_at.saturating_duration_since(Instant::now());
            tokio::time::sleep(pause.min(left)).await;
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }
}

fn is_settled_by(record: &Record, lease: &Lease) -> bool {
    record.owner == lease.owner && record.attempt == lease.attempt && record.replay().is_some()
}

/// Gives a key back in the background, as far as the store can be reached; otherwise its lease runs out.
pub(super) fn release_behind(shared: &Arc<Shared>, lease: Lease) {
    let (shared, tasks) = (Arc::clone(shared), shared.tasks.clone());
    let release = async move {
        let retention = shared.settings.retention;
        let release = || shared.store().settle(&lease, &Settlement::Released, retention);
        if shared.persist(PATIENCE, release).await.is_ok() {
            shared.waiters.wake(&lease.id);
        }
    };
    tasks.spawn(release.in_current_span());
}
