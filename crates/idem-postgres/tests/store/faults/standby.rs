//! What is acknowledged, and what is not, while commits wait for a standby that is away.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use idem_core::engine::Purger;
use idem_core::{
    Acquire, AcquireOutcome, Begin, IdempotencyStore, OwnerOutcome, State, StoreErrorKind, Term, TransactionalStore,
    Writes,
};
use idem_servers::PostgresPair;
use idem_testkit::fixture::{KEPT, completed, repeat_of, request};

use crate::support::number;
use crate::world::{World, at_port, connect, eventually, join_all, transactional};

pub(super) const WAITING: &str = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";

/// A pair whose standby follows, and a store on its primary. It has more connections for verbs than a test leaves unanswered.
async fn pair(settings: &[&str]) -> (PostgresPair, World) {
    pair_with(settings, NonZeroU32::new(4).unwrap()).await
}

pub(super) async fn pair_with(settings: &[&str], connections: NonZeroU32) -> (PostgresPair, World) {
    let pair = PostgresPair::start_with(settings).unwrap();
    let url = at_port(pair.primary_port());
    let mut beside = connect(&url).await.unwrap();
    let streaming = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'";
    eventually("the standby follows", async || (number(&mut beside, streaming).await == 1).then_some(())).await;
    (pair, World::private_with(&url, &url, |config| config.verb_connections(connections)).await)
}

