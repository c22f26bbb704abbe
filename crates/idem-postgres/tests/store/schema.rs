//! How a database gets the schema, and what is refused.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::support::{Configure as _, Offset, Schema, connection, number, sql};
use idem_core::{
    AcquireOutcome, Begin, Durability, IdempotencyStore, OwnerOutcome, StoreErrorKind, TransactionalStore, Writes,
};
use idem_postgres::{PostgresConfig, PostgresStore, TimeOffset, migrations, partitioning};
use idem_testkit::fixture::{KEPT, completed, repeat_of, request, response};
use idem_testkit::golden::{self, FUTURE_MICROS, PAST_MICROS};
use sqlx::{AssertSqlSafe, Row as _};

async fn works(store: &PostgresStore) {
    let request = request();
    let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!() };
    assert_eq!(store.settle(&lease, &completed(), KEPT).await.unwrap(), OwnerOutcome::Applied);
}

/// Twenty at once take long to connect on a loaded machine.
fn patient(schema: &Schema) -> PostgresConfig {
    schema.config().statement_timeout(Duration::from_secs(30))
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_replicas_may_start_at_once() {
    let schema = Schema::new();
    let starts: Vec<_> = (0..20).map(|_| tokio::spawn(PostgresStore::open(patient(&schema)))).collect();
    for start in starts {
        works(&start.await.unwrap().unwrap()).await;
    }
    let applied = format!("SELECT count(*) FROM {}.idem_migrations", schema.name);
    let expected = migrations(&schema.name).unwrap().len();
    assert_eq!(number(&mut connection().await, applied).await, i64::try_from(expected).unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_replicas_may_spread_records_over_partitions_at_once() {
    let schema = Schema::new();
    works(&PostgresStore::open(schema.config()).await.unwrap()).await;
    let config = || patient(&schema).partitioned(Duration::from_secs(60));
    let starts: Vec<_> = (0..20).map(|_| tokio::spawn(PostgresStore::open(config()))).collect();
    for start in starts {
        works(&start.await.unwrap().unwrap()).await;
    }
    let records = format!("SELECT count(*) FROM {}.idem_records", schema.name);
    assert_eq!(number(&mut connection().await, records).await, 21, "those from before are there");
}

/// The migrations of version 2 of the schema by their digests, and the rows, with times that stay the same.
async fn dump(schema: &Schema) -> String {
    let mut connection = connection().await;
    let mut lines = Vec::new();
    for migration in &migrations("idem").unwrap()[..2] {
        let digest = sqlx::query("SELECT encode(sha256(convert_to($1, 'UTF8')), 'hex')").bind(&migration.sql);
        let digest: String = digest.fetch_one(&mut connection).await.unwrap().get(0);
        lines.push(format!("-- migration {} ({}) has the digest {digest}", migration.version, migration.name));
    }
    let columns = "id, namespace, principal, operation, format, fingerprint_algorithm, fingerprint, owner, attempt, state, \
        acquisition, takeover, lease_until, not_before, checkpoint_name, checkpoint_data, status, headers, body";
    let times = format!(
        "CASE WHEN owner = decode(repeat('00', 16), 'hex') THEN lease_until * 0 + {PAST_MICROS} \
         ELSE lease_until * 0 + {FUTURE_MICROS} END, not_before * 0 + {FUTURE_MICROS}"
    );
    let values = columns.replace("lease_until, not_before", &times);
    let literals = vec!["%L"; 19].join(", ");
    let rows = format!(
        "SELECT format('INSERT INTO idem.idem_records VALUES ({literals}, {PAST_MICROS}, {PAST_MICROS}, {FUTURE_MICROS}, \
         {FUTURE_MICROS});', {values}) FROM {}.idem_records ORDER BY id",
        schema.name
    );
    lines.extend(sql(&mut connection, rows).await.iter().map(|row| row.get::<String, _>(0)));
    lines.join("\n") + "\n"
}

fn golden_file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/schema-2.sql")
}

#[tokio::test]
async fn this_version_writes_records_as_schema_2_has_them() {
    let (schema, offset) = (Schema::new(), TimeOffset::default());
    let store = PostgresStore::open(schema.config().time_offset(offset.clone())).await.unwrap();
    golden::write(&store, &Offset(offset)).await;
    golden::expect(&golden_file(), &dump(&schema).await);
}

/// Opening the store applies the migrations that come after schema 2.
#[tokio::test]
async fn a_database_of_schema_2_is_opened_and_its_records_are_read() {
    let schema = Schema::new();
    let mut connection = connection().await;
    sql(&mut connection, format!("CREATE SCHEMA {}", schema.name)).await;
    for migration in &migrations(&schema.name).unwrap()[..2] {
        sql(&mut connection, format!("BEGIN;{};COMMIT", migration.sql)).await;
    }
    let rows = std::fs::read_to_string(golden_file()).unwrap();
    sql(&mut connection, rows.replace("INTO idem.", &format!("INTO {}.", schema.name))).await;
    let store = PostgresStore::open(schema.config()).await.unwrap();
    golden::check(&store).await;
}

#[tokio::test]
async fn the_migrations_can_be_applied_by_other_tools() {
    let schema = Schema::new();
    let error = PostgresStore::open(schema.config().without_migrating()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
    assert!(error.to_string().contains("apply the migrations"), "{error}");
    let mut tool = connection().await;
    sql(&mut tool, format!("CREATE SCHEMA {}", schema.name)).await;
    for migration in migrations(&schema.name).unwrap() {
        sql(&mut tool, format!("BEGIN;{};COMMIT", migration.sql)).await;
    }
    works(&PostgresStore::open(schema.config().without_migrating()).await.unwrap()).await;
    let partitions = partitioning(&schema.name, Duration::from_secs(3600)).unwrap();
    sql(&mut tool, format!("BEGIN;{partitions};COMMIT")).await;
    works(&PostgresStore::open(schema.config().without_migrating()).await.unwrap()).await;
}

#[tokio::test]
async fn a_schema_of_a_newer_version_is_refused() {
    let schema = Schema::new();
    PostgresStore::open(schema.config()).await.unwrap();
    sql(
        &mut connection().await,
        format!("INSERT INTO {}.idem_migrations (version, name) VALUES (99, 'later')", schema.name),
    )
    .await;
    for config in [schema.config(), schema.config().without_migrating()] {
        let error = PostgresStore::open(config).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
        assert!(error.to_string().contains("upgrade idem-postgres"), "{error}");
    }
}

#[tokio::test]
async fn any_schema_name_will_do_and_an_application_may_have_tables_beside_ours() {
    for name in ["Has \"quotes\" and; DROP", "public"] {
        let schema = Schema::named(format!("{name} {}", uuid::Uuid::new_v4().simple()));
        let quoted = format!("\"{}\"", schema.name.replace('"', "\"\""));
        let mut other = connection().await;
        sql(&mut other, format!("CREATE SCHEMA {quoted};CREATE TABLE {quoted}._sqlx_migrations (version BIGINT)"))
            .await;
        let store = PostgresStore::open(schema.config()).await.unwrap();
        works(&store).await;
        assert_eq!(store.health().await.unwrap().durability.level, store.durability().level);
        sql(&mut other, format!("DROP SCHEMA {quoted} CASCADE")).await;
    }
}

#[tokio::test]
async fn a_user_with_no_more_rights_than_it_needs_can_work() {
    let schema = Schema::new();
    PostgresStore::open(schema.config()).await.unwrap();
    let (role, mut admin) = (format!("{}_app", schema.name), connection().await);
    let grants = format!(
        "CREATE ROLE {role} LOGIN;GRANT USAGE ON SCHEMA {0} TO {role};
         GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {0} TO {role}",
        schema.name
    );
    sql(&mut admin, grants).await;
    let options: sqlx::postgres::PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    let config = PostgresConfig::from_options(options.username(&role)).schema(&schema.name);
    let store = PostgresStore::open(config).await.unwrap();
    works(&store).await;
    store.self_test().await.unwrap();
    drop(store);
    sql(&mut admin, format!("DROP OWNED BY {role};DROP ROLE {role}")).await;
}

#[tokio::test]
async fn what_is_wrong_is_said_at_the_start() {
    let nowhere = PostgresStore::open(PostgresConfig::new("postgres://postgres@127.0.0.1:1/postgres")).await;
    assert_eq!(nowhere.unwrap_err().kind(), StoreErrorKind::Unavailable);
    let options: sqlx::postgres::PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    let no_database = PostgresConfig::from_options(options.database("there is no such database"));
    let error = PostgresStore::open(no_database).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error:?}");
    let no_schema = PostgresStore::open(PostgresConfig::new(idem_servers::postgres_url()).schema("")).await;
    assert_eq!(no_schema.unwrap_err().kind(), StoreErrorKind::Misconfigured);
}

#[tokio::test]
async fn a_row_that_no_record_can_be_is_refused_by_its_reader() {
    const IMPOSSIBLE: [&str; 17] = [
        "fingerprint_algorithm = 65536",
        "fingerprint = '\\x00'",
        "owner = '\\x00'",
        "attempt = 0",
        "state = 6, lease_until = NULL, acquisition = NULL, takeover = NULL, status = 200, headers = '\\x'",
        "acquisition = 5",
        "takeover = 0",
        "state = 2, lease_until = NULL, acquisition = NULL, takeover = NULL, status = -1, headers = '\\x'",
        "lease_until = NULL",
        "acquisition = NULL",
        "takeover = NULL",
        "not_before = 1",
        "status = 200, headers = '\\x'",
        "headers = '\\x'",
        "body = '\\x'",
        "expires_at = lease_until - 1",
        "checkpoint_name = '\\x'",
    ];
    let schema = Schema::new();
    let store = PostgresStore::open(schema.config()).await.unwrap();
    let mut connection = connection().await;
    for columns in IMPOSSIBLE {
        let request = request();
        assert!(matches!(store.acquire(&request).await.unwrap(), AcquireOutcome::Acquired(_)));
        let update = format!("UPDATE {}.idem_records SET {columns}", schema.name);
        sqlx::raw_sql(AssertSqlSafe(update)).execute(&mut connection).await.unwrap();
        assert_eq!(store.peek(&request.id).await.unwrap_err().kind(), StoreErrorKind::Corrupt, "{columns}");
        assert_eq!(store.acquire(&request).await.unwrap_err().kind(), StoreErrorKind::Corrupt, "{columns}");
        assert_eq!(store.begin(&request).await.unwrap_err().kind(), StoreErrorKind::Corrupt, "{columns}");
        let delete = format!("DELETE FROM {}.idem_records", schema.name);
        sqlx::raw_sql(AssertSqlSafe(delete)).execute(&mut connection).await.unwrap();
    }
}

#[tokio::test]
async fn settings_of_the_session_change_nothing() {
    let schema = Schema::new();
    let options: sqlx::postgres::PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    let odd = options.options([
        ("bytea_output", "escape"),
        ("standard_conforming_strings", "off"),
        ("search_path", "nowhere"),
        ("timezone", "Pacific/Chatham"),
        ("default_transaction_deferrable", "on"),
    ]);
    let store = PostgresStore::open(PostgresConfig::from_options(odd).schema(&schema.name)).await.unwrap();
    let request = request();
    let Begin::Acquired { transaction, .. } = store.begin(&request).await.unwrap() else { panic!() };
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    let AcquireOutcome::Replay(replay) = store.acquire(&repeat_of(&request)).await.unwrap() else { panic!() };
    assert_eq!(replay.response, response());
}

#[tokio::test]
async fn a_store_shows_no_password() {
    let schema = Schema::new();
    let options: sqlx::postgres::PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    let config = PostgresConfig::from_options(options.password("hunter2")).schema(&schema.name);
    // The server trusts every connection from this machine.
    let store = PostgresStore::open(config).await.unwrap();
    works(&store).await;
    assert!(!format!("{store:#?}").contains("hunter2"), "{store:#?}");
}

#[tokio::test]
async fn a_database_in_another_encoding_is_refused() {
    let (name, mut admin) = (format!("latin_{}", uuid::Uuid::new_v4().simple()), connection().await);
    sql(&mut admin, format!("CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")).await;
    let options: sqlx::postgres::PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    let error = PostgresStore::open(PostgresConfig::from_options(options.database(&name))).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
    assert!(error.to_string().contains("LATIN1"), "{error}");
    sql(&mut admin, format!("DROP DATABASE {name} WITH (FORCE)")).await;
}

#[tokio::test]
async fn the_self_test_says_what_a_record_survives() {
    let schema = Schema::new();
    let options: sqlx::postgres::PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    let config = PostgresConfig::from_options(options.clone()).schema(&schema.name);
    let report = PostgresStore::open(config).await.unwrap().self_test().await.unwrap().durability;
    let fsync = number(&mut connection().await, "SELECT (current_setting('fsync') = 'on')::INT::INT8").await == 1;
    assert_eq!(report.level, if fsync { Durability::Power } else { Durability::Crash });
    let off = options.options([("synchronous_commit", "off")]);
    let store = PostgresStore::open(PostgresConfig::from_options(off).schema(&schema.name)).await.unwrap();
    assert_eq!(store.capabilities().durability, Durability::Process);
    let report = store.self_test().await.unwrap();
    assert!(report.to_string().contains("set synchronous_commit to on"), "{report}");
}
