//! The commands around the records: parked messages, identities, aliases, and what is printed for other programs.

use std::io::{BufRead as _, BufReader};
use std::num::NonZeroU32;
use std::process::{Command, Stdio};

use idem_core::{AcquireOutcome, DurableStore as _, RecordIdentity, Scope, StoreErrorKind, StoredResponse, Takeover};
use idem_inbox::{Message, ParkReason, Parking, PostgresParking, SqliteParking};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_schemas::Schema;
use idem_servers::Postgres;
use idem_sqlite::{SqliteConfig, SqliteStore};
use sqlx::Connection as _;

use crate::{File, answer, complete, crash, idem};

/// Parks two messages, and replays the second one by the command.
async fn replay(parking: &dyn Parking, url: &str, options: &[&str]) {
    for id in ["first", "sec\u{1b}ond"] {
        parking.park("ledger", &Message::new(id, "payments", "poison"), "not JSON").await.unwrap();
    }
    let run = |arguments: &[&str]| idem(url, &[options, &["parked"], arguments].concat());
    let listed = run(&["list", "--subscriber", "ledger"]).expect(0).stdout;
    assert!(listed.lines().count() == 2 && listed.contains("not JSON") && !listed.contains('\u{1b}'), "{listed}");
    assert_eq!(run(&["list", "--subscriber", "ledger", "--limit", "1"]).expect(0).stdout.lines().count(), 1);
    assert!(run(&["list", "--subscriber", "other"]).expect(0).stderr.contains("no message"));
    let id = "sec\u{1b}ond";
    let planned = run(&["replay", "--subscriber", "ledger", id, "--dry-run"]).expect(0).stdout;
    assert!(planned.contains("1 parked, 0 replays requested"), "{planned}");
    // Without a reason, or with neither a terminal nor --yes, no replay is requested.
    for incomplete in [&["--yes"][..], &["--yes", "--reason", " "], &["--reason", "INC-1"]] {
        let refused = run(&[&["replay", "--subscriber", "ledger", id], incomplete].concat());
        assert_ne!(refused.code, 0, "{incomplete:?}: {}", refused.stdout);
    }
    assert!(parking.list("ledger", true, None, NonZeroU32::MAX).await.unwrap().is_empty());
    let why = ["--reason", "INC-1: the parser is repaired", "--actor", "ann", "--yes"];
    let missing = run(&[&["replay", "--subscriber", "ledger", id, "third"], &why[..]].concat()).expect(5);
    assert!(missing.stdout.contains("1 replays requested"), "{}", missing.stdout);
    assert!(missing.stderr.contains("not parked: third"), "{}", missing.stderr);
    let requested = parking.list("ledger", true, None, NonZeroU32::MAX).await.unwrap();
    assert_eq!(requested.iter().map(|parked| &*parked.message.id).collect::<Vec<_>>(), [id]);
    let unknown = ParkReason::OutcomeUnknown.to_string();
    parking.park("ledger", &Message::new("unknown", "payments", "12 EUR"), &unknown).await.unwrap();
    let all = run(&[&["--json", "replay", "--subscriber", "ledger", "--all"], &why[..]].concat()).expect(0);
    assert!(all.stderr.contains("outcome is unknown: 1"), "{}", all.stderr);
    let all = all.json();
    assert_eq!((&all[2]["found"], &all[2]["requested"]), (&2.into(), &1.into()), "one was requested before");
    run(&[&["replay", "--subscriber", "ledger", "unknown"], &why[..]].concat()).expect(0);
    let notes = idem(url, &[options, &["repairs"]].concat()).expect(0).stdout;
    let noted =
        notes.lines().filter(|line| line.contains("  replayed  requested  by ann: INC-1: the parser is repaired"));
    assert_eq!(noted.count(), 3, "{notes}");
    let record = RecordIdentity::new("").record_id(&Scope::single_tenant("inbox:ledger"), &"unknown".parse().unwrap());
    assert!(notes.contains(&record.to_string()), "{notes}");
}

/// A newer version wrote the row of the message that is listed first.
fn a_damaged_row_hides_no_other(url: &str, options: &[&str]) {
    let run = |arguments: &[&str]| idem(url, &[options, &["parked"], arguments].concat());
    let listed = run(&["list", "--subscriber", "ledger", "--limit", "1"]).expect(0).stdout;
    assert_eq!(listed.lines().count(), 1, "{listed}");
}

