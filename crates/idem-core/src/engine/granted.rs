//! An operation that the store allows to run: run → settle → reply.
//!
//! A probe may come first, which finds out how an earlier run ended. [`execute`](super::execute) chooses the task that
//! drives this.

use std::future::{Future, poll_fn};
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tracing::Span;

use super::answer::{Answer, ExecuteError, ExecuteResult, Reply, current_record, not_admitted, recorded};
use super::context::Context;
use super::contract::{Conclusion, Contract, Disposition};
use super::hold::{Held, Refusal, is_recent};
use super::late_acquires::give_back_when_taken;
use super::observer::{Durations, EventKind};
use super::probe::{CrashedRun, ProbeOutcome};
use super::settle::{Settled, SettlementPlan, is_settled_by, release_behind};
use super::shared::Shared;
use super::steps::{Ending, report_steps_that_stay};
use crate::machine::{Lease, SHORTEST_RETENTION, Settlement};
use crate::record::Acquisition;
use crate::store::Writes;

/// The target of the spans, apart from that of events, so that either can be switched on alone.
const SPAN_TARGET: &str = "idem_core::operation";

/// What runs when the store allows it.
pub(super) type Handler<T> = Box<dyn FnOnce(Context) -> Handling<T> + Send>;
type Handling<T> = Pin<Box<dyn Future<Output = Conclusion<T>> + Send>>;

/// An operation that is to run.
pub(super) struct Granted<T> {
    pub(super) context: Context,
    /// When its lease was asked for; `None` when there is none to be renewed.
    pub(super) renewed_from: Option<Instant>,
    pub(super) is_acquire_unclear: bool,
    pub(super) permit: OwnedSemaphorePermit,
    pub(super) reply: Reply<T>,
}

impl<T> Granted<T> {
    /// Runs the operation, settles what it concludes, and answers the caller.
    pub(super) async fn carry_out(self, run: Handler<T>, on_panic: impl FnOnce() -> Conclusion<T> + Send) {
        let Self { context, renewed_from, is_acquire_unclear, permit, mut reply } = self;
        let renewal = renewed_from.map(|acquired_at| context.start_renewal(acquired_at));
        let held = Held { renewal, lost: context.lost().clone(), is_acquire_unclear, _permit: permit };
        let outcome = run_and_settle(&context, renewed_from, held, run, on_panic, &mut reply.durations).await;
        reply.send(outcome);
    }
}

async fn run_and_settle<T>(
    context: &Context,
    renewed_from: Option<Instant>,
    mut held: Held,
    run: Handler<T>,
    on_panic: impl FnOnce() -> Conclusion<T> + Send,
    durations: &mut Durations,
) -> ExecuteResult<T> {
    let is_probe = context.acquisition() == Acquisition::Probe;
    let span = span(context);
    if is_probe && let Some(finding) = timed(&mut durations.run, inside(&span, Box::pin(find_out(context)))).await {
        return timed(&mut durations.settle, Box::pin(settle_finding(context, finding, held))).await;
    }
    // Nothing is awaited between this check and the first step of the operation.
    if let Some(held_from) = renewed_from
        && (is_probe || !is_recent(context, held_from))
        && let Err(refusal) = timed(&mut durations.store, Box::pin(held.confirm(context))).await
    {
        return timed(&mut durations.store, Box::pin(refuse(context, held, refusal))).await;
    }
    let conclusion = timed(&mut durations.run, inside(&span, pin!(conclude(context, run, on_panic)))).await;
    drop(span);
    let Some(lease) = context.lease() else {
        return Ok(Answer::Ran { value: conclusion.value, attempt: context.attempt(), protected: false });
    };
    timed(&mut durations.settle, settle(context, lease, held, conclusion)).await
}

/// The span of what the application runs, inside the caller's.
///
/// The verbs of the store are outside, because sqlx enters the current span at each message of the server: with them inside, a log
/// in JSON costs more than 3 % of the instructions of a payment. For the same reason the level is not `info`, and the only field is
/// the one that finds all others.
fn span(context: &Context) -> Span {
    tracing::debug_span!(target: SPAN_TARGET, "idempotent_operation", record = %context.record_id())
}

