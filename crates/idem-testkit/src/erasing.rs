//! The conformance cases of [`Operate::erase`](idem_core::Operate::erase), which [`resolve_conformance!`](crate::resolve_conformance!)
//! runs too.

use std::num::NonZeroU32;
use std::sync::Arc;

use idem_core::{
    AcquireOutcome, Erase, EraseOutcome, Operate, OwnerOutcome, OwnerToken, RecordId, RepairNote, Settlement, State,
    StoredBody, StoredResponse, erase,
};

use crate::fixture::{KEPT, LEASE, checkpoint, completed, failed, repeat_of, request, retryable};
use crate::subject::Subject;

fn operate(subject: &Subject) -> Arc<dyn Operate> {
    Arc::clone(subject.operate.as_ref().expect("the subject is operated by a store"))
}

async fn erased(subject: &Subject, request: &Erase) -> EraseOutcome {
    operate(subject).erase(request).await.expect("erase: the store could not answer")
}

/// Erases the record as it is now, by a new action.
async fn erasing(subject: &Subject, id: &RecordId) -> Erase {
    let seen = subject.record(id).await.version();
    Erase { id: *id, action: OwnerToken::random(), seen, principal: None }
}

/// The principal of a record, for a store that keeps it.
async fn principal(subject: &Subject, id: &RecordId) -> Option<String> {
    let inspect = subject.inspect.as_ref().filter(|_| subject.keeps_origins)?;
    let origin = inspect.inspect(id).await.expect("inspect: the store could not answer").origin;
    origin.and_then(|origin| origin.scope.principal().map(str::to_owned))
}

/// A final answer becomes a tombstone: it does not run again, and its principal is gone. After its retention the operation is new.
pub async fn an_erased_answer_leaves_a_tombstone(subject: &Subject) {
    for settlement in [completed(), failed()] {
        let request = request();
        let lease = subject.lease(&request).await;
        subject.checkpoint(&lease, &checkpoint("charged")).await;
        subject.settle(&lease, &settlement).await;
        // A repeat may have made a copy of it.
        let AcquireOutcome::Replay(before) = subject.acquire(&repeat_of(&request)).await else { panic!("settled") };
        let origin = principal(subject, &request.id).await;
        let record = subject.record(&request.id).await;
        let by = erasing(subject, &request.id).await;
        assert_eq!(erased(subject, &by).await, EraseOutcome::Erased);
        let left = subject.record(&request.id).await;
        assert_eq!((left.owner, left.attempt, left.fingerprint), (by.action, record.attempt, record.fingerprint));
        assert_eq!((&left.checkpoint, left.expires_at), (&None, record.expires_at));
        for _ in 0..2 {
            let repeat = subject.acquire(&repeat_of(&request)).await;
            let AcquireOutcome::Replay(replay) = repeat else { panic!("it does not run again: {repeat:?}") };
            let status = before.response.status;
            let bare = StoredResponse { body: StoredBody::NotRetained, ..StoredResponse::new(status, "") };
            assert_eq!((replay.kind, replay.attempt, replay.response), (before.kind, before.attempt, bare));
        }
        assert_eq!(subject.settle(&lease, &settlement).await, OwnerOutcome::LeaseLost);
        assert_eq!(subject.record(&request.id).await, left);
        assert_eq!(principal(subject, &request.id).await, origin.as_ref().map(|_| String::new()));
        subject.advance_to_end_of(KEPT);
        assert_eq!(subject.peek(&request.id).await, None, "it is kept for its retention");
        let again = repeat_of(&request);
        let lease = subject.lease(&again).await;
        assert_eq!((lease.attempt, lease.checkpoint), (1, None));
        assert_eq!(principal(subject, &request.id).await, origin, "it can be found again");
    }
}

/// What may still run keeps all of it.
pub async fn what_may_still_run_is_not_erased(subject: &Subject) {
    let request = request();
    subject.lease(&request).await;
    let by = erasing(subject, &request.id).await;
    subject.advance_to_just_before(LEASE);
    assert_eq!(erased(subject, &by).await, EraseOutcome::Live);
    subject.advance_to_end_of(LEASE);
    assert_eq!(erased(subject, &by).await, EraseOutcome::Unsettled, "the next caller may take it over");
    for settlement in [retryable(), Settlement::OutcomeUnknown] {
        let request = crate::fixture::request();
        let lease = subject.lease(&request).await;
        subject.checkpoint(&lease, &checkpoint("charged")).await;
        subject.settle(&lease, &settlement).await;
        let record = subject.record(&request.id).await;
        assert_eq!(erased(subject, &erasing(subject, &request.id).await).await, EraseOutcome::Unsettled);
        assert_eq!(subject.record(&request.id).await, record);
    }
}

