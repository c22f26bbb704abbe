//! Handlers' sessions: a run that keeps nothing costs no new one, and the server never has more than the limit.

use std::time::{Duration, Instant};

use idem_core::engine::{Conclusion, Disposition, Idempotency, Operation, Settings};
use idem_core::{Fingerprint, OwnerOutcome, Scope, Settlement, StoredResponse, Writes};
use idem_postgres::PostgresConfig;
use idem_testkit::fixture::{KEPT, completed, retryable};
use sqlx::Connection as _;
use sqlx::postgres::PgConnectOptions;

use crate::support::number;
use crate::world::{World, handlers, port_of_shared, transactional};
use idem_proxy::postgres::Losses;
use idem_proxy::{Ended, Proxy};

const RUNS: usize = 20;

/// Runs that end in every way in which nothing is kept.
async fn discard(world: &World, round: usize) {
    let request = transactional();
    let mut transaction = world.begin(&request).await.unwrap();
    world.write(&mut *transaction, &request.id).await.unwrap();
    let connection = handlers(&mut *transaction);
    let (settlement, writes) = match round % 8 {
        0 => (completed(), Writes::Discard),
        1 => (retryable(), Writes::Discard),
        2 => (Settlement::Released, Writes::Discard),
        3 => {
            // A handler that answers an error of the database with a refusal.
            sqlx::raw_sql("SELECT 1 / 0").execute(&mut **connection).await.unwrap_err();
            (completed(), Writes::Discard)
        }
        4 => {
            // A handler that overlooks it.
            sqlx::raw_sql("SELECT 1 / 0").execute(&mut **connection).await.unwrap_err();
            (completed(), Writes::Keep)
        }
        5 => {
            // A handler that leaves a nested transaction open.
            std::mem::forget(connection.begin().await.unwrap());
            (completed(), Writes::Discard)
        }
        6 => {
            let nested = connection.begin().await.unwrap();
            drop(nested);
            (Settlement::Released, Writes::Discard)
        }
        _ => {
            // A deferred constraint, which fails only at COMMIT.
            let late = "CREATE TEMPORARY TABLE late (id INT UNIQUE DEFERRABLE INITIALLY DEFERRED) ON COMMIT DROP;
                INSERT INTO late VALUES (1), (1)";
            sqlx::raw_sql(late).execute(&mut **connection).await.unwrap();
            (completed(), Writes::Keep)
        }
    };
    let finished = transaction.finish(&settlement, KEPT, writes).await;
    match writes {
        Writes::Discard => assert_eq!(finished.unwrap(), OwnerOutcome::Applied),
        Writes::Keep => assert!(!finished.unwrap_err().is_indeterminate()),
    }
}

/// The same by way of the engine: a refusal, a release, and a handler that panics.
async fn discard_by_the_engine(world: &World, round: usize) {
    let engine = Idempotency::transactional(std::sync::Arc::new(world.store.clone()), Settings::new());
    let key = uuid::Uuid::new_v4().to_string().parse().unwrap();
    let operation = Operation::new(Scope::new("acme", "transactional"), key, Fingerprint::of_bytes("pay", b"10 EUR"));
    let run = async move |_| {
        let disposition = match round % 3 {
            0 => Disposition::Complete { response: StoredResponse::new(422, "no"), writes: Writes::Discard },
            1 => Disposition::Release { writes: Writes::Discard },
            _ => panic!("the handler panics"),
        };
        Conclusion { value: (), disposition, retention: None }
    };
    let released = Disposition::Release { writes: Writes::Discard };
    let panicked = || Conclusion { value: (), disposition: released, retention: None };
    let _ = engine.execute(operation, run, panicked).await;
}

