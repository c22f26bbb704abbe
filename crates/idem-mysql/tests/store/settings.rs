//! Settings of the server and of the application's sessions.

use idem_core::{
    AcquireOutcome, Begin, Durability, IdempotencyStore as _, OwnerOutcome, Settlement, StoreErrorKind, StoredResponse,
    TransactionalStore as _, Writes,
};
use idem_mysql::{MySqlConfig, MySqlStore, MySqlTransaction};
use idem_servers::MariaDb;
use idem_testkit::fixture::{KEPT, completed, repeat_of, request};
use sqlx::mysql::MySqlPoolOptions;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, MySqlConnection, Row as _};

use crate::support::{Database, number, sql};

#[tokio::test]
async fn a_server_that_does_not_sync_is_named() {
    let database = Database::new().await;
    let store = database.store().await;
    let report = store.self_test().await.unwrap();
    // With 0, the end of the server loses what it wrote in the last second.
    assert_eq!(report.durability.durability, Durability::Process);
    assert_eq!(store.capabilities().durability, Durability::Process);
    for name in ["innodb_flush_log_at_trx_commit", "innodb_doublewrite", "innodb_flush_method"] {
        assert!(report.to_string().contains(name), "{report}");
    }
    assert_eq!(report.warnings, [""; 0]);
    assert!(store.health().await.unwrap().version.contains("MariaDB"));
}

#[tokio::test]
async fn a_store_shows_no_password() {
    let database = Database::new().await;
    sql(
        &mut database.connection().await,
        "CREATE USER secretive@'%' IDENTIFIED BY 'hunter2'; GRANT ALL ON *.* TO secretive@'%'",
    )
    .await;
    let url = database.url().replace("root@", "secretive:hunter2@");
    assert_ne!(url, database.url());
    let store = MySqlStore::open(MySqlConfig::new(&url)).await.unwrap();
    assert!(!format!("{store:#?}").contains("hunter2"), "{store:#?}");
}

/// Of a table without transactions, ROLLBACK takes nothing back.
#[tokio::test]
async fn tables_without_transactions_are_reported() {
    let database = Database::new().await;
    let store = database.store().await;
    sql(&mut database.connection().await, "CREATE TABLE old (id INT) ENGINE = MyISAM").await;
    let report = store.self_test().await.unwrap();
    assert!(report.warnings.len() == 1 && report.warnings[0].contains("1 tables"), "{report}");
}

/// `||` joins texts in a handler's transaction as in the application's other sessions, and values that do not fit are errors.
#[tokio::test]
async fn handlers_have_the_sql_mode_of_other_sessions_and_a_strict_one() {
    let database = Database::new().await;
    let store = database.store().await;
    let mode = "SELECT CONCAT(@@SESSION.sql_mode)";
    let theirs: String = sqlx::raw_sql(mode).fetch_one(&mut database.connection().await).await.unwrap().get(0);
    let Begin::Acquired { mut transaction, .. } = store.begin(&request()).await.unwrap() else { panic!() };
    let connection: &mut MySqlConnection = transaction.as_any_mut().downcast_mut::<MySqlTransaction>().unwrap();
    let ours: String = sqlx::raw_sql(mode).fetch_one(&mut *connection).await.unwrap().get(0);
    assert!(
        theirs.split(',').all(|word| ours.contains(word)) && ours.contains("STRICT_ALL_TABLES"),
        "{theirs}; {ours}"
    );
    let joined: String = sqlx::raw_sql("SELECT 'a' || 'b'").fetch_one(connection).await.unwrap().get(0);
    assert_eq!(joined, "ab");
}