/// Polls `part` inside `span`. Unlike an instrumented future it takes the room of `part` only once.
fn inside<T>(span: &Span, mut part: impl Future<Output = T> + Unpin) -> impl Future<Output = T> + Unpin {
    poll_fn(move |context| {
        let _entered = span.enter();
        Pin::new(&mut part).poll(context)
    })
}

/// Awaits a part of a request, and adds its duration to `total`. The caller pins it, so that it takes its room only
/// once.
async fn timed<T>(total: &mut Duration, part: impl Future<Output = T> + Unpin) -> T {
    let began = Instant::now();
    let output = part.await;
    *total += began.elapsed();
    output
}

async fn conclude<T>(
    context: &Context,
    run: Handler<T>,
    on_panic: impl FnOnce() -> Conclusion<T> + Send,
) -> Conclusion<T> {
    let own = context.clone();
    // Called inside, as it may panic before it returns a future. After a panic, only the transaction could be half
    // changed, and it is discarded.
    match AssertUnwindSafe(async move { run(own).await }).catch_unwind().await {
        Ok(conclusion) => conclusion,
        Err(_) => {
            tracing::error!(record = %context.record_id(), "an idempotent operation panicked");
            context.observe(EventKind::Panicked);
            on_panic()
        }
    }
}

/// Settles a run by its conclusion, and returns the answer that holds then.
///
/// Boxed, so that it takes no room in the future during the run.
fn settle<T>(
    context: &Context,
    lease: &Lease,
    held: Held,
    conclusion: Conclusion<T>,
) -> Pin<Box<impl Future<Output = ExecuteResult<T>>>> {
    let Conclusion { value, disposition, retention } = conclusion;
    let shared = context.shared();
    let Ending { disposition, standing, denied, keeps_steps } = Ending::of(context, disposition);
    let usual = context.term().retention;
    let retention = retention.filter(|retention| !keeps_steps || *retention > usual).unwrap_or(usual);
    let plan = shared.plan(context, disposition, retention, lease.attempt);
    Box::pin(async move {
        let settled = if shared.contract() == Contract::Transactional {
            let Some(transaction) = context.take_transaction() else {
                context.roll_back_when_given_back();
                release_behind(context, lease.clone());
                held.give_back_late_acquire(context, lease);
                return Err(ExecuteError::TransactionHeld);
            };
            shared.settle_transaction(context, lease, &plan, transaction, &held).await
        } else {
            shared.settle_leased(context, lease, &plan, held).await
        };
        shared.waiters.wake(&lease.id);
        if matches!(settled, Settled::Ours | Settled::Unclear(_)) {
            report_steps_that_stay(context, &standing);
        }
        match settled {
            Settled::Ours => match denied {
                Some(error) => Err(ExecuteError::Steps(error)),
                None => Ok(Answer::Ran { value, attempt: lease.attempt, protected: true }),
            },
            Settled::Lost => match (Box::pin(answer_of_record(context, lease, value)).await, denied) {
                (Ok(Answer::Ran { .. }), Some(error)) => Err(ExecuteError::Steps(error)),
                (answer, _) => answer,
            },
            Settled::Failed(error) => Err(ExecuteError::TransactionFailed(error)),
            Settled::Unclear(error) => Err(ExecuteError::CommitUnclear(error)),
        }
    })
}

