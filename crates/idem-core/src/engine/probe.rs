//! Finding out whether a run that crashed took effect.

use std::error::Error;
use std::fmt;

use async_trait::async_trait;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use crate::machine::Lease;
use crate::record::{Checkpoint, StoredResponse};
use crate::record_id::RecordId;

/// Asks another system whether a crashed run took effect there.
///
/// After a crash under AtMostOnce, no process knows the outcome. If the other system can tell, for example because the
/// run gave it a [downstream key](CrashedRun::downstream_key), the outcome need not stay unknown.
#[async_trait]
pub trait Probe: fmt::Debug + Send + Sync + 'static {
    /// Says whether an earlier run of this operation took effect. The engine asks under a lease, which it renews
    /// meanwhile.
    ///
    /// [`DidNotHappen`](ProbeOutcome::DidNotHappen) lets the operation run, once the store has confirmed the lease. It
    /// is safe only if the effect cannot happen later either: the earlier run may stand still in a suspended process,
    /// or its request may be on its way. So make the other system prevent it, for example by voiding the downstream
    /// key. If it cannot, answer `Unknown` or an error. The model checker (`cargo xtask model`) shows two effects for a
    /// probe that only looks.
    ///
    /// # Errors
    /// When the outcome cannot be found out now. The caller then gets
    /// [`Answer::InProgress`](super::Answer::InProgress), and the next repeat asks again.
    async fn probe(&self, run: CrashedRun<'_>) -> Result<ProbeOutcome, Box<dyn Error + Send + Sync>>;
}

/// What a probe found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "there is no fourth answer")]
pub enum ProbeOutcome {
    /// It took effect; this is the answer that it would have given.
    Happened(StoredResponse),
    /// It did not, and cannot any more: it may run.
    DidNotHappen,
    /// It cannot be found out, now or later.
    Unknown,
}

/// The run whose outcome is to be found out.
#[derive(Debug, Clone, Copy)]
pub struct CrashedRun<'a> {
    /// The lease of the owner that asks.
    pub(super) lease: &'a Lease,
    pub(super) downstream: &'a RecordId,
    pub(super) lost: &'a CancellationToken,
}

impl CrashedRun<'_> {
    /// The attempt that the operation has when it runs next; those before it may have taken effect.
    #[must_use]
    pub fn next_attempt(&self) -> u32 {
        self.lease.attempt
    }

    /// The recovery point that the operation recorded last.
    #[must_use]
    pub fn last_checkpoint(&self) -> Option<&Checkpoint> {
        self.lease.checkpoint.as_ref()
    }

    /// The key that the run gave to another system as [`Context::downstream_key`](super::Context::downstream_key).
    #[must_use]
    pub fn downstream_key(&self, step: &str) -> String {
        self.downstream.downstream_key(step)
    }

    /// Completes when another process may probe by now: stop.
    pub fn lease_lost(&self) -> WaitForCancellationFutureOwned {
        self.lost.clone().cancelled_owned()
    }
}
