//! Users with few privileges, and servers that take no writes.

use std::time::{Duration, Instant};

use idem_core::{AcquireOutcome, Begin, IdempotencyStore as _, StoreErrorKind, TransactionalStore as _, Writes};
use idem_mysql::{MySqlConfig, MySqlStore, migrations};
use idem_servers::MariaDb;
use idem_testkit::fixture::{KEPT, completed, request};
use sqlx::{Connection as _, MySqlConnection};

use crate::support::{Database, number, sql};

/// A user of this database, who may do all to the records and repairs that the README lists, or only read.
async fn user(database: &Database, may_write: bool) -> MySqlConfig {
    let user = format!("user_{}", database.name);
    let mut root = database.connection().await;
    sql(&mut root, format!("CREATE USER {user}@'%'")).await;
    for (table, written) in [
        ("idem_records", "SELECT, INSERT, UPDATE, DELETE"),
        ("idem_repairs", "SELECT, INSERT, UPDATE"),
        ("idem_identity", "SELECT"),
        ("idem_migrations", "SELECT"),
    ] {
        let privileges = if may_write { written } else { "SELECT" };
        sql(&mut root, format!("GRANT {privileges} ON {}.{table} TO {user}@'%'", database.name)).await;
    }
    MySqlConfig::new(database.server.url_of(&user, &database.name))
}

#[tokio::test]
async fn the_least_privileges_are_enough_for_every_verb() {
    let database = Database::new().await;
    database.store().await;
    let config = user(&database, true).await;
    for config in [config.clone(), config.without_migrating()] {
        let store = MySqlStore::open(config).await.unwrap();
        store.self_test().await.unwrap();
        store.health().await.unwrap();
        assert_eq!(store.missing_privileges().await.unwrap(), []);
        let Begin::Acquired { transaction, .. } = store.begin(&request()).await.unwrap() else { panic!() };
        transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    }
}

#[tokio::test]
async fn a_user_who_may_only_read_is_told_so() {
    let database = Database::new().await;
    let AcquireOutcome::Acquired(lease) = database.store().await.acquire(&request()).await.unwrap() else { panic!() };
    let store = MySqlStore::open(user(&database, false).await).await.unwrap();
    for error in [
        store.acquire(&request()).await.map(drop).unwrap_err(),
        store.settle(&lease, &completed(), KEPT).await.map(drop).unwrap_err(),
    ] {
        assert_eq!((error.kind(), error.is_indeterminate()), (StoreErrorKind::Unavailable, false), "{error:?}");
        assert!(error.to_string().contains("lacks a privilege"), "{error}");
    }
    assert!(store.peek(&lease.id).await.unwrap().is_some());
    assert!(store.self_test().await.is_err());
    let missing: Vec<_> = store.missing_privileges().await.unwrap().iter().map(ToString::to_string).collect();
    let of_records = ["INSERT on idem_records", "UPDATE on idem_records", "DELETE on idem_records"];
    assert_eq!(missing, [&of_records[..], &["INSERT on idem_repairs", "UPDATE on idem_repairs"]].concat());
}

#[tokio::test]
async fn privileges_on_single_columns_are_not_enough() {
    let database = Database::new().await;
    database.store().await;
    let store = MySqlStore::open(user(&database, false).await).await.unwrap();
    let mut root = database.connection().await;
    let change = format!(
        "REVOKE SELECT ON {0}.idem_records FROM user_{0}@'%'; GRANT SELECT (id), UPDATE (status), INSERT, DELETE ON {0}.idem_records TO \
         user_{0}@'%'; GRANT INSERT, UPDATE (outcome, reason) ON {0}.idem_repairs TO user_{0}@'%'",
        database.name
    );
    sql(&mut root, change).await;
    let missing: Vec<_> = store.missing_privileges().await.unwrap().iter().map(ToString::to_string).collect();
    assert_eq!(missing, ["SELECT on idem_records", "UPDATE on idem_records"]);
}

#[tokio::test]
async fn what_keeps_a_store_from_opening_is_named() {
    let database = Database::new().await;
    let empty = MySqlStore::open(database.config().without_migrating()).await.unwrap_err();
    let unknown = MySqlStore::open(MySqlConfig::new(database.server.url_of("root", "nowhere"))).await.unwrap_err();
    let stranger =
        MySqlStore::open(MySqlConfig::new(database.server.url_of("stranger", &database.name))).await.unwrap_err();
    let nameless = database.server.url_of("root", "");
    let nameless = MySqlStore::open(MySqlConfig::new(nameless.trim_end_matches('/'))).await.unwrap_err();
    let wrong = MySqlStore::open(MySqlConfig::new("postgres://localhost")).await.unwrap_err();
    for (error, words) in [
        (empty, "tables of idem-mysql are missing"),
        (unknown, "database does not exist"),
        (stranger, "refused the login"),
        (nameless, "names no database"),
        (wrong, "mysql://user:password@host/database"),
    ] {
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error:?}");
        assert!(error.to_string().contains(words), "{error}");
    }
    let absent = MySqlStore::open(MySqlConfig::new("mysql://root@127.0.0.1:1/test")).await.unwrap_err();
    assert_eq!(absent.kind(), StoreErrorKind::Unavailable, "{absent:?}");
}

#[tokio::test]
async fn a_server_that_takes_no_writes_is_refused_or_told() {
    let server = MariaDb::start_unsynced(&[]).unwrap();
    let mut root = MySqlConnection::connect(&server.url()).await.unwrap();
    MySqlStore::open(MySqlConfig::new(server.url())).await.unwrap();
    sql(&mut root, "CREATE USER app@'%'; GRANT SELECT, INSERT, UPDATE, DELETE ON test.* TO app@'%'").await;
    let config = MySqlConfig::new(server.url_of("app", "test"));
    let store = MySqlStore::open(config.clone()).await.unwrap();
    store.acquire(&request()).await.unwrap();
    let sessions = "SELECT COALESCE(MAX(id), 0) FROM information_schema.processlist WHERE user = 'app'";
    let last = number(&mut root, sessions).await;
    // A failover makes a replica of it.
    sql(&mut root, "SET GLOBAL read_only = ON").await;
    let error = store.acquire(&request()).await.unwrap_err();
    assert_eq!((error.kind(), error.is_indeterminate()), (StoreErrorKind::Unavailable, false), "{error:?}");
    assert!(error.to_string().contains("takes no writes"), "{error}");
    // Only a new connection could lead to a server that takes writes now.
    let old = format!("SELECT COUNT(*) FROM information_schema.processlist WHERE user = 'app' AND id <= {last}");
    let limit = Instant::now() + Duration::from_secs(20);
    while number(&mut root, &old).await > 0 {
        assert!(Instant::now() < limit, "a connection is still used that leads to a server without writes");
        store.acquire(&request()).await.unwrap_err();
    }
    let error = MySqlStore::open(config).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error:?}");
    sql(&mut root, "SET GLOBAL read_only = OFF").await;
    store.self_test().await.unwrap();
    let known: Vec<_> = migrations().iter().map(|step| step.version).collect();
    assert_eq!(known, [1]);
}