/// Asks the probe, and returns how to settle the earlier run; `None` when the operation may run.
///
/// If the probe fails, the key is released: the record stays, and the next repeat asks again.
async fn find_out(context: &Context) -> Option<Settlement> {
    let crashed = |lease| CrashedRun { lease, downstream: context.downstream(), lost: context.lost() };
    let run = context.lease().map(crashed);
    let found = match context.shared().settings.probe.as_ref().zip(run) {
        // Called inside, as it may panic before it returns a future.
        Some((probe, run)) => AssertUnwindSafe(async { probe.probe(run).await }).catch_unwind().await,
        // Does not happen: an engine without a probe never acquires to probe.
        None => Ok(Ok(ProbeOutcome::Unknown)),
    };
    if let Ok(Ok(found)) = &found {
        context.observe(EventKind::Probed(found));
    }
    match found {
        Ok(Ok(ProbeOutcome::DidNotHappen)) => None,
        Ok(Ok(ProbeOutcome::Happened(response))) => Some(Settlement::Completed(response)),
        Ok(Ok(ProbeOutcome::Unknown)) => Some(Settlement::OutcomeUnknown),
        Ok(Err(error)) => {
            tracing::warn!(
                record = %context.record_id(),
                error = error.as_ref() as &dyn std::error::Error,
                "the probe failed, so it is unknown whether the operation ran; the next repeat asks it again"
            );
            Some(Settlement::Released)
        }
        Err(_) => {
            tracing::error!(record = %context.record_id(), "a probe panicked");
            Some(Settlement::Released)
        }
    }
}

/// Settles what a probe found about an earlier run, and answers what the record says then.
async fn settle_finding<T>(context: &Context, settlement: Settlement, held: Held) -> ExecuteResult<T> {
    let shared = context.shared();
    let plan = SettlementPlan { settlement, writes: Writes::Discard, retention: context.term().retention };
    let Some(lease) = context.lease() else { return Err(ExecuteError::Interrupted) };
    // If another owner has settled it, the record says how.
    shared.settle_leased(context, lease, &plan, held).await;
    shared.waiters.wake(&lease.id);
    answer_without_running(context).await
}

/// The answer to an operation that does not run, because its lease may be another owner's by now.
async fn refuse<T>(context: &Context, held: Held, refusal: Refusal) -> ExecuteResult<T> {
    let shared = context.shared();
    tracing::warn!(record = %context.record_id(), "an operation did not run, because its lease was not certain to hold");
    drop(held);
    if let Some(lease) = context.lease() {
        give_back_when_taken(shared, context.subject(), lease.clone());
    }
    match refusal {
        Refusal::Unconfirmed(error) => Err(ExecuteError::NotAdmitted(error)),
        Refusal::Lost => {
            context.observe(EventKind::LeaseLost);
            answer_without_running(context).await
        }
    }
}

/// What the record says to a request whose operation did not run.
async fn answer_without_running<T>(context: &Context) -> ExecuteResult<T> {
    let record = current_record(context).await.map_err(not_admitted)?;
    Ok(record.as_ref().map_or_else(|| Answer::in_progress(Duration::ZERO), recorded))
}

/// The answer of a run whose settlement was not applied: what the record says, so that all callers get the same answer.
///
/// Another owner has superseded the run, or the handler has settled the record in a transaction and returned another answer.
async fn answer_of_record<T>(context: &Context, lease: &Lease, value: T) -> ExecuteResult<T> {
    let shared = context.shared();
    let record = current_record(context).await?;
    if record.as_ref().is_some_and(|record| is_settled_by(record, lease)) {
        tracing::debug!(record = %lease.id, "the record has the answer that the operation settled, and not the one that it returned");
    } else {
        tracing::warn!(record = %lease.id, "an operation ended after it had lost its lease");
        context.observe(EventKind::LeaseLost);
    }
    Ok(match record {
        Some(record) => recorded(&record),
        // The record is gone. A transaction was rolled back, but what ran under a lease has happened.
        None if shared.contract() == Contract::Transactional => Answer::in_progress(Duration::ZERO),
        None => Answer::Ran { value, attempt: lease.attempt, protected: true },
    })
}

impl Shared {
    fn plan(&self, context: &Context, disposition: Disposition, retention: Duration, attempt: u32) -> SettlementPlan {
        let (mut settlement, writes) = self.contract().settlement(disposition, self.settings.backoff_after(attempt));
        if let Settlement::Completed(response)
        | Settlement::FailedTerminal(response)
        | Settlement::FailedRetryable { response, .. } = &mut settlement
        {
            response.trace = context.trace();
        }
        SettlementPlan { settlement, writes, retention: retention.max(SHORTEST_RETENTION) }
    }
}
