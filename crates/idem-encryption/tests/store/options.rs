//! Switching encryption on, hidden scopes, compression, and what the wrapper leaves alone.

use std::sync::Arc;

use idem_core::engine::{Idempotency, Operation, Ran, RunError, Settings};
use idem_core::{
    Acquire, AcquireOutcome, Begin, Fingerprint, IdempotencyStore, Inspect as _, OnMismatch, Operate as _, Origin,
    OwnerToken, RecordFilter, Refusal, ReplayKind, Resolution, Resolve, ResolveOutcome, Scope, Settlement,
    StoreErrorKind, StoredResponse, Takeover, TransactionalStore,
};
use idem_encryption::{EncryptedStore, Keys};
use idem_testkit::fixture::{BACKOFF, KEPT, LEASE, checkpoint, completed, mismatch_of, repeat_of, request, response};
use idem_testkit::{Fault, FaultyStore, Verb};

use crate::support::{File, config, key, keys, lease, memory, replayed, settle};

/// Runs an operation to its end without encryption.
async fn unencrypted(file: &File) -> Acquire {
    let request = request();
    let lease = lease(&*file.store, &request).await;
    settle(&*file.store, &lease, &completed()).await;
    request
}

#[tokio::test]
async fn an_answer_that_is_not_encrypted_is_refused() {
    let file = File::new().await;
    let store = file.encrypted(config());
    let settled = unencrypted(&file).await;
    for error in [store.acquire(&repeat_of(&settled)).await.unwrap_err(), store.peek(&settled.id).await.unwrap_err()] {
        assert_eq!(error.kind(), StoreErrorKind::Corrupt);
        assert!(error.to_string().contains("`reading_unencrypted_records`"), "{error}");
    }
    let crashed = request();
    let held = lease(&*file.store, &crashed).await;
    file.store.checkpoint(&held, &checkpoint("charged")).await.unwrap();
    file.clock.advance(LEASE);
    let error = store.acquire(&repeat_of(&crashed)).await.unwrap_err();
    assert_eq!((error.kind(), error.is_indeterminate()), (StoreErrorKind::Corrupt, true));
    // A record that says that its outcome is unknown may have no answer of another kind.
    let forged = request();
    let held = lease(&store, &forged).await;
    settle(&store, &held, &Settlement::OutcomeUnknown).await;
    let unknown = replayed(store.acquire(&repeat_of(&forged)).await);
    assert_eq!(unknown, StoredResponse::outcome_unknown(), "the state machine's own answer passes");
    file.sql("UPDATE idem_records SET body = X'666f72676564' WHERE state = 4").await;
    assert_eq!(store.acquire(&repeat_of(&forged)).await.unwrap_err().kind(), StoreErrorKind::Corrupt);
}

#[tokio::test]
async fn a_crash_without_an_answer_is_reported_through_the_wrapper() {
    let (store, clock) = memory(config());
    let request = Acquire { takeover: Takeover::Unknown, ..request() };
    lease(&store, &request).await;
    clock.advance(LEASE);
    match store.acquire(&repeat_of(&request)).await.unwrap() {
        AcquireOutcome::Replay(replay) => {
            assert_eq!((replay.kind, replay.response), (ReplayKind::OutcomeUnknown, StoredResponse::outcome_unknown()))
        }
        other => panic!("{other:?}"),
    }
}

