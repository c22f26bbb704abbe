//! Keeps a lease alive while its operation runs, and says when it is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::task::AbortHandle;
use tokio::time::Instant;
use tracing::Instrument as _;

use super::Context;
use super::observer::Event;
use crate::machine::OwnerOutcome;

/// Renews a lease in a task of its own until dropped.
///
/// A task of its own, because an operation that computes for long between two awaits would starve it otherwise.
pub(super) struct Heartbeat {
    task: AbortHandle,
    settling: Arc<AtomicBool>,
}

impl Heartbeat {
    /// Renews the lease of a run at a third of it. The run is told that it has lost its lease when somebody else owns the
    /// record, and when by this process's monotonic clock the lease is about to end unrenewed.
    pub(super) fn start(run: Context, acquired_at: Instant) -> Self {
        let settling = Arc::new(AtomicBool::new(false));
        let until = acquired_at + run.shared().settings.held_at_most;
        let pulse = Pulse { run, settling: Arc::clone(&settling), until, renewed_at: acquired_at };
        Self { task: tokio::spawn(pulse.beat().in_current_span()).abort_handle(), settling }
    }

    /// From now on a renewal that is refused is no news: it may come after the settlement.
    pub(super) fn expect_the_end(&self) {
        self.settling.store(true, Ordering::Relaxed);
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Pulse {
    /// Its transaction is rolled back, should nobody end it, when this task is gone too.
    run: Context,
    settling: Arc<AtomicBool>,
    /// The lease is not renewed after this.
    until: Instant,
    /// When the renewal that succeeded last was sent.
    renewed_at: Instant,
}

impl Pulse {
    async fn beat(self) {
        let first = self.renewed_at + self.run.shared().settings.lease / 3;
        // Most operations have ended by then, and need no room for what comes after.
        tokio::time::sleep_until(first).await;
        Box::pin(self.go_on(first)).await;
    }

    async fn go_on(mut self, mut next: Instant) {
        let lease = self.run.shared().settings.lease;
        loop {
            // A tenth of the lease early: the operation needs time to stop what it does.
            let alarm = self.renewed_at + lease - lease / 10;
            tokio::select! {
                () = tokio::time::sleep_until(alarm), if !self.run.lost().is_cancelled() => {
                    tracing::warn!(record = %self.run.id(), "the lease is about to end and could not be renewed");
                    self.run.shared().observe(&Event::LeaseLost);
                    self.run.lost().cancel();
                }
                renewed = self.renew_at(next) => match renewed {
                    Renewed::At(sent) => {
                        self.renewed_at = sent;
                        next = sent + lease / 3;
                    }
                    // Soon again: a third of the lease is left for a few more tries.
                    Renewed::Failed => next = Instant::now() + lease / 10,
                    Renewed::Lost if self.settling.load(Ordering::Relaxed) => return,
                    Renewed::Lost => {
                        tracing::warn!(record = %self.run.id(), "somebody else owns the record of a running operation");
                        self.run.shared().observe(&Event::LeaseLost);
                        return self.run.lost().cancel();
                    }
                },
            }
        }
    }

    async fn renew_at(&self, next: Instant) -> Renewed {
        tokio::time::sleep_until(next).await;
        // Without a lease there is nothing to renew, and one that is held for as long as anyone may is renewed no more: from
        // here on only the alarm is due.
        let Some(lease) = self.run.lease().filter(|_| next < self.until) else { return std::future::pending().await };
        let sent = Instant::now();
        let shared = self.run.shared();
        match shared.bounded(shared.store().renew(lease, shared.settings.term())).await {
            Ok(OwnerOutcome::Applied) => Renewed::At(sent),
            Ok(OwnerOutcome::LeaseLost) => Renewed::Lost,
            Err(_) => Renewed::Failed,
        }
    }
}

enum Renewed {
    At(Instant),
    Failed,
    Lost,
}
