//! Keys that change while operations run, between a step and its repetition, and in one process before the other.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use idem_core::engine::{Idempotency, Operation, Ran, RunError, Settings};
use idem_core::{
    Acquire, Checkpoint, DurableStore as _, Fingerprint, IdempotencyStore, Inspect as _, Lease, Operate as _,
    OwnerOutcome, OwnerToken, RecordFilter, Resolution, Resolve, ResolveOutcome, Scope, Settlement, StoreError,
    StoreErrorKind, StoredResponse, TransactionalStore as _,
};
use idem_encryption::{EncryptedStore, EncryptionConfig};
use idem_testkit::fixture::{BACKOFF, KEPT, LEASE, checkpoint, completed, repeat_of, request, response};
use idem_testkit::{Fault, FaultyStore, Verb};

use crate::support::{File, config, keys, lease, memory, replayed, settle};

const TASKS: u64 = 4;
const OPERATIONS: u64 = 40;
const REPEATS: u32 = 3;
/// The keys of the run under load.
const KEYS: u32 = 8;

fn operation(number: u64) -> Operation {
    let fingerprint = Fingerprint::of_bytes("count", &number.to_be_bytes());
    Operation::new(Scope::new("acme", "count"), format!("key-{number}").parse().unwrap(), fingerprint)
}