/// Terminates every session that waits for the standby, once there are more of them than there were.
async fn terminate_another(world: &World, before: i64) {
    eventually("another commit waits", async || (world.number(WAITING).await > before).then_some(())).await;
    let sql = "SELECT count(*) FROM (SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' OFFSET 0) AS waiting \
        WHERE pg_terminate_backend(pid)";
    assert!(world.number(sql).await > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_standby_has_is_not_acknowledged_although_it_can_be_read() {
    let (mut pair, world) = pair(&[PostgresPair::SYNCHRONOUS]).await;
    let (asked, ran) = (request(), transactional());
    let lease = world.lease(&request()).await.unwrap();
    let mut transaction = world.begin(&ran).await.unwrap();
    world.write(&mut *transaction, &ran.id).await.unwrap();
    pair.cut_off_standby().unwrap();

    // Each is committed, terminated while it waits, and sent again by the store or looked up by it.
    let (settled, ()) = tokio::join!(world.settle(&lease), terminate_another(&world, 0));
    let error = settled.expect_err("no standby has the settlement");
    assert!(error.is_indeterminate(), "{error:?}");
    assert_eq!(world.number("SELECT count(*) FROM $.idem_records WHERE state = 2").await, 1, "it is there to be read");
    let error = world.store.peek(&lease.id).await.expect_err("it must not be acknowledged");
    assert!(error.is_indeterminate(), "{error:?}");

    let waiting = world.number(WAITING).await;
    let (acquired, ()) = tokio::join!(world.store.acquire(&asked), terminate_another(&world, waiting));
    let error = acquired.expect_err("no standby has the lease");
    assert!(error.is_indeterminate(), "{error:?}");

    let waiting = world.number(WAITING).await;
    let settlement = completed();
    let finish = transaction.finish(&settlement, KEPT, Writes::Keep);
    let (finished, ()) = tokio::join!(finish, terminate_another(&world, waiting));
    let error = finished.expect_err("no standby has the transaction");
    assert!(error.is_indeterminate(), "{error:?}");

    pair.reconnect_standby().unwrap();
    eventually("it is settled again", async || world.settle(&lease).await.ok()).await;
    let acquired = world.store.acquire(&asked).await.unwrap();
    assert!(matches!(&acquired, AcquireOutcome::Acquired(lease) if lease.owner == asked.owner), "{acquired:?}");
    let replay = world.store.begin(&repeat_of(&ran)).await.unwrap();
    assert!(matches!(replay, Begin::Answered(AcquireOutcome::Replay(_))), "{replay:?}");
    world.is_whole().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_leaves_the_commit_waiting_for_its_standby() {
    let (mut pair, world) = pair(&[PostgresPair::SYNCHRONOUS]).await;
    let lease = world.lease(&request()).await.unwrap();
    let ran = transactional();
    let mut transaction = world.begin(&ran).await.unwrap();
    world.write(&mut *transaction, &ran.id).await.unwrap();
    pair.cut_off_standby().unwrap();
    let start = Instant::now();
    let settlement = completed();
    let finish = transaction.finish(&settlement, KEPT, Writes::Keep);
    let (settled, finished) = tokio::join!(world.settle(&lease), finish);
    let (settled, finished) = (settled.unwrap_err(), finished.unwrap_err());
    assert_eq!(settled.kind(), StoreErrorKind::Timeout, "{settled:?}");
    assert!(settled.is_indeterminate() && finished.is_indeterminate(), "{settled:?} {finished:?}");
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    // Had the wait been cancelled, by the deadline or by statement_timeout, both would be visible.
    assert_eq!(world.number(WAITING).await, 2);
    assert_eq!(world.store.transactions().in_use, 1, "its session is still there");
    let record = world.store.peek(&lease.id).await.unwrap().unwrap();
    assert!(matches!(record.state, State::InProgress { .. }), "{record:?}");
    assert_eq!(world.store.peek(&ran.id).await.unwrap(), None);
    let held = world.store.begin(&repeat_of(&ran)).await.unwrap();
    assert!(matches!(held, Begin::Answered(AcquireOutcome::InProgress { .. })), "{held:?}");
    pair.reconnect_standby().unwrap();
    eventually("the commits end", async || (world.number(WAITING).await == 0).then_some(())).await;
    eventually("its place is free", async || (world.store.transactions().in_use == 0).then_some(())).await;
    assert_eq!(world.store.settle(&lease, &completed(), KEPT).await.unwrap(), OwnerOutcome::Applied);
    let replay = world.store.begin(&repeat_of(&ran)).await.unwrap();
    assert!(matches!(replay, Begin::Answered(AcquireOutcome::Replay(_))), "{replay:?}");
    world.writes_and_records_agree().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn verbs_leave_few_sessions_behind_while_a_standby_is_away_and_replays_go_on() {
    /// The store has two connections for verbs, and may leave two sessions for each.
    const MOST: i64 = 4;
    let (mut pair, world) = pair_with(&[PostgresPair::SYNCHRONOUS], NonZeroU32::new(2).unwrap()).await;
    let settled = request();
    let lease = world.lease(&settled).await.unwrap();
    world.settle(&lease).await.unwrap();
    let short = Duration::from_secs(1);
    for _ in 0..3 {
        let expiring = Acquire { term: Term { lease: short, retention: short }, ..request() };
        let lease = world.lease(&expiring).await.unwrap();
        assert_eq!(world.store.settle(&lease, &completed(), short).await.unwrap(), OwnerOutcome::Applied);
    }
    pair.cut_off_standby().unwrap();
    let purger = Purger::start(Arc::new(world.store.clone()));
    // Longer than the store waits for an answer, and than it takes to ask whether commits still wait.
    let end = Instant::now() + Duration::from_secs(22);
    let mut refused = 0;
    while Instant::now() < end {
        let acquires: Vec<_> = (0..8).map(|_| request()).collect();
        for acquired in join_all(acquires.iter().map(|asked| world.store.acquire(asked))).await {
            let error = acquired.expect_err("no standby has the lease");
            refused += i32::from(!error.is_indeterminate());
        }
        let waiting = world.number(WAITING).await;
        assert!(waiting <= MOST, "{waiting} sessions wait");
        // Refusals come at once. The pause only keeps this loop from using up a processor.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(refused > 0, "all writes were sent");
    purger.stop().await;
    assert_eq!(world.number("SELECT count(*) FROM $.idem_records").await, 1, "nothing is purged");
    let replay = world.store.acquire(&repeat_of(&settled)).await.unwrap();
    assert!(matches!(replay, AcquireOutcome::Replay(_)), "{replay:?}");
    pair.reconnect_standby().unwrap();
    eventually("it writes again", async || world.lease(&request()).await.ok()).await;
    eventually("the commits end", async || (world.number(WAITING).await == 0).then_some(())).await;
    world.is_whole().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_report_says_whether_a_standby_is_awaited() {
    for (settings, survives, says) in [
        (&[][..], false, "replication connections: 1, and no commit waits for any of them"),
        (&[PostgresPair::SYNCHRONOUS], true, "and the loss of the primary"),
        (&[PostgresPair::SYNCHRONOUS, "synchronous_commit=local"], false, "no commit waits for any of them"),
    ] {
        let (mut pair, world) = pair(settings).await;
        let report = world.store.self_test().await.unwrap().durability;
        assert_eq!((report.replication_connections, report.survives_failover()), (1, survives), "{report}");
        assert!(report.to_string().contains(says), "{report}");
        pair.cut_off_standby().unwrap();
        let report = world.store.health().await.unwrap().durability;
        assert_eq!(report.replication_connections, 0, "{report}");
    }
}