/// Law L8, and the fence: the same action again gets the same answer, another one finds another record.
pub async fn an_erasure_is_fenced_and_can_be_repeated(subject: &Subject) {
    let request = request();
    let lease = subject.lease(&request).await;
    let early = erasing(subject, &request.id).await;
    subject.settle(&lease, &completed()).await;
    let record = subject.record(&request.id).await;
    assert_eq!(erased(subject, &early).await, EraseOutcome::Changed);
    let by = erasing(subject, &request.id).await;
    let own = Erase { action: record.owner, ..by.clone() };
    assert_eq!(erased(subject, &own).await, EraseOutcome::Token);
    assert_eq!(subject.record(&request.id).await, record);
    assert_eq!(erased(subject, &by).await, EraseOutcome::Erased);
    let left = subject.record(&request.id).await;
    assert!(matches!(&left.state, State::Completed { response } if response.body == StoredBody::NotRetained));
    assert_eq!(erased(subject, &by).await, EraseOutcome::Erased);
    let other = Erase { action: OwnerToken::random(), ..by.clone() };
    assert_eq!(erased(subject, &other).await, EraseOutcome::Changed);
    assert_eq!(subject.record(&request.id).await, left);
    let absent = Erase { id: crate::fixture::fresh_id(), ..by };
    assert_eq!(erased(subject, &absent).await, EraseOutcome::Changed);
    assert_eq!(subject.peek(&absent.id).await, None);
}

/// A refused erasure changes nothing, so that what is left of the record can still be found and explained.
pub async fn a_refused_erasure_leaves_the_notes(subject: &Subject) {
    let store = operate(subject);
    let request = request();
    let lease = subject.lease(&request).await;
    let live = Erase { principal: Some("erin o'neill".into()), ..erasing(subject, &request.id).await };
    let note = RepairNote {
        action: OwnerToken::random(),
        record: request.id,
        actor: "an operator".into(),
        reason: "asked by erin o'neill's bank".into(),
        resolution: "completed".into(),
        outcome: Some("resolved".into()),
    };
    store.note(&note).await.expect("note: the store could not answer");
    assert_eq!(erased(subject, &live).await, EraseOutcome::Live);
    subject.settle(&lease, &completed()).await;
    assert_eq!(erased(subject, &live).await, EraseOutcome::Changed);
    let repairs = store.repairs(NonZeroU32::new(100).expect("not zero")).await.expect("repairs: no answer");
    let left: Vec<_> = repairs.iter().map(|repair| &repair.note).filter(|note| note.record == request.id).collect();
    assert_eq!(left, [&note]);
}

/// The notes of the record no longer name the principal. Notes of other records stay.
pub async fn an_erased_principal_leaves_the_notes(subject: &Subject) {
    let store = operate(subject);
    let request = request();
    let lease = subject.lease(&request).await;
    subject.settle(&lease, &completed()).await;
    let note = |record: RecordId| RepairNote {
        action: OwnerToken::random(),
        record,
        actor: "an operator".into(),
        reason: "asked by erin o'neill's bank".into(),
        resolution: "completed".into(),
        outcome: Some("resolved".into()),
    };
    let notes = [note(request.id), note(crate::fixture::fresh_id())];
    for note in &notes {
        store.note(note).await.expect("note: the store could not answer");
    }
    let by = Erase { principal: Some("erin o'neill".into()), ..erasing(subject, &request.id).await };
    let outcome =
        erase(&*store, &by, "an operator", "erin o'neill asks").await.expect("erase: the store could not answer");
    assert_eq!(outcome, EraseOutcome::Erased);
    let repairs = store.repairs(NonZeroU32::new(100).expect("not zero")).await.expect("repairs: no answer");
    let of = |id: RecordId| repairs.iter().filter(move |repair| repair.note.record == id).map(|repair| &repair.note);
    let left = RepairNote { reason: "asked by (erased)'s bank".into(), ..notes[0].clone() };
    let erasure = RepairNote {
        action: by.action,
        reason: "(erased) asks".into(),
        resolution: "erased".into(),
        outcome: Some("erased".into()),
        ..left.clone()
    };
    assert_eq!(of(request.id).collect::<Vec<_>>(), [&erasure, &left]);
    assert_eq!(of(notes[1].record).collect::<Vec<_>>(), [&notes[1]]);
}
