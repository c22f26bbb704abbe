//! Connections that end around a statement: what the store then says is what the database holds.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use idem_core::{
    Acquire, AcquireOutcome, Begin, IdempotencyStore, OwnerOutcome, Settlement, StoreError, StoreErrorKind,
    TransactionalStore, Writes,
};
use idem_testkit::fixture::{KEPT, checkpoint, completed, repeat_of, request, retryable};

use crate::support::{Configure as _, Schema};
use crate::world::{World, at_port, eventually, join_all, port_of_shared, transactional};
use idem_postgres::PostgresStore;
use idem_proxy::Proxy;
use idem_proxy::postgres::{Lose, Losses};

const LOSSES: [Lose; 3] = [Lose::Statement, Lose::Connection, Lose::Answer];

/// The text in every message that ends a handler's transaction, and in no other.
const END: &str = ";COMMIT";

/// The same in a pool of the application, where sqlx sends it alone.
const END_BY_SQLX: &str = "COMMIT";

async fn behind_proxy() -> (Proxy<Losses>, World) {
    let proxy = Proxy::<Losses>::to_port(port_of_shared()).await.unwrap();
    let world = World::shared_through(proxy.port(), |config| config).await;
    (proxy, world)
}

/// A run whose end meets `lose`, and the answer to its `finish`.
async fn finish(
    (proxy, world, text): (&Proxy<Losses>, &World, &'static str),
    lose: Lose,
    end: &Settlement,
    writes: Writes,
) -> (Acquire, Result<OwnerOutcome, StoreError>) {
    let request = transactional();
    let mut transaction = world.begin(&request).await.unwrap();
    world.write(&mut *transaction, &request.id).await.unwrap();
    proxy.lose(lose, text, 1);
    let told = transaction.finish(end, KEPT, writes).await;
    assert!(proxy.has_lost());
    (request, told)
}

/// The row and the writes of one operation, by SQL.
async fn by_sql(world: &World, request: &Acquire) -> (i64, i64) {
    world.quiet().await;
    let id = World::literal(&request.id);
    let settled = format!("SELECT count(*) FROM $.idem_records WHERE id = {id} AND state > 1");
    let effects = format!("SELECT count(*) FROM $.effects WHERE id = {id}");
    (world.number(&settled).await, world.number(&effects).await)
}

async fn ends(end: Settlement, writes: Writes) {
    let (proxy, world) = behind_proxy().await;
    ends_in((&proxy, &world, END), end.clone(), writes).await;
    let proxy = Proxy::<Losses>::to_port(port_of_shared()).await.unwrap();
    let world = World::from_pool_through(proxy.port()).await;
    ends_in((&proxy, &world, END_BY_SQLX), end, writes).await;
}

async fn ends_in(place: (&Proxy<Losses>, &World, &'static str), end: Settlement, writes: Writes) {
    let (_, world, _) = place;
    for lose in LOSSES.into_iter().cycle().take(9) {
        let (request, told) = finish(place, lose, &end, writes).await;
        let there = by_sql(world, &request).await;
        let done = (1, i64::from(writes == Writes::Keep));
        match &told {
            Ok(OwnerOutcome::Applied) => assert_eq!(there, done, "{lose:?}: told done"),
            Err(error) => {
                assert!(error.is_retryable(), "{error:?}");
                assert_eq!(there, (0, 0), "{lose:?}: told {error:?}");
            }
            other => panic!("{other:?}"),
        }
        match lose {
            Lose::Statement => assert_eq!(there, (0, 0), "what never arrived is there"),
            Lose::Answer => assert_eq!(there, done, "what was done is not there"),
            _ => {}
        }
    }
}

#[tokio::test]
async fn a_lost_commit_that_keeps_writes_is_told_as_it_was() {
    ends(completed(), Writes::Keep).await;
}

#[tokio::test]
async fn a_lost_commit_that_discards_writes_is_told_as_it_was() {
    ends(completed(), Writes::Discard).await;
}

#[tokio::test]
async fn a_lost_commit_of_a_failure_to_be_retried_is_told_as_it_was() {
    ends(retryable(), Writes::Discard).await;
}

#[tokio::test]
async fn a_lost_commit_of_a_release_that_keeps_writes_is_never_told_as_rolled_back_when_it_was_not() {
    let (proxy, world) = behind_proxy().await;
    for lose in LOSSES {
        let (request, told) = finish((&proxy, &world, END), lose, &Settlement::Released, Writes::Keep).await;
        let (settled, effects) = by_sql(&world, &request).await;
        assert_eq!(settled, 0);
        match told {
            Ok(outcome) => assert_eq!((outcome, effects), (OwnerOutcome::Applied, 1), "{lose:?}"),
            // No record tells how it ended: the store may say that it does not know, and nothing else.
            Err(error) => assert!(effects == 0 || error.is_indeterminate(), "{lose:?}: {effects} writes, {error:?}"),
        }
    }
}

#[tokio::test]
async fn lost_answers_to_verbs_are_asked_for_again_and_make_no_second_owner() {
    let (proxy, world) = behind_proxy().await;
    for lose in LOSSES.into_iter().chain([Lose::Preparations]).cycle().take(12) {
        let request = request();
        proxy.lose(lose, "idem_acquire_v1", 1);
        let lease = world.lease(&request).await.unwrap();
        assert!(proxy.has_lost());
        assert_eq!((lease.owner, lease.attempt), (request.owner, 1), "{lose:?}");
        let duplicate = world.store.acquire(&repeat_of(&request)).await.unwrap();
        assert!(matches!(duplicate, AcquireOutcome::InProgress { .. }), "{lose:?}: {duplicate:?}");
        proxy.lose(lose, "idem_checkpoint_v1", 1);
        let outcome = world.store.checkpoint(&lease, &checkpoint("charged")).await.unwrap();
        assert_eq!(outcome, OwnerOutcome::Applied, "{lose:?}");
        proxy.lose(lose, "idem_renew_v1", 1);
        assert_eq!(world.store.renew(&lease, request.term).await.unwrap(), OwnerOutcome::Applied, "{lose:?}");
        proxy.lose(lose, "idem_settle_v1", 1);
        world.settle(&lease).await.unwrap();
        assert!(proxy.has_lost());
        let record = world.store.peek(&lease.id).await.unwrap().unwrap();
        assert!(record.replay().is_some() && record.owner == request.owner, "{lose:?}: {record:?}");
        let lease = world.lease(&transactional()).await.unwrap();
        proxy.lose(lose, "idem_release_v1", 1);
        let released = world.store.settle(&lease, &Settlement::Released, KEPT).await.unwrap();
        assert_eq!(released, OwnerOutcome::Applied, "{lose:?}");
        assert_eq!(world.store.peek(&lease.id).await.unwrap(), None, "{lose:?}");
    }
}

#[tokio::test]
async fn an_answer_lost_twice_is_an_error_that_says_that_it_may_have_happened() {
    let (proxy, world) = behind_proxy().await;
    let request = request();
    proxy.lose(Lose::Answer, "idem_acquire_v1", 2);
    let error = world.store.acquire(&request).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(error.is_retryable() && error.is_indeterminate(), "{error:?}");
    let lease = world.lease(&request).await.unwrap();
    assert_eq!(lease.attempt, 1, "the same token is the same owner");
    proxy.lose(Lose::Answer, "idem_settle_v1", 2);
    let error = world.settle(&lease).await.unwrap_err();
    assert!(error.is_retryable() && error.is_indeterminate(), "{error:?}");
    world.settle(&lease).await.unwrap();
}

#[tokio::test]
async fn an_answer_lost_with_the_server_is_an_error_that_says_that_it_may_have_happened() {
    let port = port_of_shared();
    let proxy = Proxy::<Losses>::to_port(port).await.unwrap();
    let world = World::shared_through(proxy.port(), |config| config.verb_connections(NonZeroU32::MIN)).await;
    let request = request();
    let lease = world.lease(&request).await.unwrap();
    proxy.lose(Lose::Answer, "idem_settle_v1", 1);
    // No server accepts the connection over which it would be sent again.
    proxy.lead_to(0);
    let error = world.settle(&lease).await.unwrap_err();
    assert!(proxy.has_lost());
    assert!(error.is_retryable() && error.is_indeterminate(), "{error:?}");
    proxy.lead_to(port);
    assert!(world.store.peek(&lease.id).await.unwrap().unwrap().replay().is_some());
    world.settle(&lease).await.unwrap();
}

#[tokio::test]
async fn batches_whose_answers_are_lost_lose_nothing() {
    let (proxy, world) = behind_proxy().await;
    for lose in LOSSES.into_iter().chain([Lose::Preparations]) {
        let requests: Vec<_> = std::iter::repeat_with(request).take(100).collect();
        // Both sessions lose it once: each batch is sent a second time, and no batch a third.
        proxy.lose(lose, "idem_acquire_v1", 1);
        let leases = join_all(requests.iter().map(|request| world.lease(request))).await;
        let leases: Vec<_> = leases.into_iter().map(Result::unwrap).collect();
        assert!(
            leases.iter().zip(&requests).all(|(lease, request)| lease.owner == request.owner && lease.attempt == 1)
        );
        proxy.lose(lose, "idem_settle_v1", 1);
        for settled in join_all(leases.iter().map(|lease| world.settle(lease))).await {
            settled.unwrap();
        }
        assert!(proxy.has_lost());
    }
    assert_eq!(world.number("SELECT count(*) FROM $.idem_records WHERE state = 2").await, 400);
}

#[tokio::test]
async fn a_lost_beginning_begins_again() {
    let (proxy, world) = behind_proxy().await;
    for lose in LOSSES {
        world.transact().await.unwrap();
        proxy.lose(lose, "SAVEPOINT idem", 1);
        let request = transactional();
        let begun = world.begin_when_free(&request).await;
        assert!(proxy.has_lost());
        drop(begun);
    }
    world.is_whole().await;
}

#[tokio::test]
async fn a_server_that_falls_silent_is_given_up_in_time() {
    let (proxy, world) = behind_proxy().await;
    let start = Instant::now();
    let request = request();
    proxy.lose(Lose::EverythingSilently, "idem_acquire_v1", 1);
    let error = world.store.acquire(&request).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error:?}");
    assert!(error.is_indeterminate() && start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    let lease = world.lease(&request).await.unwrap();
    world.settle(&lease).await.unwrap();
}

#[tokio::test]
async fn opening_gives_a_silent_server_up_in_time() {
    // The statements of opening, each by a text in it.
    let texts = ["client_min_messages", "pg_is_in_recovery", "idem_migrations", "idem_identity"];
    let opened = texts.map(async |marker| {
        let schema = Schema::new();
        drop(PostgresStore::open(schema.config()).await.unwrap());
        let proxy = Proxy::<Losses>::to_port(port_of_shared()).await.unwrap();
        proxy.lose(Lose::EverythingSilently, marker, 1);
        let config = schema.config_at(&at_port(proxy.port())).migration_wait(Duration::from_secs(1));
        let opened = tokio::time::timeout(Duration::from_secs(15), PostgresStore::open(config))
            .await
            .expect("it waits for ever");
        assert!(proxy.has_lost(), "{marker}");
        let error = opened.unwrap_err();
        assert!(error.is_retryable() && error.to_string().contains("open the store"), "{marker}: {error}");
    });
    join_all(opened).await;
}

#[tokio::test]
async fn a_commit_whose_answer_never_comes_is_looked_up_before_the_engine_gives_up() {
    /// As long as the engine waits for the end of a transaction.
    const ENGINE: Duration = Duration::from_secs(10);
    let (proxy, world) = behind_proxy().await;
    let end = completed();
    let finish = finish((&proxy, &world, END), Lose::EverythingSilently, &end, Writes::Keep);
    let told = tokio::time::timeout(ENGINE, finish);
    let (request, told) = told.await.expect("finish waits for ever for a server that fell silent");
    assert_eq!(by_sql(&world, &request).await, (1, 1));
    assert!(told.is_ok_and(|outcome| outcome == OwnerOutcome::Applied), "what was committed was told as lost");
    // No commit waits for a standby, so the server has no session of it that would not end.
    eventually("its place is free", async || (world.store.transactions().in_use == 0).then_some(())).await;
}

#[tokio::test]
async fn an_error_of_a_poolers_own_for_a_commit_is_looked_up() {
    let (proxy, world) = behind_proxy().await;
    for state in ["XX000", "58000", "08006"] {
        for writes in [Writes::Keep, Writes::Discard] {
            let (request, told) =
                finish((&proxy, &world, END), Lose::AnswerForError(state), &completed(), writes).await;
            assert_eq!(by_sql(&world, &request).await, (1, i64::from(writes == Writes::Keep)));
            assert_eq!(told.unwrap(), OwnerOutcome::Applied, "{state}: it was committed");
        }
        let request = transactional();
        let mut transaction = world.begin(&request).await.unwrap();
        world.write(&mut *transaction, &request.id).await.unwrap();
        proxy.lose(Lose::AnswerForError(state), END, 1);
        let told = transaction.finish(&Settlement::Released, KEPT, Writes::Keep).await;
        assert!(told.unwrap_err().is_indeterminate(), "{state}: nothing is left by which to tell");
    }
    world.run().await.unwrap();
}

#[tokio::test]
async fn a_repeat_needs_no_new_connection() {
    let proxy = Proxy::<Losses>::to_port(port_of_shared()).await.unwrap();
    let world = World::shared_through(proxy.port(), |config| config.verb_connections(NonZeroU32::MIN)).await;
    let request = transactional();
    let transaction = world.begin(&request).await.unwrap();
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    // The connection of one that was given up is not kept.
    drop(world.begin(&transactional()).await.unwrap());
    world.quiet().await;
    world.run().await.unwrap();
    // No server listens there.
    proxy.lead_to(1);
    let told = world.store.begin(&repeat_of(&request)).await.unwrap();
    assert!(matches!(told, Begin::Answered(AcquireOutcome::Replay(_))), "{told:?}");
    assert!(world.begin(&transactional()).await.is_err(), "there was a connection");
}
