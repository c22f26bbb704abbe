//! The Transactional contract from end to end: the engine, a handler that writes, commits whose answers are lost.

use std::sync::Arc;
use std::time::Duration;

use crate::support::Database;
use idem_core::engine::{
    Answer, Conclusion, Context, Disposition, ExecuteError, Idempotency, Operation, Settings, TransactionError,
};
use idem_core::{
    Fingerprint, IdempotencyKey, IdempotencyStore as _, RecordIdentity, Scope, StoreErrorKind, StoredResponse, Writes,
};
use idem_sqlite::{SqliteStore, SqliteTransaction};
use idem_testkit::fixture::LEASE;
use idem_testkit::{Fault, FaultyStore, Verb};
use sqlx::Row;

type Result = std::result::Result<Answer<&'static str>, ExecuteError>;

struct World {
    database: Database,
    store: Arc<FaultyStore<SqliteStore>>,
}

impl World {
    async fn new() -> Self {
        let database = Database::new().await;
        let table = "CREATE TABLE effects (id INTEGER PRIMARY KEY)";
        sqlx::raw_sql(table).execute(database.store.pool()).await.unwrap();
        let store = Arc::new(FaultyStore::new(Arc::new(database.store.clone())));
        Self { database, store }
    }

    fn engine(&self) -> Idempotency {
        Idempotency::transactional(self.store.clone(), Settings::new().lease(LEASE))
    }

    async fn effects(&self) -> i64 {
        let query = sqlx::query("SELECT count(*) FROM effects");
        query.fetch_one(self.database.store.pool()).await.unwrap().get(0)
    }
}

fn operation(key: &str) -> Operation {
    let key = IdempotencyKey::new(key).unwrap();
    Operation::new(Scope::new("acme", "pay"), key, Fingerprint::of_bytes("pay", b"12.50 EUR"))
}

async fn write(context: &Context) {
    let mut transaction = context.transaction::<SqliteTransaction>().unwrap();
    sqlx::raw_sql("INSERT INTO effects DEFAULT VALUES").execute(&mut **transaction).await.unwrap();
}

fn done(writes: Writes) -> Conclusion<&'static str> {
    let disposition = Disposition::Complete { response: StoredResponse::new(201, "paid"), writes };
    Conclusion { value: "ran", disposition, retention: None }
}

fn panicked() -> Conclusion<&'static str> {
    let disposition = Disposition::Fault { response: StoredResponse::new(500, "panicked") };
    Conclusion { value: "panicked", disposition, retention: None }
}

/// A payment: one row, and done.
async fn pay(engine: &Idempotency, key: &str) -> Result {
    let run = |context: Context| async move {
        write(&context).await;
        done(Writes::Keep)
    };
    engine.execute(operation(key), run, panicked).await
}

#[track_caller]
fn assert_ran(result: &Result) {
    assert!(matches!(result, Ok(Answer::Ran { value: "ran", .. })), "{result:?}");
}

#[track_caller]
fn assert_replays(result: &Result) {
    assert!(matches!(result, Ok(Answer::Replay(_))), "{result:?}");
}

#[tokio::test]
async fn a_commit_whose_answer_is_lost_is_found_in_the_record() {
    for lost in [Fault::ErrorAfter, Fault::LostAnswer] {
        let world = World::new().await;
        let engine = world.engine();
        world.store.next(Verb::Finish, lost);
        assert_ran(&pay(&engine, "k").await);
        assert_replays(&pay(&engine, "k").await);
        assert_eq!((world.effects().await, world.store.fired()), (1, 1), "{lost:?}");
    }
}

