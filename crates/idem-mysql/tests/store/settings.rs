//! Settings of the server and of the application's sessions.

use idem_core::{
    AcquireOutcome, Begin, Durability, IdempotencyStore as _, OwnerOutcome, Settlement, StoreErrorKind, StoredResponse,
    TransactionalStore as _, Writes,
};
use idem_mysql::{MySqlConfig, MySqlStore};
use idem_servers::MariaDb;
use idem_testkit::fixture::{KEPT, completed, repeat_of, request};
use sqlx::mysql::MySqlPoolOptions;
use sqlx::{Connection as _, Executor as _, MySqlConnection, Row as _};

use crate::support::{Database, FAST, sql};

#[tokio::test]
async fn a_server_that_does_not_sync_is_named() {
    let database = Database::new().await;
    let store = database.store().await;
    let report = store.self_test().await.unwrap();
    assert_eq!(report.durability.durability, Durability::Crash);
    assert_eq!(store.capabilities().durability, Durability::Crash);
    for name in ["innodb_flush_log_at_trx_commit", "innodb_doublewrite", "innodb_flush_method"] {
        assert!(report.to_string().contains(name), "{report}");
    }
    assert_eq!(report.warnings, [""; 0]);
    assert!(store.health().await.unwrap().version.contains("MariaDB"));
}

/// The application's sessions cut values that do not fit. The record of a transaction there is whole.
#[tokio::test]
async fn a_sql_mode_that_is_not_strict_is_reported_and_harms_no_record() {
    let database = Database::new().await;
    let pool = MySqlPoolOptions::new().max_connections(4).after_connect(|connection, _| {
        Box::pin(
            async move { connection.execute("SET SESSION sql_mode = 'ANSI,NO_BACKSLASH_ESCAPES'").await.map(drop) },
        )
    });
    let store = MySqlStore::open(MySqlConfig::from_pool(pool.connect_lazy(&database.url()).unwrap())).await.unwrap();
    let report = store.self_test().await.unwrap();
    assert!(report.warnings.len() == 1 && report.warnings[0].contains("not strict"), "{report}");
    let body: Vec<u8> = (0..=255).cycle().take(300_000).collect();
    let settlement = Settlement::Completed(StoredResponse::new(200, body.clone()));
    let request = request();
    let Begin::Acquired { transaction, .. } = store.begin(&request).await.unwrap() else { panic!() };
    assert_eq!(transaction.finish(&settlement, KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    let replay = store.peek(&request.id).await.unwrap().unwrap().replay().unwrap();
    let Settlement::Completed(expected) = settlement else { panic!() };
    assert_eq!(replay.response, expected);
}

#[tokio::test]
async fn an_answer_larger_than_a_packet_is_refused_before_it_is_sent() {
    let server = MariaDb::start_with(&[&FAST[..], &["--max-allowed-packet=1M"]].concat()).unwrap();
    let store = MySqlStore::open(MySqlConfig::new(server.url())).await.unwrap();
    let report = store.self_test().await.unwrap();
    assert!(report.warnings.iter().any(|warning| warning.contains("max_allowed_packet is 1048576")), "{report}");
    let large = Settlement::Completed(StoredResponse::new(200, vec![7; 600_000]));
    let fitting = Settlement::Completed(StoredResponse::new(200, vec![7; 500_000]));
    for is_transactional in [false, true] {
        let (request, other) = (request(), request());
        let (refused, lease) = if is_transactional {
            let Begin::Acquired { lease, transaction, .. } = store.begin(&request).await.unwrap() else { panic!() };
            (transaction.finish(&large, KEPT, Writes::Keep).await, lease)
        } else {
            let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!() };
            (store.settle(&lease, &large, KEPT).await, lease)
        };
        let error = refused.unwrap_err();
        assert_eq!((error.kind(), error.is_indeterminate()), (StoreErrorKind::Capacity, false), "{error:?}");
        assert!(error.to_string().contains("max_allowed_packet"), "{error}");
        assert_eq!(store.settle(&lease, &fitting, KEPT).await.unwrap(), OwnerOutcome::Applied);
        store.acquire(&other).await.unwrap();
    }
    // The server ends a connection that has sent too much.
    let mut root = MySqlConnection::connect(&server.url()).await.unwrap();
    let aborted = "SELECT variable_value FROM information_schema.global_status WHERE variable_name = 'Aborted_clients'";
    let aborted: String = sqlx::raw_sql(aborted).fetch_one(&mut root).await.unwrap().get(0);
    assert_eq!(aborted, "0");
}

/// Neither the settings of the server nor its time zone are those of the store.
#[tokio::test]
async fn unusual_settings_of_the_server_change_nothing() {
    let options = [
        "--sql-mode=",
        "--default-time-zone=-11:00",
        "--transaction-isolation=SERIALIZABLE",
        "--character-set-server=latin1",
        "--autocommit=OFF",
        "--lower-case-table-names=1",
        "--log-bin",
        "--binlog-format=ROW",
        "--secure-timestamp=YES",
    ];
    let server = MariaDb::start_with(&[&FAST[..], &options].concat()).unwrap();
    let store = MySqlStore::open(MySqlConfig::new(server.url())).await.unwrap();
    let report = store.self_test().await.unwrap();
    assert!(report.to_string().contains("sync_binlog is 0"), "{report}");
    let request = request();
    let Begin::Acquired { transaction, .. } = store.begin(&request).await.unwrap() else { panic!() };
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    let record = store.peek(&request.id).await.unwrap().unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let off = now.as_secs().abs_diff(record.updated_at.unix_micros().unsigned_abs() / 1_000_000);
    assert!(off < 600, "the time is not UTC: {record:?}");
}

/// Otherwise a repeat would get an answer that is rolled back afterwards.
#[tokio::test]
async fn no_verb_reads_what_is_not_committed() {
    let server = MariaDb::start_with(&[&FAST[..], &["--transaction-isolation=READ-UNCOMMITTED"]].concat()).unwrap();
    let store = MySqlStore::open(MySqlConfig::new(server.url())).await.unwrap();
    let request = request();
    let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!() };
    let mut connection = MySqlConnection::connect(&server.url()).await.unwrap();
    let mut transaction = connection.begin().await.unwrap();
    let settled = store.settle_within(&mut transaction, &lease, &completed(), KEPT).await.unwrap();
    assert_eq!(settled, OwnerOutcome::Applied);
    assert!(store.peek(&lease.id).await.unwrap().unwrap().replay().is_none());
    let repeated = store.acquire(&repeat_of(&request)).await.unwrap();
    assert!(matches!(repeated, AcquireOutcome::InProgress { .. }), "{repeated:?}");
    transaction.rollback().await.unwrap();
}

#[tokio::test]
async fn a_binary_log_of_statements_is_refused_with_advice() {
    let server = MariaDb::start_with(&[&FAST[..], &["--log-bin", "--binlog-format=STATEMENT"]].concat()).unwrap();
    let error = match MySqlStore::open(MySqlConfig::new(server.url())).await {
        Ok(store) => store.acquire(&request()).await.map(drop).unwrap_err(),
        Err(error) => error,
    };
    assert!(error.to_string().contains("set it to MIXED or ROW"), "{error:?}");
    let mut root = MySqlConnection::connect(&server.url()).await.unwrap();
    sql(&mut root, "SET GLOBAL binlog_format = MIXED").await;
    MySqlStore::open(MySqlConfig::new(server.url())).await.unwrap().self_test().await.unwrap();
}