async fn costs_no_session(port: u16, configure: fn(PostgresConfig) -> PostgresConfig) {
    let proxy = Proxy::<Losses>::to_port(port).await.unwrap();
    let world = World::shared_through(proxy.port(), configure).await;
    // Opens every connection that the runs need.
    for _ in 0..4 {
        world.run().await.unwrap();
        world.transact().await.unwrap();
    }
    let before = proxy.connections();
    for round in 0..RUNS {
        discard(&world, round).await;
        discard_by_the_engine(&world, round).await;
    }
    world.transact().await.unwrap();
    assert_eq!(proxy.connections() - before, 0, "{} runs made new sessions", 2 * RUNS);
    assert_eq!(world.number("SELECT count(*) FROM $.effects").await, 5, "what was discarded was committed");
}

#[tokio::test]
async fn a_run_that_keeps_nothing_costs_no_session() {
    costs_no_session(port_of_shared(), |config| config).await;
}

#[tokio::test]
async fn a_run_that_keeps_nothing_costs_no_session_through_a_pooler() {
    let pooler: PgConnectOptions = idem_servers::pgbouncer_url().parse().unwrap();
    costs_no_session(pooler.get_port(), PostgresConfig::through_transaction_pooler).await;
}

#[tokio::test]
async fn a_session_that_is_being_closed_keeps_its_place() {
    let world = World::shared().await;
    // As many as there may be for verbs, and for handlers.
    const MOST: i64 = 2 + 2;
    let mut beside = world.beside().await;
    let sessions = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = '{}' AND backend_type = 'client backend'",
        world.name
    );
    for _ in 0..2 {
        world.run().await.unwrap();
    }
    let mut transaction = world.begin(&transactional()).await.unwrap();
    // The run is gone while the server still works for it.
    let sleep = "SELECT pg_sleep(0.6)";
    let asked = tokio::time::timeout(
        Duration::from_millis(100),
        sqlx::raw_sql(sleep).execute(&mut **handlers(&mut *transaction)),
    );
    assert!(asked.await.is_err(), "it sleeps for longer");
    drop(transaction);
    let requests = [transactional(), transactional()];
    let begun = crate::world::join_all(requests.iter().map(|request| world.begin(request))).await;
    // The server takes a moment to end a session that was closed; the statement goes on for half a second.
    let since = Instant::now();
    while number(&mut beside, &sessions).await > MOST {
        assert!(since.elapsed() < Duration::from_millis(300), "there are more than {MOST} sessions");
    }
    for transaction in begun {
        transaction.unwrap().finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    }
}

/// Far from its server, a new session takes longer than a caller waits for a transaction.
async fn is_made_for_the_next(port: u16, latency: Duration, configure: fn(PostgresConfig) -> PostgresConfig) {
    let proxy = Proxy::<Losses>::to_port(port).await.unwrap();
    let world = World::shared_through(proxy.port(), configure).await;
    world.transact().await.unwrap();
    proxy.end_all(Ended::Closed);
    proxy.delay(latency);
    let made = proxy.connections();
    let mut gave_up = 0;
    let transaction = loop {
        let request = transactional();
        match tokio::time::timeout(GIVES_UP_AFTER, world.begin(&request)).await {
            Ok(Ok(transaction)) => break transaction,
            Ok(Err(error)) => assert!(error.is_retryable(), "{error:?}"),
            Err(_) => {}
        }
        gave_up += 1;
        assert!(gave_up < 40, "no session was ever ready");
    };
    assert!(gave_up > 0, "a session was ready at once");
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    // One for verbs, the sessions of handlers, and those that take over from what was cut.
    let made = proxy.connections() - made;
    assert!(made <= 8, "{made} connections were made for one transaction");
}

/// How long a caller waits, which is less than the two seconds of the engine's `store_timeout`.
const GIVES_UP_AFTER: Duration = Duration::from_millis(1_300);

#[tokio::test]
async fn a_session_that_nobody_waited_for_is_there_for_the_next() {
    is_made_for_the_next(port_of_shared(), Duration::from_millis(80), |config| config).await;
}

#[tokio::test]
async fn a_session_that_nobody_waited_for_is_there_for_the_next_through_a_pooler() {
    let pooler: PgConnectOptions = idem_servers::pgbouncer_url().parse().unwrap();
    let configure = PostgresConfig::through_transaction_pooler;
    is_made_for_the_next(pooler.get_port(), Duration::from_millis(15), configure).await;
}