/// The three steps of the README, each while processes of the step before still run.
#[tokio::test]
async fn encryption_is_switched_on_in_three_steps() {
    let file = File::new().await;
    let before = unencrypted(&file).await;
    let first = file.encrypted(config().writing_unencrypted_records());
    let second = file.encrypted(config().reading_unencrypted_records());
    let third = file.encrypted(config());
    assert_eq!(replayed(first.acquire(&repeat_of(&before)).await), response());
    // The first step writes what processes without encryption read.
    let written = request();
    let held = lease(&first, &written).await;
    first.checkpoint(&held, &checkpoint("charged")).await.unwrap();
    let record = file.store.peek(&written.id).await.unwrap().unwrap();
    assert_eq!(record.checkpoint, Some(checkpoint("charged")));
    settle(&first, &held, &completed()).await;
    assert_eq!(replayed(file.store.acquire(&repeat_of(&written)).await), response());
    // The second step writes what the first one reads, and repeats its settlements.
    assert_eq!(replayed(second.acquire(&repeat_of(&before)).await), response());
    settle(&second, &held, &completed()).await;
    let sealed = request();
    let held = lease(&second, &sealed).await;
    settle(&second, &held, &completed()).await;
    settle(&first, &held, &completed()).await;
    assert_ne!(replayed(file.store.acquire(&repeat_of(&sealed)).await), response());
    for store in [&first, &second, &third] {
        assert_eq!(replayed(store.acquire(&repeat_of(&sealed)).await), response());
    }
    assert_eq!(third.acquire(&repeat_of(&before)).await.unwrap_err().kind(), StoreErrorKind::Corrupt);
}

#[tokio::test]
async fn hidden_principals_and_operations_are_listed_by_their_names() {
    let file = File::new().await;
    let store = file.encrypted(config().hashing_scopes([9; 32]));
    let make = async |scope: Scope| {
        let request = Acquire { origin: Origin { namespace: "shop".into(), scope }, ..request() };
        lease(&store, &request).await;
        request.id
    };
    let acme = make(Scope::new("acme", "pay")).await;
    let other = make(Scope::new("other", "acme")).await;
    let nightly = make(Scope::single_tenant("pay")).await;
    let listed = async |filter: RecordFilter| {
        let mut ids: Vec<_> = store.list(&filter, None, 10.try_into().unwrap()).await.unwrap().records;
        ids.sort_by_key(|record| [acme, other, nightly].iter().position(|id| *id == record.id));
        ids.into_iter().map(|record| record.id).collect::<Vec<_>>()
    };
    let named = |text: &str| Some(text.to_owned());
    let all = RecordFilter::default;
    assert_eq!(listed(RecordFilter { principal: named("acme"), ..all() }).await, [acme]);
    assert_eq!(listed(RecordFilter { operation: named("acme"), ..all() }).await, [other]);
    assert_eq!(listed(RecordFilter { operation: named("pay"), ..all() }).await, [acme, nightly]);
    assert_eq!(listed(RecordFilter { namespace: named("shop"), ..all() }).await, [acme, other, nightly]);
    // The digests do not depend on the keys.
    store.rotate(keys(2, 2));
    assert_eq!(listed(RecordFilter { principal: named("acme"), ..all() }).await, [acme]);
    let origin = store.inspect(&acme).await.unwrap().origin.unwrap();
    let principal = origin.scope.principal().unwrap();
    assert!(principal.len() == 69 && origin.scope.operation().len() == 69 && &*origin.namespace == "shop");
    // A console that is restricted to a principal filters and compares by the stored form.
    assert_eq!(principal, store.stored_principal("acme"));
    assert_eq!(listed(RecordFilter { principal: named(principal), ..all() }).await, [acme]);
    assert_eq!(listed(RecordFilter { operation: named(origin.scope.operation()), ..all() }).await, [acme, nightly]);
    assert_eq!(file.encrypted(config()).stored_principal("acme"), "acme");
    assert_ne!(principal, origin.scope.operation());
    assert_eq!(store.inspect(&nightly).await.unwrap().origin.unwrap().scope.principal(), None);
    // Transactions are begun by the same request.
    let request =
        Acquire { origin: Origin { namespace: "shop".into(), scope: Scope::new("acme", "pay") }, ..request() };
    let begun = store.begin(&request).await.unwrap();
    assert!(matches!(begun, Begin::Acquired { .. }));
    assert_eq!(listed(RecordFilter { principal: named("acme"), ..all() }).await.len(), 2);
}