#[tokio::test]
async fn parked_messages_are_listed_and_replayed() {
    let file = File::new().await;
    let missing = idem(&file.url, &["parked", "list", "--subscriber", "ledger"]).expect(1);
    assert!(missing.stderr.contains("no table idem_inbox"), "{}", missing.stderr);
    let parking = SqliteParking::open(sqlx::SqlitePool::connect(&file.url).await.unwrap()).await.unwrap();
    replay(&parking, &file.url, &[]).await;
    let damage =
        "UPDATE idem_inbox SET envelope = '{' WHERE key = (SELECT key FROM idem_inbox ORDER BY parked_at, key LIMIT 1)";
    sqlx::raw_sql(damage).execute(&sqlx::SqlitePool::connect(&file.url).await.unwrap()).await.unwrap();
    a_damaged_row_hides_no_other(&file.url, &[]);
    // Another command requests the replay, or a consumer has handled the message, since it was listed.
    let taken = "CREATE TRIGGER taken BEFORE UPDATE ON idem_inbox BEGIN SELECT RAISE(IGNORE); END";
    sqlx::raw_sql(taken).execute(&sqlx::SqlitePool::connect(&file.url).await.unwrap()).await.unwrap();
    parking.park("ledger", &Message::new("third", "payments", "poison"), "not JSON").await.unwrap();
    let why = ["--reason", "INC-2", "--yes"];
    let gone =
        idem(&file.url, &[&["parked", "replay", "--subscriber", "ledger", "third"], &why[..]].concat()).expect(5);
    assert!(gone.stdout.contains("0 parked, 0 replays requested"), "{}", gone.stdout);
    assert!(gone.stderr.contains("not parked any more, or requested by another command: third"), "{}", gone.stderr);
    let (schema, url) = (Schema::new(), idem_servers::postgres_url());
    let options = ["--schema", &*schema.name];
    let missing = idem(&url, &[&options[..], &["parked", "list", "--subscriber", "ledger"]].concat()).expect(1);
    assert!(missing.stderr.contains("no table idem_inbox"), "{}", missing.stderr);
    let parking = PostgresParking::open(sqlx::PgPool::connect(&url).await.unwrap(), &schema.name).await.unwrap();
    // The records may be in another store.
    parking.park("audit", &Message::new("first", "payments", "poison"), "not JSON").await.unwrap();
    let alone = |further: &[&str]| {
        let replay = ["parked", "replay", "--subscriber", "audit", "first", "--reason", "INC-3", "--yes"];
        idem(&url, &[&options[..], &replay, further].concat())
    };
    assert!(alone(&[]).expect(1).stderr.contains("--without-note"));
    assert!(alone(&["--without-note"]).expect(0).stdout.contains("1 replays requested"));
    PostgresStore::open(PostgresConfig::new(&url).schema(&*schema.name)).await.unwrap();
    replay(&parking, &url, &options).await;
    let damage = format!(
        "UPDATE \"{0}\".idem_inbox SET envelope = '{{' WHERE key = (SELECT key FROM \"{0}\".idem_inbox ORDER BY parked_at, key LIMIT 1)",
        schema.name
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(damage)).execute(&sqlx::PgPool::connect(&url).await.unwrap()).await.unwrap();
    a_damaged_row_hides_no_other(&url, &options);
    let redis = idem("redis://127.0.0.1:1", &["parked", "list", "--subscriber", "ledger"]).expect(1);
    assert!(redis.stderr.contains("Postgres or SQLite"), "{}", redis.stderr);
}

