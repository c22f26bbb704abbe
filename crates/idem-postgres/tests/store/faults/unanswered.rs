//! Writes that get no answer: how many a store sends, and when it goes on.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use idem_core::{Acquire, AcquireOutcome, Checkpoint, IdempotencyStore, OwnerOutcome, StoreErrorKind};
use idem_postgres::PostgresConfig;
use idem_proxy::postgres::{Lose, Losses};
use idem_proxy::{Ended, Proxy};
use idem_servers::{PgBouncer, Postgres, PostgresPair};
use idem_testkit::fixture::{checkpoint, repeat_of, request};
use sqlx::AssertSqlSafe;

use super::standby::{WAITING, pair_with};
use crate::support;
use crate::world::{World, at_port, eventually};

/// A store behind a proxy, and the commit of another session that waits for the standby. The store's own do not.
async fn beside_a_waiting_commit(connections: u32) -> (PostgresPair, Proxy<Losses>, World) {
    let connections = NonZeroU32::new(connections).unwrap();
    let (mut pair, world) = pair_with(&[PostgresPair::SYNCHRONOUS, "synchronous_commit=local"], connections).await;
    drop(world);
    let proxy = Proxy::<Losses>::to_port(pair.primary_port()).await.unwrap();
    let configure = |config: PostgresConfig| config.verb_connections(connections);
    let world = World::private_with(&at_port(proxy.port()), &at_port(pair.primary_port()), configure).await;
    pair.cut_off_standby().unwrap();
    let (mut beside, table) = (world.beside().await, world.name.clone());
    tokio::spawn(async move {
        let write = format!("SET synchronous_commit = on; CREATE TABLE {table}.waiting ()");
        let _ = sqlx::raw_sql(AssertSqlSafe(write)).execute(&mut beside).await;
    });
    eventually("a commit waits", async || (world.number(WAITING).await == 1).then_some(())).await;
    (pair, proxy, world)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_two_writes_without_an_answer_a_worker_only_reads_until_no_commit_waits() {
    let (mut pair, proxy, world) = beside_a_waiting_commit(1).await;
    let settled = request();
    let lease = world.lease(&settled).await.unwrap();
    world.settle(&lease).await.unwrap();
    let running = world.lease(&request()).await.unwrap();
    proxy.lose(Lose::EverythingSilently, "idem_acquire_v1", 2);
    let new = request();
    for _ in 0..2 {
        let error = world.store.acquire(&request()).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error:?}");
    }
    assert!(proxy.has_lost());
    let refused = [
        world.store.acquire(&new).await.unwrap_err(),
        world.settle(&running).await.unwrap_err(),
        world.store.peek(&settled.id).await.unwrap_err(),
    ];
    for error in refused {
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
        assert!(error.to_string().contains("earlier writes have no answer"), "{error}");
    }
    let replay = world.store.acquire(&repeat_of(&settled)).await.unwrap();
    assert!(matches!(replay, AcquireOutcome::Replay(_)), "{replay:?}");
    let held = world.store.acquire(&repeat_of(&Acquire { id: running.id, ..request() })).await.unwrap();
    assert!(!matches!(held, AcquireOutcome::Acquired(_)), "{held:?}");
    assert_eq!(world.store.peek(&new.id).await.unwrap(), None, "nothing was written");
    pair.reconnect_standby().unwrap();
    eventually("it writes again", async || world.lease(&new).await.ok()).await;
    world.settle(&running).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_share_what_they_may_leave_without_an_answer() {
    let (_pair, proxy, world) = beside_a_waiting_commit(2).await;
    world.run().await.unwrap();
    proxy.lose(Lose::EverythingSilently, "idem_acquire_v1", 3);
    for _ in 0..3 {
        let error = world.store.acquire(&request()).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error:?}");
    }
    // One of the workers has left two, and both go on. A worker gives the last permit back before it answers, not while it
    // frees what it has written.
    let large = Checkpoint { data: vec![0; 4 << 20].into(), ..checkpoint("large") };
    let mut written = 0;
    for _ in 0..60 {
        let lease = match world.lease(&request()).await {
            Ok(lease) => lease,
            Err(error) => {
                assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error:?}");
                continue;
            }
        };
        match world.store.checkpoint(&lease, &large).await {
            Ok(outcome) => assert_eq!(outcome, OwnerOutcome::Applied),
            // A busy disk, of which the server says that it took too long. A refusal has another kind.
            Err(error) => {
                assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error:?}");
                continue;
            }
        }
        world.settle(&lease).await.unwrap();
        written += 1;
    }
    assert!(written > 30, "{written}");
}

#[tokio::test]
async fn silences_of_which_no_commit_is_the_reason_do_not_keep_the_next_write_from_being_sent() {
    // A write of another store that hangs would keep these back, so the server is not the one that tests share.
    let postgres = Postgres::start().unwrap();
    let proxy = Proxy::<Losses>::to_port(postgres.port()).await.unwrap();
    let configure = |config: PostgresConfig| config.verb_connections(NonZeroU32::MIN);
    let world = World::private_with(&at_port(proxy.port()), &postgres.url(), configure).await;
    world.run().await.unwrap();
    proxy.lose(Lose::EverythingSilently, "idem_acquire_v1", 4);
    for _ in 0..4 {
        let error = world.store.acquire(&request()).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error:?}");
    }
    assert!(proxy.has_lost());
    world.run().await.unwrap();
}

