//! The conformance cases of [`Operate`], for subjects that are [`operated_by`](Subject::operated_by) a store.

use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use idem_core::{
    Acquire, AcquireOutcome, Acquisition, Lease, Operate, OwnerOutcome, OwnerToken, Record, RecordId, Refusal,
    RepairNote, ReplayKind, Resolution, Resolve, ResolveOutcome, Settlement, StoreErrorKind, StoredResponse, Takeover,
    repair,
};

use crate::cases::{assert_time, at_once};
pub use crate::erasing::{
    a_refused_erasure_leaves_the_notes, an_erased_answer_leaves_a_tombstone, an_erased_principal_leaves_the_notes,
    an_erasure_is_fenced_and_can_be_repeated, what_may_still_run_is_not_erased,
};
use crate::fixture::{
    BACKOFF, KEPT, LEASE, checkpoint, completed, failed, fresh_id, repeat_of, request, response, retryable,
};
use crate::subject::Subject;

/// The list of these cases.
#[doc(hidden)]
#[macro_export]
macro_rules! __for_every_resolving_case {
    ($callback:path, $argument:tt) => {
        $callback! { $argument,
            an_unknown_outcome_becomes_an_answer
            what_took_no_effect_runs_again_with_the_next_attempt
            attempts_that_are_used_up_fail_for_good
            a_crashed_run_is_resolved_after_its_lease
            a_backoff_is_ended
            final_answers_stay
            what_has_changed_since_it_was_seen_stays
            a_repeated_resolution_is_answered_as_the_first_time
            one_of_many_operators_resolves
            a_resolution_meets_a_takeover
            a_repair_is_noted_with_its_reason
            an_erased_answer_leaves_a_tombstone
            what_may_still_run_is_not_erased
            an_erasure_is_fenced_and_can_be_repeated
            a_refused_erasure_leaves_the_notes
            an_erased_principal_leaves_the_notes
        }
    };
}

