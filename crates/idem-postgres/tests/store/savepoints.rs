//! A handler may make, release and roll back to savepoints of any name. What is discarded is never committed, and the store
//! notices a transaction that the handler has ended.

use std::num::NonZeroU32;

use crate::support::{self, Configure as _, Schema, connection, number, sql};
use idem_core::{
    Acquire, AcquireOutcome, Begin, IdempotencyStore, OwnerOutcome, Settlement, StoreErrorKind, StoreTransaction,
    TransactionalStore, Writes,
};
use idem_postgres::{PostgresStore, PostgresTransaction};
use idem_testkit::fixture::{KEPT, completed, repeat_of, request, retryable};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

struct Setup {
    schema: Schema,
    store: PostgresStore,
    is_direct: bool,
}

impl Setup {
    async fn direct() -> Self {
        let schema = Schema::new();
        let store = PostgresStore::open(schema.config().max_transactions(NonZeroU32::MIN)).await.unwrap();
        Self::with(schema, store, true).await
    }

    async fn pooled() -> Self {
        let schema = Schema::new();
        let config = schema.config_at(&idem_servers::pgbouncer_url()).through_transaction_pooler();
        let store = PostgresStore::open(config.max_transactions(NonZeroU32::MIN)).await.unwrap();
        Self::with(schema, store, false).await
    }

    async fn with(schema: Schema, store: PostgresStore, is_direct: bool) -> Self {
        sql(&mut connection().await, format!("CREATE TABLE {}.effects (id BIGSERIAL)", schema.name)).await;
        Self { schema, store, is_direct }
    }

    async fn begin(&self) -> (Acquire, Box<dyn StoreTransaction>) {
        let request = request();
        match self.store.begin(&request).await.unwrap() {
            Begin::Acquired { transaction, .. } => (request, transaction),
            other => panic!("{other:?}"),
        }
    }

    /// The names of the savepoints in open transactions, as `pg_stat_activity` shows them.
    async fn names_to_be_read(&self) -> Vec<String> {
        let query =
            "SELECT DISTINCT found[1] FROM pg_stat_activity, regexp_matches(query, 'SAVEPOINT (\\w+)', 'g') AS found
            WHERE state = 'idle in transaction'";
        let rows = sql(&mut connection().await, query).await;
        rows.iter().map(|row| sqlx::Row::get(row, 0)).collect()
    }

    async fn write(&self, connection: &mut PgConnection) {
        let insert = format!("INSERT INTO {}.effects DEFAULT VALUES", self.schema.name);
        sqlx::raw_sql(AssertSqlSafe(insert)).execute(connection).await.unwrap();
    }

    async fn effects(&self) -> i64 {
        number(&mut connection().await, format!("SELECT count(*) FROM {}.effects", self.schema.name)).await
    }

    /// The next run on the same session commits.
    async fn pay(&self) {
        let before = self.effects().await;
        let (_, mut transaction) = self.begin().await;
        self.write(handlers(&mut *transaction)).await;
        assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
        assert_eq!(self.effects().await, before + 1);
    }
}

fn handlers(transaction: &mut dyn StoreTransaction) -> &mut PgConnection {
    transaction.as_any_mut().downcast_mut::<PostgresTransaction>().unwrap()
}

/// What a handler can do around its writes with a savepoint called `$`; each `W` is a write.
const PLAYS: [&str; 8] = [
    "W;SAVEPOINT $",
    "SAVEPOINT $;W;SAVEPOINT $",
    "W;SAVEPOINT $;W;SAVEPOINT $;W",
    "W;SAVEPOINT $;W;ROLLBACK TO SAVEPOINT $",
    "W;SAVEPOINT $;W;RELEASE SAVEPOINT $",
    "W;SAVEPOINT other;W;SAVEPOINT $;W;RELEASE SAVEPOINT other",
    "W;SET LOCAL idem.mark = '';SAVEPOINT $",
    "W;RESET ALL;SAVEPOINT $;W",
];