/// The id of the key that sealed a stored answer.
fn key_of(sealed: &StoredResponse) -> u32 {
    let value = STANDARD_NO_PAD.decode(&sealed.headers[0].value).unwrap();
    u32::from_be_bytes(value[1..5].try_into().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn rotation_under_load_loses_nothing() {
    let file = File::new().await;
    let store = file.encrypted(EncryptionConfig::new(keys(1, KEYS)));
    let engine = Arc::new(Idempotency::at_most_once(Arc::new(store.clone()), Settings::new()));
    let (done, runs) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU64::new(0)));
    let tasks = (0..TASKS).map(|task| {
        let (engine, store, done, runs) = (engine.clone(), store.clone(), done.clone(), runs.clone());
        tokio::spawn(async move {
            for number in task * OPERATIONS..(task + 1) * OPERATIONS {
                let mut first = None;
                for _ in 0..=REPEATS {
                    let runs = runs.clone();
                    let ran = engine.run(operation(number), |context| async move {
                        // Each run gives another answer.
                        let run = runs.fetch_add(1, Ordering::SeqCst);
                        let _ = context;
                        Ok::<_, String>(run)
                    });
                    let value = ran.await.unwrap().value;
                    assert_eq!(*first.get_or_insert(value), value, "operation {number}");
                    let done = done.fetch_add(1, Ordering::SeqCst);
                    if done % 16 == 0 {
                        store.rotate(keys(done / 16 % KEYS + 1, KEYS));
                    }
                }
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    assert_eq!(runs.load(Ordering::SeqCst), TASKS * OPERATIONS, "each operation ran once");
    // They all open at the end too, and many keys have sealed them.
    let page = store.list(&RecordFilter::default(), None, 1_000.try_into().unwrap()).await.unwrap();
    assert_eq!(page.records.len() as u64, TASKS * OPERATIONS);
    let mut used = HashSet::new();
    for record in page.records {
        assert!(store.peek(&record.id).await.unwrap().is_some());
        used.insert(key_of(&file.store.peek(&record.id).await.unwrap().unwrap().replay().unwrap().response));
    }
    assert!(used.len() > 3, "{used:?}");
}

/// Law L8, although the bytes differ.
#[tokio::test]
async fn a_settlement_is_repeated_after_a_rotation() {
    let file = File::new().await;
    let settlements = [
        completed(),
        Settlement::FailedTerminal(response()),
        Settlement::FailedRetryable { response: response(), retry_after: BACKOFF },
    ];
    for settlement in settlements {
        let store = file.encrypted(EncryptionConfig::new(keys(1, 2)));
        let request = request();
        let lease = lease(&store, &request).await;
        settle(&store, &lease, &settlement).await;
        let stored = file.store.peek(&request.id).await.unwrap();
        store.rotate(keys(2, 2));
        let other = store.seal_settlement(&lease, &settlement).unwrap();
        assert_eq!(file.store.settle(&lease, &other, KEPT).await.unwrap(), OwnerOutcome::LeaseLost, "bytes differ");
        settle(&store, &lease, &settlement).await;
        let different = Settlement::Completed(StoredResponse::new(201, "another answer"));
        assert_eq!(store.settle(&lease, &different, KEPT).await.unwrap(), OwnerOutcome::LeaseLost);
        let stranger = idem_core::Lease { owner: OwnerToken::random(), ..lease.clone() };
        assert_eq!(store.settle(&stranger, &settlement, KEPT).await.unwrap(), OwnerOutcome::LeaseLost);
        assert_eq!(file.store.peek(&request.id).await.unwrap(), stored, "nothing changed");
    }
}

#[tokio::test]
async fn a_checkpoint_is_repeated_after_a_rotation() {
    let file = File::new().await;
    let store = file.encrypted(EncryptionConfig::new(keys(1, 2)));
    let request = request();
    let lease = lease(&store, &request).await;
    let applied = async |checkpoint: &Checkpoint| store.checkpoint(&lease, checkpoint).await.unwrap();
    assert_eq!(applied(&checkpoint("charged")).await, OwnerOutcome::Applied);
    store.rotate(keys(2, 2));
    assert_eq!(applied(&checkpoint("charged")).await, OwnerOutcome::Applied);
    assert_eq!(applied(&checkpoint("shipped")).await, OwnerOutcome::LeaseLost, "another one of the same sequence");
    let later = Checkpoint { sequence: 2, ..checkpoint("shipped") };
    assert_eq!(applied(&later).await, OwnerOutcome::Applied);
    assert_eq!(applied(&checkpoint("charged")).await, OwnerOutcome::LeaseLost);
    assert_eq!(store.peek(&request.id).await.unwrap().unwrap().checkpoint, Some(later));
}

#[tokio::test]
async fn a_resolution_is_repeated_after_a_rotation() {
    let file = File::new().await;
    for resolution in [
        Resolution::Completed(response()),
        Resolution::FailedTerminal(response()),
        Resolution::FailedRetryable { response: response(), retry_after: BACKOFF },
    ] {
        let store = file.encrypted(EncryptionConfig::new(keys(1, 2)));
        let request = request();
        let lease = lease(&store, &request).await;
        settle(&store, &lease, &Settlement::OutcomeUnknown).await;
        let seen = store.peek(&request.id).await.unwrap().unwrap().version();
        let by = Resolve { id: request.id, action: OwnerToken::random(), seen, resolution, retention: KEPT };
        assert_eq!(store.resolve(&by).await.unwrap(), ResolveOutcome::Resolved);
        store.rotate(keys(2, 2));
        assert_eq!(store.resolve(&by).await.unwrap(), ResolveOutcome::Resolved);
        let different = Resolve { resolution: Resolution::Completed(StoredResponse::new(200, "other")), ..by.clone() };
        assert_eq!(store.resolve(&different).await.unwrap(), ResolveOutcome::Changed);
        let other = Resolve { action: OwnerToken::random(), ..by };
        assert_eq!(store.resolve(&other).await.unwrap(), ResolveOutcome::Changed);
    }
}

/// The engine settles again after an answer that was lost, and the keys have rotated meanwhile.
#[tokio::test(start_paused = true)]
async fn the_engine_gets_its_answer_when_the_keys_rotate_before_it_settles_again() {
    let (plain, _) = memory(config());
    let faulty = Arc::new(FaultyStore::new(Arc::clone(plain.inner())));
    let store = EncryptedStore::new(Arc::clone(&faulty), EncryptionConfig::new(keys(1, 2)));
    faulty.next(Verb::Settle, Fault::ErrorAfter);
    let engine = Idempotency::at_most_once(Arc::new(store.clone()), Settings::new());
    let running = engine.run(operation(1), |_| async { Ok::<_, String>(1) });
    let rotating = async {
        while faulty.fired() == 0 {
            tokio::task::yield_now().await;
        }
        store.rotate(keys(2, 2));
    };
    let (ran, ()) = tokio::join!(running, rotating);
    let ran = ran.unwrap();
    assert_eq!((ran.value, ran.replayed), (1, false));
    assert!(faulty.calls(Verb::Settle) >= 2, "it settled again");
}

/// One process has the new key first. Both read all records of both.
#[tokio::test]
async fn processes_may_rotate_one_after_the_other() {
    let file = File::new().await;
    let (first, second) =
        (file.encrypted(EncryptionConfig::new(keys(1, 2))), file.encrypted(EncryptionConfig::new(keys(2, 2))));
    for (writer, reader) in [(&first, &second), (&second, &first)] {
        let request = request();
        let lease = lease(writer, &request).await;
        assert_eq!(writer.checkpoint(&lease, &checkpoint("charged")).await.unwrap(), OwnerOutcome::Applied);
        assert_eq!(reader.checkpoint(&lease, &checkpoint("charged")).await.unwrap(), OwnerOutcome::Applied);
        settle(writer, &lease, &completed()).await;
        settle(reader, &lease, &completed()).await;
        assert_eq!(replayed(reader.acquire(&repeat_of(&request)).await), response());
    }
}

fn assert_names_the_key(error: &StoreError, key: u32) {
    assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{error}");
    let message = error.to_string();
    assert!(message.contains(&format!("the key {key}, ")) && message.contains("Keys::with_old"), "{message}");
}

#[tokio::test]
async fn a_record_whose_key_is_gone_is_corrupt_and_runs_nothing() {
    let file = File::new().await;
    let store = file.encrypted(EncryptionConfig::new(keys(1, 2)));
    let engine = Idempotency::at_most_once(Arc::new(store.clone()), Settings::new());
    let ran = engine.run(operation(1), |_| async { Ok::<_, String>(1) }).await.unwrap();
    assert!(!ran.replayed);
    store.rotate(idem_encryption::Keys::new(2, crate::support::key(2)));
    let refused: Result<Ran<i32>, RunError<String>> =
        engine.run(operation(1), |_| async { panic!("it ran again") }).await;
    let text = format!("{:?}", refused.unwrap_err());
    assert!(text.contains("Corrupt") && text.contains("the key 1, "), "{text}");
    let id = engine.acquire_for(&operation(1)).id;
    assert_names_the_key(&store.peek(&id).await.unwrap_err(), 1);
    assert_names_the_key(&store.live_record(&id).await.unwrap_err(), 1);
    assert_names_the_key(&store.inspect(&id).await.unwrap_err(), 1);
    let page = store.list(&RecordFilter::default(), None, 10.try_into().unwrap()).await.unwrap();
    assert_eq!(page.records.len(), 1, "a listing shows what does not open");
    store.rotate(keys(2, 2));
    let again = engine.run(operation(1), |_| async { Ok::<_, String>(2) }).await.unwrap();
    assert_eq!((again.value, again.replayed), (1, true), "with the key, the answer is back");
}

/// The lease is taken before its checkpoint turns out not to open. Nothing runs under it, and it is released.
#[tokio::test]
async fn a_checkpoint_whose_key_is_gone_stops_the_next_attempt() {
    let file = File::new().await;
    let store = file.encrypted(EncryptionConfig::new(keys(1, 2)));
    let first = request();
    let crashed = lease(&store, &first).await;
    store.checkpoint(&crashed, &checkpoint("charged")).await.unwrap();
    file.clock.advance(LEASE);
    store.rotate(idem_encryption::Keys::new(2, crate::support::key(2)));
    let taking_over = Acquire { ..repeat_of(&first) };
    let error = store.acquire(&taking_over).await.unwrap_err();
    assert_names_the_key(&error, 1);
    assert!(error.is_indeterminate(), "the record is held");
    let held = file.store.peek(&first.id).await.unwrap().unwrap();
    assert_eq!((held.owner, held.attempt), (taking_over.owner, 2));
    let page = store.list(&RecordFilter::default(), None, 10.try_into().unwrap()).await.unwrap();
    assert_eq!(page.records[0].checkpoint.as_deref(), Some("idem-sealed"), "a listing shows what does not open");
    store.rotate(keys(2, 2));
    assert_eq!(lease(&store, &taking_over).await.checkpoint, Some(checkpoint("charged")));
}

/// An attempt that is taken and given back counts, and attempts are few.
#[tokio::test]
async fn a_checkpoint_whose_key_is_gone_costs_one_attempt() {
    let file = File::new().await;
    let store = file.encrypted(EncryptionConfig::new(keys(1, 2)));
    let first = request();
    let crashed = lease(&store, &first).await;
    store.checkpoint(&crashed, &checkpoint("charged")).await.unwrap();
    file.clock.advance(LEASE);
    store.rotate(idem_encryption::Keys::new(2, crate::support::key(2)));
    let taking_over = repeat_of(&first);
    assert!(store.acquire(&taking_over).await.unwrap_err().is_indeterminate(), "the record is held");
    assert!(store.acquire(&taking_over).await.unwrap_err().is_indeterminate(), "the record is still held");
    let held = Lease { owner: taking_over.owner, attempt: 2, ..crashed };
    settle(&store, &held, &Settlement::Released).await;
    for _ in 0..3 {
        let begun = store.begin(&repeat_of(&first)).await.unwrap_err();
        for error in [store.acquire(&repeat_of(&first)).await.unwrap_err(), begun] {
            assert_names_the_key(&error, 1);
            assert!(error.has_existing_record() && !error.is_indeterminate(), "{error:?}");
        }
    }
    assert_eq!(file.store.peek(&first.id).await.unwrap().unwrap().attempt, 2);
    store.rotate(keys(2, 2));
    let lease = lease(&store, &repeat_of(&first)).await;
    assert_eq!((lease.attempt, lease.checkpoint), (3, Some(checkpoint("charged"))));
}

/// The state machine keeps the checkpoint of a failure. Its key need not be there to compare the answer.
#[tokio::test]
async fn a_repeated_step_needs_only_the_key_of_the_part_that_it_repeats() {
    let (store, _) = memory(EncryptionConfig::new(keys(1, 1)));
    let only = |id| idem_encryption::Keys::new(id, crate::support::key(id));
    let held = lease(&store, &request()).await;
    assert_eq!(store.checkpoint(&held, &checkpoint("charged")).await.unwrap(), OwnerOutcome::Applied);
    store.rotate(only(2));
    assert_eq!(store.checkpoint(&held, &checkpoint("charged")).await.unwrap(), OwnerOutcome::LeaseLost);
    let failed = Settlement::FailedRetryable { response: response(), retry_after: BACKOFF };
    settle(&store, &held, &failed).await;
    store.rotate(only(3).with_old(2, crate::support::key(2)).unwrap());
    settle(&store, &held, &failed).await;
    store.rotate(only(3));
    assert_eq!(store.settle(&held, &failed, KEPT).await.unwrap(), OwnerOutcome::LeaseLost, "as the store says");
}
