//! The server goes away and comes back: errors come in time, and the first verb afterwards succeeds.

use std::time::{Duration, Instant};

use idem_core::{IdempotencyStore, Purge, StoreError, StoreErrorKind, Writes};
use idem_servers::Postgres;
use idem_testkit::fixture::{KEPT, completed, request};
use sqlx::Row as _;

use crate::world::{World, join_all, sql, transactional};

/// What one verb may take: `statement_timeout`, a second for the round trip, and time for a loaded machine.
const LIMIT: Duration = Duration::from_millis(2_000 + 1_000 + 1_500);

/// A verb may have to wait for the end of a statement that is on its way before its own begins.
const QUEUED: Duration = Duration::from_millis(3_000 + 4_500);

fn in_time<T: std::fmt::Debug>(what: &str, start: Instant, limit: Duration, answer: Result<T, StoreError>) {
    let (took, error) = (start.elapsed(), answer.expect_err(what));
    assert!(matches!(error.kind(), StoreErrorKind::Unavailable | StoreErrorKind::Timeout), "{what}: {error:?}");
    assert!(error.is_retryable(), "{what}: {error:?}");
    assert!(took < limit, "{what} took {took:?}: {error:?}");
}

/// Every call fails in time while the server is away.
async fn is_away(world: &World, limit: Duration) {
    let start = Instant::now();
    let verbs = join_all((0..8).map(|_| async {
        let answer = world.store.acquire(&request()).await;
        in_time("acquire", start, limit, answer);
    }));
    let maintenance = async {
        in_time("purge", start, limit, world.store.purge(10.try_into().unwrap()).await);
        let start = Instant::now();
        in_time("health", start, limit, world.store.health().await);
    };
    let begin = async { in_time("begin", start, limit, world.begin(&transactional()).await) };
    tokio::join!(verbs, maintenance, begin);
}

/// The first verb and the first transaction succeed.
async fn is_back(world: &World) {
    let (verb, begun) = tokio::join!(world.run(), world.transact());
    verb.expect("the first verb failed");
    begun.expect("the first transaction failed");
    world.writes_and_records_agree().await;
    world.quiet().await;
}

/// Opens every connection of the store.
async fn warm(world: &World) {
    for result in join_all((0..4).map(|_| world.run())).await {
        result.unwrap();
    }
    let requests = [transactional(), transactional()];
    let open = [world.begin(&requests[0]).await.unwrap(), world.begin(&requests[1]).await.unwrap()];
    for transaction in open {
        transaction.finish(&completed(), KEPT, Writes::Discard).await.unwrap();
    }
    let clear = "DELETE FROM $.idem_records WHERE operation = 'transactional' AND id NOT IN (SELECT id FROM $.effects)";
    sql(&mut world.beside().await, clear.replace('$', &world.name)).await;
}

async fn goes_and_comes_back(
    postgres: &mut Postgres,
    world: &World,
    go: fn(&mut Postgres) -> Result<(), idem_servers::Error>,
) {
    warm(world).await;
    let request = transactional();
    let mut running = world.begin(&request).await.unwrap();
    world.write(&mut *running, &request.id).await.unwrap();
    go(postgres).unwrap();
    let finish = async {
        let start = Instant::now();
        // The store looks for the record for a while, which takes longer than a verb.
        in_time("finish", start, Duration::from_secs(10), running.finish(&completed(), KEPT, Writes::Keep).await);
    };
    tokio::join!(is_away(world, LIMIT), finish);
    postgres.start_again().unwrap();
    is_back(world).await;
    assert_eq!(world.store.peek(&request.id).await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stops_or_crashes_is_found_again_by_the_first_verb() {
    let mut postgres = Postgres::start().unwrap();
    let world = World::private(&postgres.url(), &postgres.url()).await;
    goes_and_comes_back(&mut postgres, &world, Postgres::stop).await;
    goes_and_comes_back(&mut postgres, &world, Postgres::kill).await;
    // No call was made while the server was away, so the store does not know that all its connections are dead.
    for go in [Postgres::stop, Postgres::kill] {
        warm(&world).await;
        go(&mut postgres).unwrap();
        postgres.start_again().unwrap();
        is_back(&world).await;
    }
    world.is_whole().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_and_purge_find_a_restarted_server_again_at_once() {
    let mut postgres = Postgres::start().unwrap();
    let world = World::private(&postgres.url(), &postgres.url()).await;
    for _ in 0..2 {
        warm(&world).await;
        postgres.restart().unwrap();
        world.store.health().await.expect("the first look at the health failed");
        warm(&world).await;
        postgres.restart().unwrap();
        world.store.purge(10.try_into().unwrap()).await.expect("the first purge failed");
    }
}

/// Sends `signal` to the store's sessions. In a container it is not needed: pausing stops every process.
async fn signal(postgres: &Postgres, signal: &str, sessions: &[i32]) {
    if postgres.origin().starts_with("container") {
        return;
    }
    let sessions = sessions.iter().map(i32::to_string);
    let status = tokio::process::Command::new("kill").arg(signal).args(sessions).status().await;
    assert!(status.unwrap().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stands_still_is_given_up_in_time() {
    let mut postgres = Postgres::start().unwrap();
    let world = World::private(&postgres.url(), &postgres.url()).await;
    warm(&world).await;
    let mut beside = world.beside().await;
    let sessions = format!("SELECT pid FROM pg_stat_activity WHERE application_name = '{}'", world.name);
    let sessions = sql(&mut beside, sessions).await;
    let sessions: Vec<i32> = sessions.iter().map(|row| row.get(0)).collect();
    assert!(sessions.len() >= 2, "{sessions:?}");
    postgres.pause().unwrap();
    signal(&postgres, "-STOP", &sessions).await;
    is_away(&world, QUEUED).await;
    // By now the store has no connection left, and cannot make one.
    is_away(&world, QUEUED).await;
    postgres.resume().unwrap();
    signal(&postgres, "-CONT", &sessions).await;
    is_back(&world).await;
    world.is_whole().await;
}