#[tokio::test]
async fn a_commit_of_a_failure_that_may_be_retried_is_found_in_the_record_too() {
    for lost in [Fault::ErrorAfter, Fault::LostAnswer] {
        let world = World::new().await;
        let engine = world.engine();
        world.store.next(Verb::Finish, lost);
        let run = |_: Context| async {
            let response = StoredResponse::new(503, "the bank is closed");
            let disposition = Disposition::Retry { response, after: Some(Duration::from_secs(60)) };
            Conclusion { value: "ran", disposition, retention: None }
        };
        assert_ran(&engine.execute(operation("k"), run, panicked).await);
        let again = pay(&engine, "k").await;
        assert!(matches!(again, Ok(Answer::Backoff { .. })), "{again:?}");
    }
}

#[tokio::test]
async fn an_operation_without_a_transaction_leaves_no_record() {
    let world = World::new().await;
    world.database.store.pool().close().await;
    let refused = pay(&world.engine(), "k").await;
    assert!(matches!(refused, Err(ExecuteError::NotAdmitted(_))), "{refused:?}");
    let id = RecordIdentity::new("idem").record_id(&Scope::new("acme", "pay"), &"k".parse().unwrap());
    assert_eq!(world.database.store.peek(&id).await.unwrap(), None);
}

#[tokio::test]
async fn a_commit_that_did_not_happen_answers_nobody_and_frees_the_key() {
    let world = World::new().await;
    let engine = world.engine();
    world.store.next(Verb::Finish, Fault::ErrorBefore);
    let unclear = pay(&engine, "k").await;
    assert!(matches!(unclear, Err(ExecuteError::CommitUnclear(_))), "{unclear:?}");
    engine.shutdown(Duration::from_secs(60)).await.unwrap();
    assert_eq!(world.effects().await, 0);
    let engine = world.engine();
    assert_ran(&pay(&engine, "k").await);
    assert_replays(&pay(&engine, "k").await);
    assert_eq!(world.effects().await, 1);
}

/// Refused credentials and privileges are temporary. The engine goes on looking for the record and releasing the key, as it
/// does with a settlement.
#[tokio::test]
async fn a_lost_commit_is_looked_for_and_a_key_given_back_whatever_the_kind_of_error() {
    let refused = || Fault::Refuse(StoreErrorKind::Misconfigured);
    let world = World::new().await;
    world.store.next(Verb::Finish, Fault::ErrorAfter);
    (0..2).for_each(|_| world.store.next(Verb::Peek, refused()));
    assert_ran(&pay(&world.engine(), "found").await);
    assert_replays(&pay(&world.engine(), "found").await);
    assert_eq!(world.store.calls(Verb::Peek), 3);

    world.store.next(Verb::Finish, Fault::ErrorBefore);
    (0..2).for_each(|_| world.store.next(Verb::Settle, refused()));
    let engine = world.engine();
    let unclear = pay(&engine, "given-back").await;
    assert!(matches!(unclear, Err(ExecuteError::CommitUnclear(_))), "{unclear:?}");
    engine.shutdown(Duration::from_secs(60)).await.unwrap();
    assert_ran(&pay(&world.engine(), "given-back").await);
}

#[tokio::test]
async fn when_not_even_the_record_can_be_read_nobody_is_told_that_it_happened() {
    let world = World::new().await;
    let engine = world.engine();
    world.store.next(Verb::Finish, Fault::ErrorAfter);
    for _ in 0..1000 {
        world.store.next(Verb::Peek, Fault::ErrorBefore);
    }
    let unclear = pay(&engine, "k").await;
    assert!(matches!(unclear, Err(ExecuteError::CommitUnclear(_))), "{unclear:?}");
    assert_replays(&pay(&engine, "k").await);
    assert_eq!(world.effects().await, 1);
}

