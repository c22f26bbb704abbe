//! A database whose schema's owner migrates, and whose application role has no more privileges than it needs.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use idem_core::engine::{Purger, PurgerSettings};
use idem_core::{Purge, StoreErrorKind};
use idem_postgres::{PostgresConfig, PostgresStore, TimeOffset};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection};

use super::work;
use crate::support::{connection, number, sql};

/// As SECURITY.md advises; `{0}` is the database, `{0}_owner` and `{0}_app` are the roles.
const DATABASE: &str = "REVOKE ALL ON DATABASE {0} FROM PUBLIC;GRANT CONNECT ON DATABASE {0} TO {0}_app;
    REVOKE CREATE ON SCHEMA public FROM PUBLIC";

const SCHEMA: &str = "GRANT USAGE ON SCHEMA idem TO {0}_app;
    GRANT SELECT, INSERT, UPDATE, DELETE ON idem.idem_records TO {0}_app;
    GRANT SELECT ON idem.idem_identity, idem.idem_migrations TO {0}_app;
    REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA idem FROM PUBLIC;
    GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA idem TO {0}_app";

struct Database {
    name: String,
    options: PgConnectOptions,
}

impl Database {
    async fn new() -> Self {
        let name = format!("layout_{}", uuid::Uuid::new_v4().simple());
        let mut admin = connection().await;
        sql(&mut admin, format!("CREATE ROLE {name}_owner LOGIN;CREATE ROLE {name}_app LOGIN")).await;
        sql(&mut admin, format!("CREATE DATABASE {name} OWNER {name}_owner")).await;
        let options: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
        let database = Self { options: options.database(&name).disable_statement_logging(), name };
        // The schema public may belong to a superuser.
        database.run(&mut database.options.connect().await.unwrap(), DATABASE).await;
        database
    }

    fn role(&self, role: &str) -> PgConnectOptions {
        self.options.clone().username(&format!("{}_{role}", self.name))
    }

    async fn owner(&self) -> PgConnection {
        self.role("owner").connect().await.unwrap()
    }

    async fn run(&self, connection: &mut PgConnection, statements: &str) {
        sql(connection, statements.replace("{0}", &self.name)).await;
    }

    /// The owner migrates, and makes a table of the application's.
    async fn migrate(&self, configure: impl FnOnce(PostgresConfig) -> PostgresConfig) -> PostgresStore {
        let store = PostgresStore::open(configure(PostgresConfig::from_options(self.role("owner")))).await.unwrap();
        let mut owner = self.owner().await;
        self.run(&mut owner, SCHEMA).await;
        let business = "CREATE SCHEMA app;CREATE TABLE app.effects (key BYTEA);GRANT USAGE ON SCHEMA app TO {0}_app;
            GRANT INSERT ON app.effects TO {0}_app";
        self.run(&mut owner, business).await;
        store
    }

    async fn drop(self) {
        let (name, mut admin) = (&self.name, connection().await);
        sql(&mut admin, format!("DROP DATABASE {name} WITH (FORCE)")).await;
        sql(&mut admin, format!("DROP ROLE {name}_owner;DROP ROLE {name}_app")).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_may_only_work_does_all_that_there_is_to_do_at_run_time() {
    let (database, offset) = (Database::new().await, TimeOffset::default());
    drop(database.migrate(|config| config).await);
    let config = PostgresConfig::from_options(database.role("app")).time_offset(offset.clone());
    for config in [config.clone(), config.clone().without_migrating(), config.through_transaction_pooler()] {
        let store = PostgresStore::open(config).await.unwrap();
        let mut business = database.role("app").connect().await.unwrap();
        work::serve(&store, &offset, &mut business).await.unwrap();
        assert_eq!(store.self_test().await.unwrap().open_schemas, []);
        let missing: Vec<_> = store.missing_privileges().await.unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(missing, ["SELECT", "INSERT", "UPDATE"].map(|privilege| format!("{privilege} on idem_repairs")));
        offset.advance(Duration::from_secs(24 * 3600));
        while store.purge(NonZeroU32::MAX).await.unwrap() > 0 {}
        let left = "SELECT count(*) FROM idem.idem_records";
        assert_eq!(number(&mut database.owner().await, left).await, 0);
        for refused in ["CREATE TABLE idem.mine ()", "CREATE TABLE public.mine ()", "CREATE SCHEMA mine"] {
            sqlx::raw_sql(AssertSqlSafe(refused)).execute(&mut business).await.unwrap_err();
        }
    }
    database.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_are_made_and_dropped_by_their_owner_while_the_application_works() {
    let (database, offset) = (Database::new().await, TimeOffset::default());
    let hourly = |config: PostgresConfig| config.partitioned(Duration::from_secs(3600)).time_offset(offset.clone());
    let upkeep = database.migrate(hourly).await;
    let store = PostgresStore::open(hourly(PostgresConfig::from_options(database.role("app")))).await.unwrap();
    work::serve(&store, &offset, &mut database.role("app").connect().await.unwrap()).await.unwrap();
    offset.advance(Duration::from_secs(24 * 3600));
    let purger = Purger::start_with(Arc::new(upkeep), PurgerSettings::new().longest_pause(Duration::from_millis(50)));
    let (mut owner, records) = (database.owner().await, "SELECT count(*) FROM idem.idem_records");
    let dropped = async {
        while number(&mut owner, records).await > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), dropped).await.expect("the owner drops what is past");
    purger.stop().await;
    work::serve(&store, &offset, &mut database.role("app").connect().await.unwrap()).await.unwrap();
    database.drop().await;
}

#[tokio::test]
async fn the_self_test_names_who_else_may_create_objects_where_the_store_looks() {
    let database = Database::new().await;
    drop(database.migrate(|config| config).await);
    let store = PostgresStore::open(PostgresConfig::from_options(database.role("app"))).await.unwrap();
    let mut admin = database.options.connect().await.unwrap();
    // The schema `aside` is on no search path, so the report leaves it out.
    let grants = "CREATE ROLE {0}_guest;CREATE SCHEMA aside;GRANT CREATE ON SCHEMA aside, idem TO {0}_guest;
        GRANT CREATE ON SCHEMA public TO PUBLIC;GRANT CREATE ON SCHEMA public, idem TO {0}_app";
    database.run(&mut admin, grants).await;
    let report = store.self_test().await.unwrap();
    let found: Vec<_> = report.open_schemas.iter().map(|open| (open.name.as_str(), open.roles.join(" "))).collect();
    assert_eq!(found, [("idem", format!("{}_guest", database.name)), ("public", "PUBLIC".to_owned())]);
    assert!(report.to_string().contains("REVOKE CREATE ON SCHEMA \"public\" FROM PUBLIC"), "{report}");
    for open in &report.open_schemas {
        let said = open.to_string();
        let (_, revoke) = said.split_once("; ").unwrap();
        database.run(&mut admin, revoke).await;
    }
    assert_eq!(store.self_test().await.unwrap().open_schemas, []);
    database.run(&mut admin, "DROP OWNED BY {0}_guest;DROP ROLE {0}_guest").await;
    database.drop().await;
}

#[tokio::test]
async fn a_role_that_lacks_a_privilege_is_told_so() {
    let database = Database::new().await;
    let error = PostgresStore::open(PostgresConfig::from_options(database.role("app"))).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error:?}");
    assert!(error.to_string().contains("privilege"), "{error}");
    database.drop().await;
}