async fn discards(setup: Setup) {
    let before = setup.effects().await;
    let known = ["idem", "idem_0000000000000000", "_sqlx_savepoint_1", "_sqlx_savepoint_15", "_sqlx_savepoint_16"];
    let ends = [(completed(), true), (retryable(), true), (Settlement::Released, false)];
    let mut shadowed = 0;
    for play in PLAYS {
        for (settlement, is_recorded) in &ends {
            // First names that a program may use by chance, then names that it has read.
            for by_chance in [true, false] {
                let (request, mut transaction) = setup.begin().await;
                let names = match by_chance {
                    true => known.map(str::to_owned).to_vec(),
                    false => setup.names_to_be_read().await,
                };
                for name in &names {
                    let insert = format!("INSERT INTO {}.effects DEFAULT VALUES", setup.schema.name);
                    let play = play.replace('W', &insert).replace('$', name);
                    sqlx::raw_sql(AssertSqlSafe(play)).execute(handlers(&mut *transaction)).await.unwrap();
                }
                let finished = transaction.finish(settlement, KEPT, Writes::Discard).await;
                assert_eq!(setup.effects().await, before, "{play}: a discarded write was committed");
                match &finished {
                    Ok(OwnerOutcome::Applied) => {}
                    Ok(OwnerOutcome::LeaseLost) => panic!("{play}: nobody else has it"),
                    Err(error) => {
                        assert!(!by_chance && !error.is_indeterminate(), "{play}: {error:?}");
                        shadowed += 1;
                    }
                }
                let is_applied = finished.is_ok();
                let next = setup.store.acquire(&repeat_of(&request)).await.unwrap();
                match next {
                    AcquireOutcome::Replay(_) | AcquireOutcome::Backoff { .. } => assert!(is_applied && *is_recorded),
                    AcquireOutcome::Acquired(lease) => {
                        assert!(!(is_applied && *is_recorded), "{play}: it was told that it is recorded");
                        setup.store.settle(&lease, &Settlement::Released, KEPT).await.unwrap();
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }
    assert!(shadowed > 0, "nobody could read the name, so nothing was tried");
    setup.pay().await;
}

#[tokio::test]
async fn a_discarded_write_is_never_committed_whatever_savepoints_the_handler_makes() {
    discards(Setup::direct().await).await;
}

#[tokio::test]
async fn a_discarded_write_is_never_committed_whatever_savepoints_the_handler_makes_through_a_pooler() {
    discards(Setup::pooled().await).await;
}

#[tokio::test]
async fn what_is_kept_is_kept_whatever_savepoints_the_handler_makes() {
    for setup in [Setup::direct().await, Setup::pooled().await] {
        let insert = format!("INSERT INTO {}.effects DEFAULT VALUES", setup.schema.name);
        for play in ["W;SAVEPOINT $", "SAVEPOINT $;W;SAVEPOINT $", "SAVEPOINT $;W;RELEASE SAVEPOINT $", "RESET ALL;W"] {
            let before = setup.effects().await;
            let (_, mut transaction) = setup.begin().await;
            let play = play.replace('W', &insert).replace('$', "idem");
            sqlx::raw_sql(AssertSqlSafe(play)).execute(handlers(&mut *transaction)).await.unwrap();
            assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
            assert_eq!(setup.effects().await, before + 1);
        }
    }
}

#[tokio::test]
async fn a_query_of_the_handlers_that_it_cancelled_and_that_fails_does_not_keep_a_refusal_from_being_recorded() {
    for setup in [Setup::direct().await, Setup::pooled().await] {
        for settlement in [completed(), Settlement::Released] {
            let (request, mut transaction) = setup.begin().await;
            let connection = handlers(&mut *transaction);
            setup.write(connection).await;
            // As by a timeout in the handler.
            let fails = sqlx::raw_sql("SELECT 1 / length(pg_sleep(0.1)::TEXT)").execute(&mut *connection);
            assert!(tokio::time::timeout(std::time::Duration::from_millis(20), fails).await.is_err(), "it sleeps");
            let finished = transaction.finish(&settlement, KEPT, Writes::Discard).await;
            assert_eq!(finished.unwrap(), OwnerOutcome::Applied);
            assert_eq!(setup.effects().await, 0);
            let is_there = setup.store.peek(&request.id).await.unwrap().is_some();
            assert_eq!(is_there, settlement != Settlement::Released);
        }
        setup.pay().await;
    }
}

#[tokio::test]
async fn a_discarded_run_leaves_nothing_in_the_session_that_the_next_one_gets() {
    let setup = Setup::direct().await;
    let state = "SELECT concat_ws(' ', pg_backend_pid(), current_user, current_setting('work_mem'),
        current_setting('search_path'), (SELECT string_agg(channel, ',') FROM pg_listening_channels() AS channel),
        to_regclass('pg_temp.scratch'), (SELECT count(*) FROM pg_cursors WHERE name <> ''))";
    for settlement in [completed(), retryable(), Settlement::Released] {
        let mut seen = Vec::new();
        for leaves in [true, false] {
            let (_, mut transaction) = setup.begin().await;
            let connection = handlers(&mut *transaction);
            seen.push(sqlx::query_scalar::<_, String>(state).fetch_one(&mut *connection).await.unwrap());
            let leave =
                "SET work_mem = '77MB';SET search_path = elsewhere;LISTEN news;CREATE TEMPORARY TABLE scratch ();
                CREATE ROLE scratch;SET ROLE scratch;DECLARE cursor CURSOR WITH HOLD FOR SELECT 1";
            if leaves {
                sqlx::raw_sql(leave).execute(&mut *connection).await.unwrap();
            }
            assert_eq!(transaction.finish(&settlement, KEPT, Writes::Discard).await.unwrap(), OwnerOutcome::Applied);
        }
        assert_eq!(seen.first(), seen.last(), "one session, as it was before");
    }
}

#[tokio::test]
async fn a_failed_begin_of_the_handlers_does_not_keep_a_refusal_from_being_recorded() {
    for setup in [Setup::direct().await, Setup::pooled().await] {
        for rounds in [1, 3] {
            let (request, mut transaction) = setup.begin().await;
            let connection = handlers(&mut *transaction);
            setup.write(connection).await;
            sqlx::raw_sql("SELECT 1 / 0").execute(&mut *connection).await.unwrap_err();
            for _ in 0..rounds {
                assert!(connection.begin().await.is_err(), "the transaction has failed");
            }
            assert_eq!(transaction.finish(&completed(), KEPT, Writes::Discard).await.unwrap(), OwnerOutcome::Applied);
            assert_eq!(setup.effects().await, 0);
            let replay = setup.store.acquire(&repeat_of(&request)).await.unwrap();
            assert!(matches!(replay, AcquireOutcome::Replay(_)), "{replay:?}");
        }
    }
}

/// Which answer a COPY leaves unread.
#[derive(Debug, Clone, Copy)]
enum Leaves {
    Error,
    Success,
}

/// An import that fails in the middle leaves an answer on the connection that sqlx does not read. The next handler must not get it.
#[tokio::test]
async fn a_handler_that_drops_a_copy_fails_alone() {
    let ends = [
        (completed(), Writes::Keep),
        (completed(), Writes::Discard),
        (Settlement::Released, Writes::Discard),
        (retryable(), Writes::Discard),
    ];
    for setup in [Setup::direct().await, Setup::pooled().await] {
        for (leaves, (settlement, writes)) in
            ends.iter().flat_map(|end| [(Leaves::Error, end.clone()), (Leaves::Success, end.clone())])
        {
            let (request, mut transaction) = setup.begin().await;
            let connection = handlers(&mut *transaction);
            setup.write(connection).await;
            let before = setup.effects().await;
            let copy = format!("COPY {}.effects FROM STDIN", setup.schema.name);
            match leaves {
                Leaves::Error => drop(connection.copy_in_raw(&copy).await.unwrap()),
                Leaves::Success => support::cancel_the_end_of(connection, &copy).await,
            }
            // What is discarded commits with the first message, before the answers get out of step.
            match transaction.finish(&settlement, KEPT, writes).await {
                Ok(outcome) => {
                    assert_eq!(outcome, OwnerOutcome::Applied);
                    let kept = i64::from(writes == Writes::Keep);
                    assert!(kept == 0 || matches!(leaves, Leaves::Success));
                    assert_eq!(setup.effects().await, before + kept);
                    assert_eq!(
                        setup.store.peek(&request.id).await.unwrap().is_some(),
                        settlement != Settlement::Released
                    );
                }
                Err(error) if setup.is_direct => {
                    assert_eq!(error.kind(), StoreErrorKind::TransactionFailed, "{error:?}");
                    assert!(error.to_string().contains("COPY"), "{error}");
                    assert_eq!(setup.store.peek(&request.id).await.unwrap(), None);
                    assert_eq!(setup.effects().await, before);
                }
                Err(error) => {
                    // If the pooler has closed the server's connection, the transaction has ended.
                    let has_ended = error.kind() == StoreErrorKind::TransactionFailed;
                    assert!(error.is_retryable() || has_ended, "it may be the pooler: {error:?}");
                    assert_eq!(setup.effects().await, before);
                }
            }
            // The next handler has a connection whose answers are its own.
            let (request, mut transaction) = setup.begin().await;
            let connection = handlers(&mut *transaction);
            for wanted in [7_i64, 8] {
                assert_eq!(number(connection, format!("SELECT {wanted}::BIGINT")).await, wanted);
            }
            transaction.finish(&completed(), KEPT, Writes::Discard).await.unwrap();
            assert!(setup.store.peek(&request.id).await.unwrap().is_some());
        }
    }
}