#[tokio::test]
async fn writes_stay_or_go_as_the_run_concludes() {
    let world = World::new().await;
    let engine = world.engine();
    let response = || StoredResponse::new(422, "refused");
    let cases = [
        ("kept", Disposition::Complete { response: response(), writes: Writes::Keep }, 1, true),
        ("discarded", Disposition::Complete { response: response(), writes: Writes::Discard }, 0, true),
        ("fault", Disposition::Fault { response: response() }, 0, false),
        ("released", Disposition::Release { writes: Writes::Discard }, 0, false),
        ("released and kept", Disposition::Release { writes: Writes::Keep }, 1, false),
    ];
    for (name, disposition, effects, stored) in cases {
        let before = world.effects().await;
        let key = name.replace(' ', "-");
        let run = {
            let disposition = disposition.clone();
            move |context: Context| async move {
                write(&context).await;
                Conclusion { value: "ran", disposition, retention: None }
            }
        };
        assert_ran(&engine.execute(operation(&key), run, panicked).await);
        assert_eq!(world.effects().await - before, effects, "{name}");
        let again = pay(&engine, &key).await;
        if stored { assert_replays(&again) } else { assert_ran(&again) }
    }
}

#[tokio::test]
async fn a_panic_rolls_back_and_frees_the_key() {
    let world = World::new().await;
    let engine = world.engine();
    let run = |context: Context| async move {
        write(&context).await;
        panic!("as planned")
    };
    let answer = engine.execute(operation("k"), run, panicked).await;
    assert!(matches!(answer, Ok(Answer::Ran { value: "panicked", .. })), "{answer:?}");
    assert_eq!(world.effects().await, 0);
    assert_ran(&pay(&engine, "k").await);
}

#[tokio::test]
async fn a_transaction_that_is_kept_beyond_the_end_is_rolled_back() {
    let world = World::new().await;
    let engine = world.engine();
    let (release, released) = tokio::sync::oneshot::channel::<()>();
    let run = |context: Context| async move {
        write(&context).await;
        let guard = context.transaction::<SqliteTransaction>().unwrap();
        assert_eq!(context.transaction::<SqliteTransaction>().unwrap_err(), TransactionError::Borrowed);
        tokio::spawn(async move {
            let _guard = guard;
            let _ = released.await;
        });
        done(Writes::Keep)
    };
    let answer = engine.execute(operation("k"), run, panicked).await;
    assert!(matches!(answer, Err(ExecuteError::TransactionHeld)), "{answer:?}");
    drop(release);
    engine.shutdown(Duration::from_secs(60)).await.unwrap();
    assert_eq!(world.effects().await, 0);
    assert_ran(&pay(&world.engine(), "k").await);
}

/// What a handler leaves behind may keep its context for long. The transaction ends when its guard is dropped.
#[tokio::test]
async fn a_transaction_that_is_given_back_after_the_end_is_rolled_back_though_its_context_lives() {
    let world = World::new().await;
    let engine = world.engine();
    let (keep, mut kept) = tokio::sync::mpsc::unbounded_channel();
    let run = move |context: Context| async move {
        write(&context).await;
        keep.send((context.transaction::<SqliteTransaction>().unwrap(), context.clone())).unwrap();
        done(Writes::Keep)
    };
    let answer = engine.execute(operation("k"), run, panicked).await;
    assert!(matches!(answer, Err(ExecuteError::TransactionHeld)), "{answer:?}");
    let (guard, context) = kept.recv().await.unwrap();
    assert!(context.is_lease_lost(), "the run is told that it is over");
    drop(guard);
    let others = async {
        assert_ran(&pay(&engine, "another").await);
        // The engine releases the key in the background.
        while !matches!(pay(&engine, "k").await, Ok(Answer::Ran { .. })) {}
    };
    tokio::time::timeout(Duration::from_secs(10), others).await.expect("nothing keeps the database locked");
    assert_eq!(world.effects().await, 2);
    drop(context);
}

