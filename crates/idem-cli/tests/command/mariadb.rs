//! The program on MariaDB. `cargo xtask test-mysql` runs these tests.

use std::path::Path;

use idem_core::{AcquireOutcome, IdempotencyStore as _, StoredBody, StoredResponse, Takeover};
use idem_mysql::{MySqlConfig, MySqlStore};
use idem_servers::MariaDb;
use sqlx::{Connection as _, MySqlConnection};

use crate::tls::Certificates;
use crate::{HOUR, answer, complete, crash, idem, request};

#[tokio::test]
#[ignore = "needs MariaDB: cargo xtask test-mysql"]
async fn a_stuck_operation_is_found_resolved_replayed_and_erased() {
    let server = MariaDb::start().unwrap();
    let url = server.url();
    idem(&url, &["migrate"]).expect(0);
    let store = MySqlStore::open(MySqlConfig::new(&url)).await.unwrap();
    let done = complete(&store, "done", StoredResponse::new(201, "paid")).await;
    let stuck = crash(&store, "stuck", Takeover::Unknown).await;
    let id = stuck.id.to_string();
    assert!(idem(&url, &["stats"]).expect(0).stdout.contains("abandoned"));
    let listed = idem(&url, &["--json", "list", "--abandoned"]).expect(0).json();
    assert_eq!((listed.len(), listed[0]["id"].as_str()), (1, Some(&*id)));
    let seen = || idem(&url, &["--json", "show", &id]).expect(0).json()[0]["version"].as_str().unwrap().to_owned();
    let resolve = |how: &str, more: &[&str]| {
        let seen = seen();
        let given = ["resolve", &*id, "--as", how, "--reason", "the bank has it", "--seen", &*seen, "--yes"];
        idem(&url, &[&given[..], more].concat()).expect(0);
    };
    resolve("unknown", &[]);
    resolve("completed", &["--status", "201"]);
    let AcquireOutcome::Replay(replay) = answer(&store, &stuck).await else { panic!("it is replayed") };
    assert_eq!(replay.response.status, 201);
    assert_eq!(idem(&url, &["--json", "repairs"]).expect(0).json().len(), 2);
    let erase = ["erase", "--principal", "acme", "--no-front", "--reason", "GDPR-7", "--yes"];
    assert!(idem(&url, &erase).expect(0).stdout.contains("2 erased"));
    let AcquireOutcome::Replay(replay) = answer(&store, &done).await else { panic!("a tombstone") };
    assert!(!matches!(replay.response.body, StoredBody::Retained(_)), "{replay:?}");
    assert_eq!(idem(&url, &["purge"]).expect(0).stdout.trim(), "0 records removed");
    let parked = idem(&url, &["parked", "list", "--subscriber", "orders"]).expect(1).stderr;
    assert!(parked.contains("Postgres or SQLite"), "{parked}");
}

/// A store that was opened before keeps the identity that it has read.
#[tokio::test]
#[ignore = "needs MariaDB: cargo xtask test-mysql"]
async fn records_get_a_new_identity() {
    use idem_core::DurableStore as _;
    let server = MariaDb::start().unwrap();
    let url = server.url();
    let open = async || MySqlStore::open(MySqlConfig::new(&url)).await.unwrap();
    let (before, again) = (open().await, open().await);
    assert_eq!(before.identity(), again.identity());
    idem(&url, &["new-identity", "--reason", "restored", "--yes"]).expect(0);
    assert_ne!(open().await.identity(), before.identity());
    let kept = request("kept", Takeover::Rerun, HOUR);
    assert!(matches!(before.acquire(&kept).await.unwrap(), AcquireOutcome::Acquired(_)));
    assert!(idem(&url, &["new-identity", "--reason", "a failover", "--keep"]).expect(1).stderr.contains("no history"));
}

