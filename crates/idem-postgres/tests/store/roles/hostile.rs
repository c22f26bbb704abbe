//! Another role may create objects in a schema on the path of the store's role, as everybody may in `public` before
//! PostgreSQL 15. It plants a function, an operator, a relation and a type for every name that the store's SQL uses. None of
//! them runs as the store's role.
use std::num::NonZeroU32;

use idem_core::{AcquireOutcome, Begin, IdempotencyStore, OwnerOutcome, TransactionalStore, Writes};
use idem_postgres::PostgresStore;
use idem_testkit::fixture::{KEPT, completed, repeat_of, request};

use super::traps::Hostile;
use super::work::{self, Layout};
use crate::support::{Configure as _, Schema};

/// The default path: a trap overtakes a function of `pg_catalog` only if it matches the arguments better.
const DEFAULT_PATH: &str = "\"$user\", public";

/// A path on which all objects of the other role come first.
const HOSTILE_PATH: &str = "public, pg_catalog";

#[tokio::test(flavor = "multi_thread")]
async fn traps_spring_where_a_statement_leaves_a_name_to_the_path() {
    let hostile = Hostile::new(DEFAULT_PATH).await;
    hostile.run("SELECT convert_from('\\x61'::pg_catalog.bytea, 'UTF8')").await;
    assert_eq!(hostile.loot().await, ["convert_from"], "a literal prefers text to name");
    hostile.set_path(HOSTILE_PATH).await;
    for (statement, trap) in [
        ("SELECT clock_timestamp()", "clock_timestamp"),
        ("SELECT FROM pg_class", "pg_class"),
        ("SELECT 1::BIGINT = 2::BIGINT", "="),
        ("SELECT 1::BIGINT IN (2::BIGINT)", "="),
        ("SELECT '\\x61'::bytea", "bytea"),
    ] {
        hostile.clear().await;
        hostile.run(statement).await;
        let loot = hostile.loot().await;
        assert!(loot.iter().any(|name| name == trap), "{statement}: {loot:?}");
    }
    hostile.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_another_role_runs_as_the_role_of_the_store() {
    let hostile = Hostile::new(DEFAULT_PATH).await;
    for path in [DEFAULT_PATH, HOSTILE_PATH] {
        hostile.set_path(path).await;
        for layout in Layout::ALL {
            let done = work::all(&hostile, layout).await;
            let loot = hostile.loot().await;
            assert!(loot.is_empty(), "path {path}, {layout:?}: {loot:?} of another role ran ({done:?})");
            done.unwrap();
            hostile.remove(&layout.schema()).await;
        }
    }
    hostile.drop().await;
}

/// Temporary tables come first on a path that does not name `pg_temp`, and stay in their session.
#[tokio::test]
async fn temporary_tables_of_a_handler_take_the_place_of_nothing() {
    let shadows = "CREATE TEMP TABLE pg_prepared_statements ();CREATE TEMP TABLE pg_class ();
        CREATE TEMP TABLE pg_namespace ();CREATE TEMP TABLE idem_records ()";
    for pooled in [false, true] {
        let schema = Schema::new();
        let config = schema.config().max_transactions(NonZeroU32::MIN);
        let config = if pooled { config.through_transaction_pooler() } else { config };
        let store = PostgresStore::open(config).await.unwrap();
        for shadows in [shadows, "SELECT", "SELECT"] {
            let request = request();
            let Begin::Acquired { mut transaction, .. } = store.begin(&request).await.unwrap() else { panic!() };
            sqlx::raw_sql(shadows).execute(work::handlers(&mut *transaction)).await.unwrap();
            assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
            let outcome = store.acquire(&repeat_of(&request)).await.unwrap();
            assert!(matches!(outcome, AcquireOutcome::Replay(_)), "{outcome:?}");
        }
    }
}