/// A shutdown that is too short gives settlements up. An operation that ends later still releases its key, once.
#[tokio::test]
async fn an_operation_that_ends_after_an_unfinished_shutdown_gives_its_key_back() {
    let world = World::new().await;
    for number in 0..8 {
        let (engine, key) = (world.engine(), format!("k{number}"));
        let (end, ends) = tokio::sync::oneshot::channel::<()>();
        let (begin, begins) = tokio::sync::oneshot::channel::<()>();
        let run = |context: Context| async move {
            begin.send(()).unwrap();
            let _ = ends.await;
            let guard = context.transaction::<SqliteTransaction>().unwrap();
            tokio::spawn(async move {
                tokio::task::yield_now().await;
                drop(guard);
            });
            done(Writes::Keep)
        };
        let running = tokio::spawn(engine.execute(operation(&key), run, panicked));
        begins.await.unwrap();
        engine.shutdown(Duration::ZERO).await.unwrap_err();
        end.send(()).unwrap();
        let answer = running.await.unwrap();
        assert!(matches!(answer, Err(ExecuteError::TransactionHeld)), "{answer:?}");
        let paid = async { while !matches!(pay(&world.engine(), &key).await, Ok(Answer::Ran { .. })) {} };
        tokio::time::timeout(Duration::from_secs(10), paid).await.expect("the key is free");
    }
}

#[tokio::test]
async fn a_transaction_of_another_type_cannot_be_had() {
    let world = World::new().await;
    let run = |context: Context| async move {
        let error = context.transaction::<String>().unwrap_err();
        assert!(error.to_string().contains("String"), "{error}");
        done(Writes::Keep)
    };
    assert_ran(&world.engine().execute(operation("k"), run, panicked).await);
}

#[tokio::test]
async fn a_run_that_was_taken_over_commits_nothing_and_is_answered_as_its_successor() {
    let world = Arc::new(World::new().await);
    let run = {
        let world = Arc::clone(&world);
        move |context: Context| async move {
            world.database.clock.advance(LEASE);
            assert_ran(&pay(&world.engine(), "k").await);
            write(&context).await;
            done(Writes::Keep)
        }
    };
    let answer = world.engine().execute(operation("k"), run, panicked).await;
    assert_replays(&answer);
    assert_eq!(world.effects().await, 1);
}

#[tokio::test]
async fn many_payments_at_once_are_all_made_once() {
    let world = Arc::new(World::new().await);
    let engine = world.engine();
    let calls = (0..300).map(|at| {
        let (engine, key) = (engine.clone(), format!("k{}", at % 100));
        tokio::spawn(async move { pay(&engine, &key).await })
    });
    let calls: Vec<_> = calls.collect();
    for call in calls {
        let answer = call.await.unwrap();
        assert!(matches!(answer, Ok(Answer::Ran { .. } | Answer::Replay(_) | Answer::InProgress { .. })), "{answer:?}");
    }
    assert_eq!(world.effects().await, 100);
}

#[tokio::test]
async fn a_shutdown_awaits_transactions() {
    let world = World::new().await;
    let engine = world.engine();
    let run = |context: Context| async move {
        tokio::time::sleep(Duration::from_millis(50)).await;
        write(&context).await;
        done(Writes::Keep)
    };
    drop(tokio::time::timeout(Duration::from_millis(1), engine.execute(operation("k"), run, panicked)).await);
    engine.shutdown(Duration::from_secs(60)).await.unwrap();
    assert_eq!(world.effects().await, 1);
    assert_replays(&pay(&world.engine(), "k").await);
}

#[tokio::test]
async fn failing_open_does_not_run_what_an_unreadable_record_may_have_run() {
    let world = World::new().await;
    let settings = || Settings::new().lease(LEASE).dangerous_fail_open();
    let engine = Idempotency::at_least_once(world.store.clone(), settings());
    let run = |_: Context| async { done(Writes::Keep) };
    assert_ran(&engine.execute(operation("k"), run, panicked).await);
    sqlx::raw_sql("UPDATE idem_records SET format = 2").execute(world.database.store.pool()).await.unwrap();
    let refused = engine.execute(operation("k"), run, panicked).await;
    assert!(matches!(refused, Err(ExecuteError::NotAdmitted(_))), "{refused:?}");
}