#[tokio::test]
async fn a_new_identity_is_given_when_all_processes_have_stopped() {
    let file = File::new().await;
    let identity = async || SqliteStore::open(SqliteConfig::new(&file.url)).await.unwrap().identity();
    let before = identity().await;
    assert_ne!(idem(&file.url, &["new-identity", "--yes"]).code, 0, "it has no reason");
    assert!(idem(&file.url, &["new-identity", "--reason", "restored"]).expect(1).stderr.contains("--yes"));
    idem(&file.url, &["new-identity", "--reason", "a failover", "--keep"]).expect(1);
    assert_eq!(identity().await, before);
    idem(&file.url, &["new-identity", "--reason", "restored", "--yes"]).expect(0);
    assert_ne!(identity().await, before);

    let server = Postgres::start().unwrap();
    let url = server.url();
    let store = PostgresStore::open(PostgresConfig::new(&url)).await.unwrap();
    let before = store.identity();
    let busy = idem(&url, &["new-identity", "--reason", "restored", "--yes"]).expect(1);
    assert!(busy.stderr.contains("other sessions use this database (idem)"), "{}", busy.stderr);
    assert_eq!(PostgresStore::open(PostgresConfig::new(&url)).await.unwrap().identity(), before);
    let psql = |sql: &str| {
        let ran = Command::new("psql").args([&*url, "-qtAc", sql]).output().unwrap();
        assert!(ran.status.success(), "{sql}");
        String::from_utf8(ran.stdout).unwrap().trim().to_owned()
    };
    // A role that may not see what others do, and a URL with the name of the application.
    psql(
        "CREATE ROLE operator LOGIN; GRANT USAGE ON SCHEMA idem TO operator; GRANT ALL ON ALL TABLES IN SCHEMA idem TO operator",
    );
    let operator = url.replacen("://postgres@", "://operator@", 1);
    for url in [operator.clone(), format!("{url}?application_name=idem")] {
        let busy = idem(&url, &["new-identity", "--reason", "restored", "--yes"]).expect(1);
        assert!(busy.stderr.contains("other sessions use this database (idem)"), "{}", busy.stderr);
    }
    drop(store);
    while psql("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'idem'") != "0" {
        tokio::task::yield_now().await;
    }
    // The first check remembers the server, and a recovery to a point in time begins a new timeline.
    let check = || idem(&url, &["check"]);
    assert!(check().expect(0).stdout.contains("history     remembered: "));
    assert!(check().expect(0).stdout.contains("the server is the one of the last check"));
    let changed = "UPDATE idem.idem_identity SET history = split_part(history, '/', 1) || '/0'";
    psql(changed);
    let found = check().expect(3).stdout;
    assert!(
        found.contains("weak     history") && found.contains("/0 is ") && found.contains("new-identity"),
        "{found}"
    );
    let identity = || psql("SELECT identity FROM idem.idem_identity");
    let before = identity();
    idem(&url, &["new-identity", "--reason", "a failover", "--keep"]).expect(0);
    check().expect(0);
    assert_eq!(identity(), before);
    psql(changed);
    idem(&url, &["new-identity", "--reason", "restored", "--yes"]).expect(0);
    assert_ne!(identity(), before);
    let notes = idem(&url, &["repairs"]).expect(0).stdout;
    for noted in ["  new identity  failed  by ", "  identity kept  done  by ", "  new identity  done  by "] {
        assert!(notes.contains(noted), "{notes}");
    }
    check().expect(0);
    // What cannot be found out is no success.
    psql("REVOKE EXECUTE ON FUNCTION pg_control_checkpoint() FROM PUBLIC");
    let unknown = idem(&operator, &["check"]).expect(3).stdout;
    assert!(unknown.contains("unknown  history"), "{unknown}");
    let redis = idem(&idem_servers::redis_url(), &["new-identity", "--reason", "restored", "--yes"]).expect(1);
    assert!(redis.stderr.contains("have no identity"), "{}", redis.stderr);
}

/// The count of other sessions and the new identity are one step: who comes in between waits for it, or is counted.
#[tokio::test]
async fn a_process_that_starts_while_an_identity_is_given_is_seen() {
    let server = Postgres::start().unwrap();
    let url = |name: &str| format!("{}?application_name={name}", server.url());
    let store = PostgresStore::open(PostgresConfig::new(url("operator"))).await.unwrap();
    let connect = async |name: &str| sqlx::PgConnection::connect(&url(name)).await.unwrap();
    // Sessions with the name of the store's are not counted.
    let (mut reader, mut watch) = (connect("operator").await, connect("operator").await);
    sqlx::raw_sql("BEGIN; SELECT * FROM idem.idem_identity").execute(&mut reader).await.unwrap();
    let renewing = tokio::spawn({
        let store = store.clone();
        async move { store.renew_identity().await }
    });
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    while sqlx::query_scalar::<_, i64>(waiting).fetch_one(&mut watch).await.unwrap() == 0 {
        assert!(!renewing.is_finished(), "it does not wait for those that read the identity");
        tokio::task::yield_now().await;
    }
    let process = connect("payments").await;
    sqlx::raw_sql("COMMIT").execute(&mut reader).await.unwrap();
    let error = renewing.await.unwrap().unwrap_err();
    assert!(error.kind() == StoreErrorKind::Busy && error.to_string().contains("(payments)"), "{error}");
    let identity = async || PostgresStore::open(PostgresConfig::new(url("operator"))).await.unwrap().identity();
    assert_eq!(identity().await, store.identity());
    process.close().await.unwrap();
    let others = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'payments'";
    while sqlx::query_scalar::<_, i64>(others).fetch_one(&mut watch).await.unwrap() > 0 {
        tokio::task::yield_now().await;
    }
    store.renew_identity().await.unwrap();
    assert_ne!(identity().await, store.identity());
}

