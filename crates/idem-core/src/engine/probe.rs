//! Finding out whether a run that crashed took effect.

use std::error::Error;
use std::fmt;

use std::panic::AssertUnwindSafe;

use async_trait::async_trait;
use futures_util::FutureExt;

use super::Context;
use super::observer::EventKind;
use crate::machine::Settlement;
use crate::record::StoredResponse;

/// Asks the system where the effect would be whether a crashed run took effect.
///
/// After a crash under AtMostOnce no process knows it. Where the other system can tell, for example because the run gave it a
/// [downstream key](Context::downstream_key), the outcome need not stay unknown.
#[async_trait]
pub trait Probe: fmt::Debug + Send + Sync + 'static {
    /// Says whether an earlier run of this operation took effect. It is asked under a lease that is renewed meanwhile.
    ///
    /// [`DidNotHappen`](Probed::DidNotHappen) lets the operation run, once the store has confirmed the lease. It is safe only
    /// if the effect cannot happen later either: the earlier run may stand still in a suspended process, or its request may be
    /// on its way. So have the other system prevent it, for example by voiding the downstream key, and answer `Unknown`, or an
    /// error, where it cannot. The model checker (`cargo xtask model`) shows two effects for a probe that only looks.
    ///
    /// # Errors
    /// When it cannot be found out now. The repeat is then told to come back, and the next one asks again.
    async fn probe(&self, context: &Context) -> Result<Probed, Box<dyn Error + Send + Sync>>;
}

/// What a probe found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "there is no fourth answer")]
pub enum Probed {
    /// It took effect; this is the answer that it would have given.
    Happened(StoredResponse),
    /// It did not, and cannot any more: it may run.
    DidNotHappen,
    /// It cannot be found out, now or later.
    Unknown,
}

/// How an earlier run has to be settled by what the probe finds; `None` when the operation may run.
///
/// When it cannot be found out now the key is given back: the record stays, and the next repeat asks again.
pub(super) async fn find_out(context: &Context) -> Option<Settlement> {
    let found = match &context.shared().settings.probe {
        // Called inside, as it may panic before it returns a future.
        Some(probe) => AssertUnwindSafe(async { probe.probe(context).await }).catch_unwind().await,
        // Some other engine on this store has a probe, and this one does not: it cannot have asked to probe.
        None => Ok(Ok(Probed::Unknown)),
    };
    if let Ok(Ok(found)) = &found {
        context.observe(EventKind::Probed(found));
    }
    match found {
        Ok(Ok(Probed::DidNotHappen)) => None,
        Ok(Ok(Probed::Happened(response))) => Some(Settlement::Completed(response)),
        Ok(Ok(Probed::Unknown)) => Some(Settlement::OutcomeUnknown),
        Ok(Err(error)) => {
            tracing::warn!(error = error.as_ref() as &dyn Error, "it could not be found out whether an operation ran");
            Some(Settlement::Released)
        }
        Err(_) => {
            tracing::error!("a probe panicked");
            Some(Settlement::Released)
        }
    }
}