/// The fingerprint of the request is not that of the answer.
#[tokio::test]
async fn the_original_is_replayed_to_another_request_where_the_policy_says_so() {
    let (store, clock) = memory(config());
    let first = request();
    let held = lease(&store, &first).await;
    settle(&store, &held, &completed()).await;
    let other = Acquire { on_mismatch: OnMismatch::ReplayOriginal, ..mismatch_of(&first) };
    assert_eq!(replayed(store.acquire(&other).await), response());
    store.rotate(Keys::new(2, key(2)));
    assert_eq!(store.acquire(&other).await.unwrap_err().kind(), StoreErrorKind::Corrupt);
    clock.advance(KEPT);
    assert!(matches!(store.acquire(&other).await, Ok(AcquireOutcome::Acquired(_))));
}

/// The original is read by a query of its own, whose failure must not hide that there is a record.
#[tokio::test]
async fn an_original_that_cannot_be_read_never_lets_an_operation_run_unprotected() {
    let (plain, _) = memory(config());
    let faulty = Arc::new(FaultyStore::new(Arc::clone(plain.inner())));
    let store = EncryptedStore::new(Arc::clone(&faulty), config());
    let settings = Settings::new().on_mismatch(OnMismatch::ReplayOriginal).dangerous_fail_open();
    let engine = Idempotency::at_most_once(Arc::new(store.clone()), settings);
    let operation = |body: &[u8]| {
        Operation::new(Scope::new("acme", "pay"), "key".parse().unwrap(), Fingerprint::of_bytes("pay", body))
    };
    engine.run(operation(b"10 EUR"), |_| async { Ok::<_, String>("paid".to_owned()) }).await.unwrap();
    // The engine repeats an acquire once.
    for _ in 0..2 {
        faulty.next(Verb::Peek, Fault::ErrorBefore);
    }
    let refused: Result<Ran<String>, RunError<String>> =
        engine.run(operation(b"20 EUR"), |_| async { panic!("it ran unprotected") }).await;
    let error = format!("{:?}", refused.unwrap_err());
    assert!(error.contains("NotAdmitted") && error.contains("has_existing_record: true"), "{error}");
    assert_eq!(faulty.fired(), 2);
    store.rotate(Keys::new(2, key(2)));
    let error = store.acquire(&engine.acquire_for(&operation(b"10 EUR"))).await.unwrap_err();
    assert!(error.kind() == StoreErrorKind::Corrupt && error.has_existing_record(), "{error:?}");
}

/// One record that cannot be read leaves the others in the list.
#[tokio::test]
async fn a_list_shows_a_checkpoint_as_sealed_if_its_record_cannot_be_read() {
    let file = File::new().await;
    let store = file.encrypted(config());
    for _ in 0..2 {
        let held = lease(&store, &request()).await;
        store.checkpoint(&held, &checkpoint("charged")).await.unwrap();
        let failed = Settlement::FailedRetryable { response: response(), retry_after: BACKOFF };
        settle(&store, &held, &failed).await;
    }
    file.sql("UPDATE idem_records SET headers = X'FF' WHERE id = (SELECT min(id) FROM idem_records)").await;
    let page = store.list(&RecordFilter::default(), None, 10.try_into().unwrap()).await.unwrap();
    assert!(store.inner().peek(&page.records[0].id).await.is_err(), "it cannot be read");
    let names: Vec<_> = page.records.iter().map(|record| record.checkpoint.as_deref()).collect();
    assert_eq!(names, [Some("idem-sealed"), Some("charged")]);
}