/// Writes for a while, which must fail each time. There are never more `sessions` than one worker may leave.
async fn no_more_are_left(world: &World, sessions: &str) {
    // Two writes wait for their answers for 2 s each, at most. The rest is longer than a store asks before it goes on.
    let end = Instant::now() + Duration::from_secs(8);
    let mut refused = 0;
    while Instant::now() < end {
        let error = world.store.acquire(&request()).await.expect_err("nothing was written");
        refused += i32::from(!error.is_indeterminate());
        let left = world.number(sessions).await;
        assert!(left <= 2, "{left} sessions are left");
        // Refusals come at once. The pause only keeps this loop from using up a processor.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(refused > 0, "all writes were sent");
}

/// A store with one worker, whose commits wait for a standby that is away.
async fn waiting_commits(statement_timeout: Duration) -> (PostgresPair, Proxy<Losses>, World) {
    let (mut pair, world) = pair_with(&[PostgresPair::SYNCHRONOUS], NonZeroU32::MIN).await;
    drop(world);
    let proxy = Proxy::<Losses>::to_port(pair.primary_port()).await.unwrap();
    let configure = |config: PostgresConfig| {
        config
            .verb_connections(NonZeroU32::MIN)
            .statement_timeout(statement_timeout)
            .lock_timeout(statement_timeout / 2)
    };
    let world = World::private_with(&at_port(proxy.port()), &at_port(pair.primary_port()), configure).await;
    pair.cut_off_standby().unwrap();
    (pair, proxy, world)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_timeout_leaves_no_more_sessions_than_another() {
    let (mut pair, _proxy, world) = waiting_commits(Duration::from_millis(100)).await;
    no_more_are_left(&world, WAITING).await;
    pair.reconnect_standby().unwrap();
    eventually("it writes again", async || world.lease(&request()).await.ok()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_connection_counts_while_its_commit_waits() {
    let (mut pair, proxy, world) = waiting_commits(Duration::from_secs(1)).await;
    for _ in 0..2 {
        let error = world.store.acquire(&request()).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Timeout, "{error:?}");
    }
    proxy.end_all(Ended::ClientReset);
    no_more_are_left(&world, WAITING).await;
    pair.reconnect_standby().unwrap();
    eventually("it writes again", async || world.lease(&request()).await.ok()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_of_a_pooler_in_place_of_the_answer_does_not_end_the_wait() {
    let (mut pair, world) = pair_with(&[PostgresPair::SYNCHRONOUS], NonZeroU32::MIN).await;
    drop(world);
    // After 3 s it closes its connections to both sides. The store gives up after 2 s, and the commit waits for longer.
    let primary = at_port(pair.primary_port());
    let pooler = PgBouncer::start_with(&primary, 10, &["query_timeout=3"]).unwrap();
    let configure = |config: PostgresConfig| {
        config.through_transaction_pooler().verb_connections(NonZeroU32::MIN).statement_timeout(Duration::from_secs(1))
    };
    let world = World::private_with(pooler.url(), &primary, configure).await;
    pair.cut_off_standby().unwrap();
    no_more_are_left(&world, WAITING).await;
    pair.reconnect_standby().unwrap();
    eventually("it writes again", async || world.lease(&request()).await.ok()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_may_be_held_up_by_something_else_than_a_standby() {
    let postgres = Postgres::start().unwrap();
    let configure =
        |config: PostgresConfig| config.verb_connections(NonZeroU32::MIN).statement_timeout(Duration::from_secs(1));
    let world = World::private_with(&postgres.url(), &postgres.url(), configure).await;
    // Like a disk that hangs, it does not heed timeouts.
    let hang = format!(
        "CREATE TABLE {0}.hung AS SELECT 1;
         CREATE FUNCTION {0}.hang() RETURNS TRIGGER LANGUAGE plpgsql AS 'BEGIN
         LOOP
             BEGIN
                 EXIT WHEN NOT EXISTS (SELECT FROM {0}.hung);
                 PERFORM pg_catalog.pg_sleep(0.1);
             EXCEPTION WHEN query_canceled THEN
             END;
         END LOOP;
         RETURN NEW;
         END';
         CREATE TRIGGER hang BEFORE INSERT ON {0}.idem_records FOR EACH ROW EXECUTE FUNCTION {0}.hang()",
        world.name
    );
    support::sql(&mut world.beside().await, hang).await;
    let hanging = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = '{}' AND state = 'active' \
         AND query LIKE '%idem_acquire_v1%'",
        world.name
    );
    no_more_are_left(&world, &hanging).await;
    assert_eq!(world.number(&hanging).await, 2, "none hangs");
    support::sql(&mut world.beside().await, format!("DELETE FROM {}.hung", world.name)).await;
    eventually("it writes again", async || world.lease(&request()).await.ok()).await;
}