/// Makes a `#[test]` of every case, for the store that the harness gives: as [`conformance!`](crate::conformance!).
#[macro_export]
macro_rules! resolve_conformance {
    ($module:ident, $harness:expr) => {
        #[cfg(test)]
        mod $module {
            use super::*;
            $crate::__for_every_resolving_case!($crate::__test_of_every_resolving_case, ($harness));
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __test_of_every_resolving_case {
    (($harness:expr), $($case:ident)+) => {
        $(
            #[test]
            fn $case() {
                $crate::conformance::run($harness, |subject| ::std::boxed::Box::pin($crate::resolving::$case(subject)));
            }
        )+
    };
}

fn operate(subject: &Subject) -> Arc<dyn Operate> {
    Arc::clone(subject.operate.as_ref().expect("the subject is operated by a store"))
}

async fn resolve(subject: &Subject, request: &Resolve) -> ResolveOutcome {
    operate(subject).resolve(request).await.expect("resolve: the store could not answer")
}

/// Resolves the record as it is now, by a new action.
async fn resolving(subject: &Subject, id: &RecordId, resolution: Resolution) -> Resolve {
    let seen = subject.record(id).await.version();
    Resolve { id: *id, action: OwnerToken::random(), seen, resolution, retention: KEPT }
}

/// A lease whose outcome is unknown, with a checkpoint.
async fn unknown(subject: &Subject, request: &Acquire) -> Lease {
    let lease = subject.lease(request).await;
    subject.checkpoint(&lease, &checkpoint("charged")).await;
    subject.settle(&lease, &Settlement::OutcomeUnknown).await;
    lease
}

fn may_run_again(retry_after: Duration) -> Resolution {
    Resolution::FailedRetryable { response: response(), retry_after }
}

#[track_caller]
fn assert_replays(outcome: &AcquireOutcome, kind: ReplayKind, attempt: u32, response: &StoredResponse) {
    match outcome {
        AcquireOutcome::Replay(replay) => {
            assert_eq!((replay.kind, replay.attempt, &replay.response), (kind, attempt, response));
        }
        other => panic!("expected Replay, got {other:?}"),
    }
}

/// An unknown outcome becomes the answer that the operator gives, which repeats get byte for byte.
pub async fn an_unknown_outcome_becomes_an_answer(subject: &Subject) {
    for (resolution, kind) in [
        (Resolution::Completed(response()), ReplayKind::Completed),
        (Resolution::FailedTerminal(response()), ReplayKind::Failed),
    ] {
        let request = request();
        let lease = unknown(subject, &request).await;
        let unknown = StoredResponse::outcome_unknown();
        // A repeat may have made a copy of it.
        assert_replays(&subject.acquire(&repeat_of(&request)).await, ReplayKind::OutcomeUnknown, 1, &unknown);
        let by = resolving(subject, &request.id, resolution).await;
        assert_eq!(resolve(subject, &by).await, ResolveOutcome::Resolved);
        for _ in 0..2 {
            assert_replays(&subject.acquire(&repeat_of(&request)).await, kind, 1, &response());
        }
        assert_eq!(
            subject.settle(&lease, &completed()).await,
            OwnerOutcome::LeaseLost,
            "the crashed run is fenced off"
        );
        subject.advance_to_end_of(KEPT);
        assert_eq!(subject.peek(&request.id).await, None, "it is kept for its retention");
    }
}

/// What took no effect runs again, with the next attempt and the checkpoint of the one before (law L7).
pub async fn what_took_no_effect_runs_again_with_the_next_attempt(subject: &Subject) {
    let request = request();
    unknown(subject, &request).await;
    let by = resolving(subject, &request.id, may_run_again(BACKOFF)).await;
    assert_eq!(resolve(subject, &by).await, ResolveOutcome::Resolved);
    let outcome = subject.acquire(&repeat_of(&request)).await;
    assert!(matches!(outcome, AcquireOutcome::Backoff { .. }), "{outcome:?}");
    subject.advance_to_end_of(BACKOFF);
    let again = repeat_of(&request);
    let lease = subject.lease(&again).await;
    let expected = Lease {
        id: request.id,
        fingerprint: request.fingerprint,
        owner: again.owner,
        attempt: 2,
        acquisition: Acquisition::Retry,
        checkpoint: Some(checkpoint("charged")),
    };
    assert_eq!(lease, expected);
}

/// The limit of attempts holds for what an operator has resolved, too.
pub async fn attempts_that_are_used_up_fail_for_good(subject: &Subject) {
    let request = Acquire { max_attempts: std::num::NonZeroU32::MIN, ..request() };
    unknown(subject, &request).await;
    let by = resolving(subject, &request.id, may_run_again(Duration::ZERO)).await;
    assert_eq!(resolve(subject, &by).await, ResolveOutcome::Resolved);
    subject.advance_to_end_of(Duration::ZERO);
    assert_replays(&subject.acquire(&repeat_of(&request)).await, ReplayKind::Failed, 1, &response());
}

/// A live lease is refused. A crashed run is fenced off first, once its lease is over (law L3), and then resolved.
pub async fn a_crashed_run_is_resolved_after_its_lease(subject: &Subject) {
    for takeover in [Takeover::Unknown, Takeover::Rerun] {
        let request = Acquire { takeover, ..request() };
        let lease = subject.lease(&request).await;
        let by = resolving(subject, &request.id, Resolution::OutcomeUnknown).await;
        subject.advance_to_just_before(LEASE);
        assert_eq!(resolve(subject, &by).await, ResolveOutcome::Refused(Refusal::Live));
        subject.advance_to_end_of(LEASE);
        let early = Resolve { resolution: Resolution::Completed(response()), ..by.clone() };
        assert_eq!(resolve(subject, &early).await, ResolveOutcome::Refused(Refusal::Unfenced));
        assert_eq!(resolve(subject, &by).await, ResolveOutcome::Resolved);
        let fenced = subject.record(&request.id).await;
        assert_eq!((fenced.owner, fenced.attempt), (by.action, 1));
        assert_eq!(subject.renew(&lease, request.term).await, OwnerOutcome::LeaseLost);
        assert_eq!(subject.settle(&lease, &completed()).await, OwnerOutcome::LeaseLost);
        assert_eq!(subject.record(&request.id).await, fenced);
        let by = resolving(subject, &request.id, Resolution::Completed(response())).await;
        assert_eq!(resolve(subject, &by).await, ResolveOutcome::Resolved);
        assert_replays(&subject.acquire(&repeat_of(&request)).await, ReplayKind::Completed, 1, &response());
    }
}

/// A backoff is ended by a resolution that may run again at once.
pub async fn a_backoff_is_ended(subject: &Subject) {
    let request = request();
    let lease = subject.lease(&request).await;
    subject.settle(&lease, &retryable()).await;
    let by = resolving(subject, &request.id, may_run_again(Duration::ZERO)).await;
    assert_eq!(resolve(subject, &by).await, ResolveOutcome::Resolved);
    subject.advance_to_end_of(Duration::ZERO);
    assert_eq!(subject.lease(&repeat_of(&request)).await.attempt, 2);
}

/// Final answers stay (law L2).
pub async fn final_answers_stay(subject: &Subject) {
    for settlement in [completed(), failed()] {
        let request = request();
        let lease = subject.lease(&request).await;
        subject.settle(&lease, &settlement).await;
        let record = subject.record(&request.id).await;
        for resolution in [Resolution::Completed(response()), may_run_again(BACKOFF), Resolution::OutcomeUnknown] {
            let by = resolving(subject, &request.id, resolution).await;
            assert_eq!(resolve(subject, &by).await, ResolveOutcome::Refused(Refusal::Final));
        }
        assert_eq!(subject.record(&request.id).await, record);
    }
}

/// A record that is another one than the operator has seen stays, and so does the absence of one.
pub async fn what_has_changed_since_it_was_seen_stays(subject: &Subject) {
    let request = request();
    let lease = subject.lease(&request).await;
    let early = resolving(subject, &request.id, Resolution::Completed(response())).await;
    subject.settle(&lease, &Settlement::OutcomeUnknown).await;
    let record = subject.record(&request.id).await;
    assert_eq!(resolve(subject, &early).await, ResolveOutcome::Changed);
    assert_eq!(subject.record(&request.id).await, record);
    let absent = Resolve { id: crate::fixture::fresh_id(), ..early };
    assert_eq!(resolve(subject, &absent).await, ResolveOutcome::Changed);
    assert_eq!(subject.peek(&absent.id).await, None);
}

/// Law L8: the same action again gets the same answer, and changes nothing. Another action finds another record.
pub async fn a_repeated_resolution_is_answered_as_the_first_time(subject: &Subject) {
    for resolution in [Resolution::Completed(response()), may_run_again(BACKOFF)] {
        let request = request();
        unknown(subject, &request).await;
        let by = resolving(subject, &request.id, resolution).await;
        assert_eq!(resolve(subject, &by).await, ResolveOutcome::Resolved);
        let record = subject.record(&request.id).await;
        subject.time.advance(BACKOFF / 2);
        assert_eq!(resolve(subject, &by).await, ResolveOutcome::Resolved);
        let other = Resolve { action: OwnerToken::random(), ..by };
        assert_eq!(resolve(subject, &other).await, ResolveOutcome::Changed);
        assert_eq!(subject.record(&request.id).await, record);
    }
}

/// Of many operators with the same evidence, one resolves.
pub async fn one_of_many_operators_resolves(subject: &Subject) {
    let request = request();
    unknown(subject, &request).await;
    let first = resolving(subject, &request.id, Resolution::Completed(response())).await;
    let operators: Vec<_> = (0..16).map(|_| Resolve { action: OwnerToken::random(), ..first.clone() }).collect();
    let resolve = |operator: &Resolve| {
        let (operate, operator) = (operate(subject), operator.clone());
        async move { operate.resolve(&operator).await.expect("resolve: the store could not answer") }
    };
    let outcomes = at_once(operators.iter().map(resolve)).await;
    let done: Vec<_> =
        operators.iter().zip(&outcomes).filter(|(_, outcome)| **outcome == ResolveOutcome::Resolved).collect();
    assert_eq!(done.len(), 1, "{outcomes:?}");
    let Record { owner, attempt, .. } = subject.record(&request.id).await;
    assert_eq!((owner, attempt), (done[0].0.action, 1));
}

/// If an operator resolves a crashed run while a client takes it over, one of them does, and the other one learns it.
pub async fn a_resolution_meets_a_takeover(subject: &Subject) {
    for _ in 0..20 {
        let request = request();
        subject.lease(&request).await;
        let by = resolving(subject, &request.id, Resolution::OutcomeUnknown).await;
        subject.advance_to_end_of(LEASE);
        let (operate, store, client) = (operate(subject), Arc::clone(&subject.store), repeat_of(&request));
        let calls: [Pin<Box<dyn Future<Output = Raced> + Send>>; 2] = [
            Box::pin(async move { Raced::Resolved(operate.resolve(&by).await.expect("resolve: no answer")) }),
            Box::pin(async move { Raced::Acquired(store.acquire(&client).await.expect("acquire: no answer")) }),
        ];
        match &at_once(calls).await[..] {
            [Raced::Resolved(ResolveOutcome::Resolved), Raced::Acquired(acquired)] => {
                assert_replays(acquired, ReplayKind::OutcomeUnknown, 1, &StoredResponse::outcome_unknown());
            }
            [Raced::Resolved(ResolveOutcome::Changed), Raced::Acquired(AcquireOutcome::Acquired(lease))] => {
                assert_eq!(lease.attempt, 2);
            }
            other => panic!("both or neither: {other:?}"),
        }
    }
}

/// What one of two has got.
#[derive(Debug)]
enum Raced {
    Resolved(ResolveOutcome),
    Acquired(AcquireOutcome),
}

/// A note of a repair is kept with its reason. Its outcome comes with a second note, which may be repeated.
pub async fn a_repair_is_noted_with_its_reason(subject: &Subject) {
    let store = operate(subject);
    // Another subject of the same store may note repairs at the same time.
    let most = NonZeroU32::new(100).expect("not zero");
    let request = request();
    unknown(subject, &request).await;
    let by = resolving(subject, &request.id, Resolution::Completed(response())).await;
    let reason = "the bank's statement has it: \"O'Neill\" \\ ÄÖ";
    let outcome = repair(&*store, &by, "an operator", reason).await.expect("repair: the store could not answer");
    assert_eq!(outcome, ResolveOutcome::Resolved);
    let note = RepairNote {
        action: by.action,
        record: request.id,
        actor: "an operator".into(),
        reason: reason.into(),
        resolution: "completed".into(),
        outcome: Some("resolved".into()),
    };
    store.note(&note).await.expect("note: the store could not answer");
    let refused = resolving(subject, &request.id, Resolution::OutcomeUnknown).await;
    let outcome = repair(&*store, &refused, "", "").await.expect("repair: the store could not answer");
    assert_eq!(outcome, ResolveOutcome::Refused(Refusal::Final));
    let asked = RepairNote { action: OwnerToken::random(), outcome: None, ..note.clone() };
    store.note(&asked).await.expect("note: the store could not answer");
    let mut repairs = store.repairs(most).await.expect("repairs: the store could not answer");
    repairs.retain(|repair| repair.note.record == request.id);
    let [third, second, first] = &repairs[..] else { panic!("three repairs were noted: {repairs:?}") };
    assert_eq!((&first.note, &third.note), (&note, &asked));
    assert_eq!(second.note.outcome.as_deref(), Some("refused: final"));
    assert_time(subject, "at", third.at, subject.now().await);
    // What is sent again neither takes the outcome away nor changes it, once the repair took effect. One that was refused may do so later.
    for outcome in [None, Some("changed meanwhile".to_owned())] {
        store.note(&RepairNote { outcome, ..note.clone() }).await.expect("note: the store could not answer");
    }
    for outcome in ["refused: live", "resolved", "refused: live"] {
        let asked = RepairNote { outcome: Some(outcome.to_owned()), ..asked.clone() };
        store.note(&asked).await.expect("note: the store could not answer");
    }
    let repairs = store.repairs(most).await.expect("repairs: the store could not answer");
    let again = repairs.iter().find(|repair| repair.note.action == asked.action).expect("it was noted");
    assert_eq!(again.note.outcome.as_deref(), Some("resolved"));
    let other =
        RepairNote { action: note.action, record: fresh_id(), reason: "of another repair".into(), ..asked.clone() };
    let is_taken = store.note(&other).await.is_err_and(|error| error.kind() == StoreErrorKind::Misconfigured);
    let repairs = store.repairs(most).await.expect("repairs: the store could not answer");
    assert_eq!(
        repairs.iter().find(|repair| repair.note.record == request.id && repair.note.action == note.action),
        Some(first)
    );
    assert!(is_taken || repairs.iter().any(|repair| repair.note == other), "a note is lost: {repairs:?}");
    let newest = store.repairs(NonZeroU32::MIN).await.expect("repairs: the store could not answer");
    assert_eq!(newest.len(), 1);
}