/// An operator can resolve a failure that does not open, because its clients get only errors. An answer stays final.
#[tokio::test]
async fn a_failure_that_does_not_open_can_be_resolved_and_an_answer_cannot() {
    let (store, clock) = memory(config());
    let first = request();
    let held = lease(&store, &first).await;
    let failed = Settlement::FailedRetryable { response: response(), retry_after: BACKOFF };
    settle(&store, &held, &failed).await;
    let seen = store.peek(&first.id).await.unwrap().unwrap().version();
    store.rotate(Keys::new(2, key(2)));
    let resolution = Resolution::Completed(response());
    let by = Resolve { id: first.id, action: OwnerToken::random(), seen, resolution, retention: KEPT };
    assert_eq!(store.resolve(&by).await.unwrap(), ResolveOutcome::Resolved);
    clock.advance(BACKOFF);
    assert_eq!(replayed(store.acquire(&repeat_of(&first)).await), response());
    store.rotate(Keys::new(3, key(3)));
    assert_eq!(store.peek(&first.id).await.unwrap_err().kind(), StoreErrorKind::Corrupt);
    let seen = store.list(&RecordFilter::default(), None, 10.try_into().unwrap()).await.unwrap().records[0].version;
    let again = Resolve { action: OwnerToken::random(), seen, ..by };
    assert_eq!(store.resolve(&again).await.unwrap(), ResolveOutcome::Refused(Refusal::Final));
}

/// Handlers find the transaction of the store that is wrapped, and the answer is sealed when it commits.
#[tokio::test]
async fn a_handler_has_the_transaction_of_its_database() {
    let file = File::new().await;
    file.sql("CREATE TABLE effects (id INTEGER PRIMARY KEY)").await;
    let store: Arc<dyn TransactionalStore> = file.store.clone();
    let store = EncryptedStore::new(store, config());
    let engine = Idempotency::transactional(Arc::new(store.clone()), Settings::new());
    let fingerprint = Fingerprint::of_bytes("pay", b"10 EUR");
    let operation = || Operation::new(Scope::new("acme", "pay"), "key".parse().unwrap(), fingerprint);
    for is_repeat in [false, true] {
        let ran = engine.run(operation(), |context| async move {
            let mut transaction =
                context.transaction::<idem_sqlite::SqliteTransaction>().map_err(|error| error.to_string())?;
            let insert = sqlx::raw_sql("INSERT INTO effects DEFAULT VALUES").execute(&mut **transaction).await;
            insert.map_err(|error| error.to_string())?;
            Ok::<_, String>("paid".to_owned())
        });
        let ran = ran.await.unwrap();
        assert_eq!((&*ran.value, ran.replayed), ("paid", is_repeat));
    }
    let id = engine.acquire_for(&operation()).id;
    let stored = file.store.peek(&id).await.unwrap().unwrap().replay().unwrap().response;
    assert_eq!(&stored.headers[0].name[..], b"idem-sealed");
    assert_eq!(
        sqlx::query_scalar::<_, i64>("SELECT count(*) FROM effects").fetch_one(file.store.pool()).await.unwrap(),
        1
    );
}

#[cfg(feature = "compression")]
#[tokio::test]
async fn a_compressed_record_is_short_and_every_process_opens_it() {
    use idem_core::StoredBody;
    let file = File::new().await;
    let compressing = file.encrypted(config().with_compression());
    let first = request();
    let held = lease(&compressing, &first).await;
    let long = idem_core::Checkpoint { data: vec![b'a'; 10_000].into(), ..checkpoint("charged") };
    compressing.checkpoint(&held, &long).await.unwrap();
    let stored = file.store.peek(&first.id).await.unwrap().unwrap().checkpoint.unwrap();
    assert!(stored.data.len() < 200, "{stored:?}");
    assert_eq!(file.encrypted(config()).peek(&first.id).await.unwrap().unwrap().checkpoint, Some(long));
    let answer = StoredResponse { body: StoredBody::Retained(vec![b'a'; 10_000].into()), ..response() };
    let settlement = Settlement::Completed(answer.clone());
    settle(&compressing, &held, &settlement).await;
    let stored = replayed(file.store.acquire(&repeat_of(&first)).await);
    assert!(matches!(&stored.body, StoredBody::Retained(body) if body.len() < 200), "{stored:?}");
    let plain = file.encrypted(config());
    assert_eq!(replayed(plain.acquire(&repeat_of(&first)).await), answer);
    // A settlement that one process made compressed is repeated by the other one.
    settle(&plain, &held, &settlement).await;
}