#[tokio::test]
#[ignore = "needs MariaDB: cargo xtask test-mysql"]
async fn mariadb_is_checked() {
    let server = MariaDb::start().unwrap();
    let check = |url: &str| idem(url, &["check"]);
    let unmigrated = check(&server.url()).expect(4).stdout;
    assert!(unmigrated.contains("unusable open") && unmigrated.contains("migrat"), "{unmigrated}");
    idem(&server.url(), &["migrate"]).expect(0);
    let good = check(&server.url()).expect(0).stdout;
    assert!(good.contains("MariaDB 10.") || good.contains("MariaDB 11."), "{good}");
    assert!(good.lines().all(|line| line.starts_with("ok ")), "{good}");
    let unsynced = MariaDb::start_with(&["--innodb-flush-log-at-trx-commit=2"]).unwrap();
    idem(&unsynced.url(), &["migrate"]).expect(0);
    let weak = check(&unsynced.url()).expect(3).stdout;
    assert!(weak.contains("weak     durability") && weak.contains("innodb_flush_log_at_trx_commit"), "{weak}");
    let replica = MariaDb::start_with(&["--read-only=ON"]).unwrap();
    let refused = check(&replica.url()).expect(4).stdout;
    assert!(refused.contains("unusable open") && refused.contains("read_only"), "{refused}");
}

/// The privileges are those of the README of idem-mysql.
#[tokio::test]
#[ignore = "needs MariaDB: cargo xtask test-mysql"]
async fn a_missing_privilege_is_named() {
    let server = MariaDb::start().unwrap();
    let mut root = MySqlConnection::connect(&server.url()).await.unwrap();
    // In the database `test` of a new server each user may do everything.
    sqlx::raw_sql("CREATE DATABASE shop").execute(&mut root).await.unwrap();
    idem(&server.url_of("root", "shop"), &["migrate"]).expect(0);
    let grants = "CREATE USER app@'%';
        GRANT SELECT, INSERT, UPDATE, DELETE ON shop.idem_records TO app@'%';
        GRANT SELECT, INSERT, UPDATE ON shop.idem_repairs TO app@'%';
        GRANT SELECT ON shop.idem_identity TO app@'%';
        GRANT SELECT ON shop.idem_migrations TO app@'%'";
    sqlx::raw_sql(grants).execute(&mut root).await.unwrap();
    let url = server.url_of("app", "shop");
    idem(&url, &["check"]).expect(0);
    let change = async |root: &mut MySqlConnection, sql: &str| {
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(root).await.unwrap();
    };
    for privilege in ["INSERT", "UPDATE", "DELETE"] {
        change(&mut root, &format!("REVOKE {privilege} ON shop.idem_records FROM app@'%'")).await;
        let refused = idem(&url, &["check"]).expect(4).stdout;
        let expected = format!("unusable privileges  this login lacks {privilege} on idem_records\n");
        assert!(refused.contains(&expected), "{refused}");
        change(&mut root, &format!("GRANT {privilege} ON shop.idem_records TO app@'%'")).await;
    }
    // An application does not need this one.
    change(&mut root, "REVOKE INSERT ON shop.idem_repairs FROM app@'%'").await;
    let weak = idem(&url, &["check"]).expect(3).stdout;
    assert!(
        weak.contains(
            "weak     privileges  this login lacks INSERT on idem_repairs; only tools of operators need that\n"
        ),
        "{weak}"
    );
}

#[test]
#[ignore = "needs MariaDB: cargo xtask test-mysql"]
fn mariadb_is_reached_by_tls_and_an_unknown_authority_is_named() {
    let (own, other) = (Certificates::new(), Certificates::new());
    let option = |name: &str, path: &Path| format!("--{name}={}", path.display());
    let [ca, cert, key] =
        [("ssl-ca", &own.authority), ("ssl-cert", &own.certificate), ("ssl-key", &own.key)].map(|(n, p)| option(n, p));
    let server = MariaDb::start_with(&["--require-secure-transport=ON", &ca, &cert, &key]).unwrap();
    let by = |mode: &str| format!("{}?ssl-mode={mode}", server.url());
    let open = Certificates::check(&by("DISABLED"), &own.authority);
    assert!(open.code != 0 && open.text().contains("Access denied"), "{}", open.text());
    let url = by("VERIFY_IDENTITY");
    let unmigrated = Certificates::check(&url, &own.authority).expect(4);
    assert!(unmigrated.stdout.contains("migrat"), "{}", unmigrated.stdout);
    Certificates::check(&format!("{url}&ssl-ca={}", own.authority.display()), &other.authority).expect(4);
    let refused = Certificates::check(&url, &other.authority);
    assert!(refused.code != 0 && refused.text().contains("UnknownIssuer"), "{}", refused.text());
    // Another name than that of the certificate.
    let other_name = Certificates::check(&url.replace("127.0.0.1", "localhost"), &own.authority);
    assert!(other_name.code != 0 && other_name.text().contains("not valid for name"), "{}", other_name.text());
}