#[tokio::test]
async fn release_and_settle_are_resolutions() {
    let file = File::new().await;
    let records =
        [crash(&file.store, "retried", Takeover::Unknown).await, crash(&file.store, "paid", Takeover::Unknown).await];
    let done = |request: &idem_core::Acquire, command: &[&str], code: i32| {
        let id = request.id.to_string();
        let shown = idem(&file.url, &["--json", "show", &id]).expect(0).json();
        let seen = shown[0]["version"].as_str().unwrap().to_owned();
        idem(&file.url, &[command, &[&*id, "--reason", "r", "--seen", &seen, "--yes"]].concat()).expect(code)
    };
    for request in &records {
        let unfenced = done(request, &["release"], 5);
        assert!(unfenced.stdout.contains("Mark it as unknown first"), "{}", unfenced.stdout);
        done(request, &["resolve", "--as", "unknown"], 0);
    }
    done(&records[0], &["release", "--retry-after", "0s"], 0);
    done(&records[1], &["settle", "--as", "completed", "--status", "201"], 0);
    let again = idem_core::Acquire { max_attempts: NonZeroU32::MAX, ..records[0].clone() };
    let AcquireOutcome::Acquired(lease) = answer(&file.store, &again).await else { panic!("it runs again") };
    assert_eq!(lease.attempt, 2);
    let AcquireOutcome::Replay(replay) = answer(&file.store, &records[1]).await else { panic!("it is settled") };
    assert_eq!(replay.response, StoredResponse::new(201, ""));
    assert!(idem(&file.url, &["settle", "--as", "unknown"]).expect(2).stderr.contains("completed"));
}

#[tokio::test]
async fn watch_prints_what_has_changed_and_ends_by_ctrl_c() {
    let file = File::new().await;
    complete(&file.store, "first", StoredResponse::new(201, "")).await;
    let mut command = Command::new(env!("CARGO_BIN_EXE_idem"));
    command.args(["--store", &file.url, "watch", "--every", "1s"]).stdout(Stdio::piped());
    let mut process = command.spawn().unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let first = lines.next().unwrap().unwrap();
    assert!(first.contains("completed 1  "), "{first}");
    complete(&file.store, "second", StoredResponse::new(201, "")).await;
    let changed = lines.find_map(|line| line.ok().filter(|line| line.contains("completed 2")));
    assert!(changed.as_ref().is_some_and(|line| line.contains("completed 2 (+1)")), "{changed:?}");
    assert!(Command::new("kill").args(["-INT", &process.id().to_string()]).status().unwrap().success());
    assert_eq!(process.wait().unwrap().code(), Some(0));
}

#[test]
fn completions_and_pages_for_man_are_printed_without_a_store() {
    let run = |arguments: &[&str]| {
        let ran = Command::new(env!("CARGO_BIN_EXE_idem")).args(arguments).env_remove("IDEM_STORE").output().unwrap();
        (ran.status.code(), String::from_utf8(ran.stdout).unwrap())
    };
    for shell in ["bash", "zsh", "fish"] {
        let (code, script) = run(&["completions", shell]);
        assert!(code == Some(0) && script.contains("new-identity"), "{script}");
    }
    let (code, page) = run(&["man"]);
    assert!(code == Some(0) && page.contains(".TH idem 1") && page.contains("Exit codes"), "{page}");
    let (code, page) = run(&["man", "erase"]);
    assert!(code == Some(0) && page.contains("principal"), "{page}");
    assert_eq!(run(&["man", "nothing"]).0, Some(1));
}
