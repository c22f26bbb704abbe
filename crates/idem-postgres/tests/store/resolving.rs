//! Resolving an operation that a transaction runs again.

use std::num::NonZeroU32;
use std::time::Duration;

use idem_core::{
    AcquireOutcome, Begin, Erase, EraseOutcome, IdempotencyStore as _, Inspect as _, Operate as _, OwnerOutcome,
    OwnerToken, Refusal, RepairNote, Resolution, Resolve, ResolveOutcome, Settlement, StoredResponse,
    TransactionalStore as _, Writes,
};
use idem_testkit::fixture::{KEPT, repeat_of, request, response};

use crate::world::World;

#[tokio::test]
async fn an_operation_that_a_transaction_runs_again_is_live() {
    let world = World::shared().await;
    let request = request();
    let AcquireOutcome::Acquired(lease) = world.store.acquire(&request).await.unwrap() else { panic!("new") };
    let retryable = Settlement::FailedRetryable { response: response(), retry_after: Duration::ZERO };
    world.store.settle(&lease, &retryable, KEPT).await.unwrap();
    // The record says that it waits for its next attempt.
    let seen = world.store.peek(&request.id).await.unwrap().unwrap().version();
    let by = Resolve {
        id: request.id,
        action: OwnerToken::random(),
        seen,
        resolution: Resolution::Completed(StoredResponse::new(201, "by an operator")),
        retention: KEPT,
    };
    let Begin::Acquired { transaction, .. } = world.store.begin(&repeat_of(&request)).await.unwrap() else {
        panic!("due")
    };
    assert_eq!(world.store.resolve(&by).await.unwrap(), ResolveOutcome::Refused(Refusal::Live));
    let finished = transaction.finish(&Settlement::Completed(response()), KEPT, Writes::Keep).await.unwrap();
    assert_eq!(finished, OwnerOutcome::Applied, "the run is not disturbed");
    assert_eq!(world.store.resolve(&by).await.unwrap(), ResolveOutcome::Changed);
    // Without the transaction it can be resolved.
    let other = idem_testkit::fixture::request();
    let AcquireOutcome::Acquired(lease) = world.store.acquire(&other).await.unwrap() else { panic!("new") };
    world.store.settle(&lease, &retryable, KEPT).await.unwrap();
    let seen = world.store.peek(&other.id).await.unwrap().unwrap().version();
    let by = Resolve { id: other.id, seen, ..by };
    assert_eq!(world.store.resolve(&by).await.unwrap(), ResolveOutcome::Resolved);
    let Begin::Answered(answer) = world.store.begin(&repeat_of(&other)).await.unwrap() else { panic!("resolved") };
    assert!(matches!(answer, AcquireOutcome::Replay(_)), "{answer:?}");
}

#[tokio::test]
async fn repairs_keep_their_order_if_the_clock_goes_back() {
    let world = World::shared().await;
    let note = |reason: &str| RepairNote {
        action: OwnerToken::random(),
        record: request().id,
        actor: "an operator".into(),
        reason: reason.into(),
        resolution: "completed".into(),
        outcome: None,
    };
    world.store.note(&note("first")).await.unwrap();
    let moved = world
        .number("WITH moved AS (UPDATE $.idem_repairs SET at = at + 1000000 RETURNING 1) SELECT count(*) FROM moved")
        .await;
    assert_eq!(moved, 1);
    world.store.note(&note("second")).await.unwrap();
    let most = NonZeroU32::new(10).unwrap();
    let reasons: Vec<_> =
        world.store.repairs(most).await.unwrap().into_iter().map(|repair| repair.note.reason).collect();
    assert_eq!(reasons, ["second", "first"]);
}

#[tokio::test]
async fn an_operation_that_a_transaction_begins_anew_gets_its_principal_back() {
    let world = World::shared().await;
    let request = request();
    let finished = async |request| {
        let Begin::Acquired { transaction, .. } = world.store.begin(request).await.unwrap() else { panic!("it runs") };
        let finished = transaction.finish(&Settlement::Completed(response()), KEPT, Writes::Keep).await.unwrap();
        assert_eq!(finished, OwnerOutcome::Applied);
    };
    let principal = async || {
        let origin = world.store.inspect(&request.id).await.unwrap().origin.unwrap();
        origin.scope.principal().map(str::to_owned)
    };
    finished(&request).await;
    let named = principal().await;
    let seen = world.store.peek(&request.id).await.unwrap().unwrap().version();
    let by = Erase { id: request.id, action: OwnerToken::random(), seen, principal: None };
    assert_eq!(world.store.erase(&by).await.unwrap(), EraseOutcome::Erased);
    assert_eq!(principal().await.as_deref(), Some(""));
    // Its retention is over, and no purge has come.
    world.offset.advance(KEPT);
    finished(&repeat_of(&request)).await;
    assert_eq!(principal().await, named);
    assert!(named.is_some_and(|named| !named.is_empty()));
}