/// By CHAIN, COMMIT would begin a transaction, in which later writes of the application were lost; by RELEASE it would end the session.
/// In the mode ORACLE, some names of columns are words of the language.
#[tokio::test]
async fn unusual_sessions_of_the_application_change_nothing() {
    for setting in ["completion_type = 'CHAIN'", "completion_type = 'RELEASE'", "sql_mode = 'ORACLE,STRICT_ALL_TABLES'"]
    {
        let database = Database::new().await;
        let setting = AssertSqlSafe(format!("SET SESSION {setting}"));
        let pool = MySqlPoolOptions::new().max_connections(2).after_connect(move |connection, _| {
            let setting = setting.0.clone();
            Box::pin(async move { connection.execute(AssertSqlSafe(setting)).await.map(drop) })
        });
        let pool = pool.connect_lazy(&database.url()).unwrap();
        let store = MySqlStore::open(MySqlConfig::from_pool(pool)).await.unwrap();
        sql(&mut database.connection().await, "CREATE TABLE effects (id INT AUTO_INCREMENT PRIMARY KEY)").await;
        for turn in 1..=3 {
            let request = request();
            let Begin::Acquired { mut transaction, .. } = store.begin(&request).await.unwrap() else { panic!() };
            let connection = transaction.as_any_mut().downcast_mut::<MySqlTransaction>().unwrap();
            sql(connection, "INSERT INTO effects () VALUES ()").await;
            assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
            assert!(store.peek(&request.id).await.unwrap().unwrap().replay().is_some());
            // A write of the application outside of transactions, on the same connections.
            sql(&mut store.pool().acquire().await.unwrap(), "INSERT INTO effects () VALUES ()").await;
            assert_eq!(number(&mut database.connection().await, "SELECT COUNT(*) FROM effects").await, 2 * turn);
        }
    }
}

/// Later writes of the application, which begins no transaction, would not be committed.
#[tokio::test]
async fn a_handler_that_turns_autocommit_off_harms_no_later_write() {
    let database = Database::new().await;
    let pool = MySqlPoolOptions::new().max_connections(2).connect_lazy(&database.url()).unwrap();
    let store = MySqlStore::open(MySqlConfig::from_pool(pool)).await.unwrap();
    sql(&mut database.connection().await, "CREATE TABLE effects (id INT AUTO_INCREMENT PRIMARY KEY)").await;
    let Begin::Acquired { mut transaction, .. } = store.begin(&request()).await.unwrap() else { panic!() };
    let connection = transaction.as_any_mut().downcast_mut::<MySqlTransaction>().unwrap();
    sql(connection, "INSERT INTO effects () VALUES (); SET SESSION autocommit = 0").await;
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    let mut all = [store.pool().acquire().await.unwrap(), store.pool().acquire().await.unwrap()];
    for connection in &mut all {
        sql(connection, "INSERT INTO effects () VALUES ()").await;
    }
    assert_eq!(number(&mut database.connection().await, "SELECT COUNT(*) FROM effects").await, 3);
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
    // Snapshot isolation is on by default from 11.6.2 on, and has a separate warning.
    let mut others = report.warnings.iter().filter(|warning| !warning.contains("innodb_snapshot_isolation"));
    assert!(others.next().is_some_and(|warning| warning.contains("not strict")), "{report}");
    assert_eq!(others.next(), None);
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
    let server = MariaDb::start_unsynced(&["--max-allowed-packet=1M"]).unwrap();
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

/// The settings of the server are not those of the store.
#[tokio::test]
async fn unusual_settings_of_the_server_change_nothing() {
    let options = [
        "--sql-mode=",
        "--transaction-isolation=SERIALIZABLE",
        "--character-set-server=latin1",
        "--autocommit=OFF",
        "--lower-case-table-names=1",
        "--log-bin",
        "--binlog-format=ROW",
        "--secure-timestamp=YES",
    ];
    let server = MariaDb::start_unsynced(&options).unwrap();
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
    let server = MariaDb::start_unsynced(&["--transaction-isolation=READ-UNCOMMITTED"]).unwrap();
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
    let server = MariaDb::start_unsynced(&["--log-bin", "--binlog-format=STATEMENT"]).unwrap();
    let error = match MySqlStore::open(MySqlConfig::new(server.url())).await {
        Ok(store) => store.acquire(&request()).await.map(drop).unwrap_err(),
        Err(error) => error,
    };
    assert!(error.to_string().contains("set it to MIXED or ROW"), "{error:?}");
    let mut root = MySqlConnection::connect(&server.url()).await.unwrap();
    sql(&mut root, "SET GLOBAL binlog_format = MIXED").await;
    MySqlStore::open(MySqlConfig::new(server.url())).await.unwrap().self_test().await.unwrap();
}
