//! The program `idem`, started as a process, on real stores.
#![expect(clippy::unwrap_used, reason = "a test says what it expects by failing")]

mod encrypted;
mod erasing;
mod mariadb;
mod operating;
mod tls;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::num::NonZeroU32;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use idem_core::{
    Acquire, AcquireOutcome, Fingerprint, IdempotencyStore, Inspect, OnMismatch, Origin, OwnerToken, RecordCounts,
    RecordId, RecordIdentity, Scope, Settlement, StoredResponse, Takeover, Term,
};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_schemas::Schema;
use idem_servers::{Postgres, PostgresPair, Redis};
use idem_sqlite::{SqliteConfig, SqliteStore};
use serde_json::Value;
use tempfile::TempDir;

const HOUR: Duration = Duration::from_secs(3600);

/// What the program printed, and its exit code.
struct Ran {
    code: i32,
    stdout: String,
    stderr: String,
}

fn idem(store: &str, arguments: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_idem"));
    ran(command.args(["--store", store]).args(arguments).env("USER", "tester"))
}

fn ran(command: &mut Command) -> Ran {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ran { code: status.code().unwrap(), stdout: text(stdout), stderr: text(stderr) }
}

impl Ran {
    /// All that it printed.
    fn text(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }

    #[track_caller]
    fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{}\n{}", self.stdout, self.stderr);
        self
    }

    /// Its lines, each a JSON document.
    fn json(&self) -> Vec<Value> {
        self.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// A store in a file, with the URL that the program gets.
struct File {
    store: SqliteStore,
    url: String,
    _folder: TempDir,
}

impl File {
    async fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let url = format!("sqlite://{}", folder.path().join("records.db").display());
        let store = SqliteStore::open(SqliteConfig::new(&url)).await.unwrap();
        Self { store, url, _folder: folder }
    }

    /// A folder for other files.
    fn folder(&self) -> &std::path::Path {
        self._folder.path()
    }
}

fn scope() -> Scope {
    Scope::new("acme", "POST /v1/payments")
}

fn request(key: &str, takeover: Takeover, lease: Duration) -> Acquire {
    let scope = scope();
    Acquire {
        id: RecordIdentity::new("shop").record_id(&scope, &key.parse().unwrap()),
        origin: Origin { namespace: "shop".into(), scope },
        trace: None,
        fingerprint: Fingerprint::of_bytes("pay", key.as_bytes()),
        owner: OwnerToken::random(),
        term: Term { lease, retention: HOUR },
        takeover,
        max_attempts: NonZeroU32::MIN,
        on_mismatch: OnMismatch::Refuse,
    }
}

/// Leaves an operation in progress as a crashed process does, and waits for the end of its short lease.
async fn crash<S: IdempotencyStore + Inspect>(store: &S, key: &str, takeover: Takeover) -> Acquire {
    let request = request(key, takeover, Duration::from_millis(1));
    assert!(matches!(store.acquire(&request).await.unwrap(), AcquireOutcome::Acquired(_)));
    while counted(store).await.in_progress > 0 {
        tokio::task::yield_now().await;
    }
    request
}

/// The counts of all records, which are few.
async fn counted(store: &impl Inspect) -> RecordCounts {
    store.count(None, NonZeroU32::MAX).await.unwrap().counts
}

async fn complete(store: &dyn IdempotencyStore, key: &str, response: StoredResponse) -> Acquire {
    let request = request(key, Takeover::Rerun, HOUR);
    let AcquireOutcome::Acquired(lease) = store.acquire(&request).await.unwrap() else { panic!("new") };
    store.settle(&lease, &Settlement::Completed(response), HOUR).await.unwrap();
    request
}

async fn answer(store: &dyn IdempotencyStore, request: &Acquire) -> AcquireOutcome {
    store.acquire(&Acquire { owner: OwnerToken::random(), ..request.clone() }).await.unwrap()
}

#[tokio::test]
async fn a_stuck_operation_is_found_explained_resolved_and_replayed() {
    let file = File::new().await;
    complete(&file.store, "done", StoredResponse::new(201, "paid")).await;
    let stuck = crash(&file.store, "stuck", Takeover::Unknown).await;
    let id = stuck.id.to_string();
    let listed = idem(&file.url, &["--json", "list", "--abandoned"]).expect(0).json();
    assert_eq!(listed.len(), 1);
    assert_eq!((&listed[0]["id"], &listed[0]["takeover"]), (&Value::from(&*id), &Value::from("unknown")));
    let by_key =
        ["show", "--namespace", "shop", "--principal", "acme", "--operation", "POST /v1/payments", "--key", "stuck"];
    let shown = idem(&file.url, &by_key).expect(0).stdout;
    assert!(shown.contains(&id) && shown.contains("crashed or stalled"), "{shown}");
    let with_key = |key: &'static str| [&by_key[..7], &["--key", key]].concat();
    assert!(idem(&file.url, &with_key("\"stuck\"")).expect(0).stdout.contains(&id), "as the header field has it");
    let other = idem(&file.url, &with_key("other")).expect(5).stderr;
    assert!(other.contains("was made of this key, namespace, principal, operation and secret"), "{other}");
    idem(&file.url, &["show", &id, "--principal", "acme"]).expect(2);
    let version = |ran: &Ran| ran.json()[0]["version"].as_str().unwrap().to_owned();
    let show = || idem(&file.url, &["--json", "show", &id]).expect(0);
    let seen = version(&show());
    let body = file._folder.path().join("body");
    std::fs::write(&body, "{\"paid\":true}").unwrap();
    let resolve = |how: &str, seen: &str| {
        let given = ["resolve", &id, "--as", how, "--reason", "the bank has it", "--seen", seen, "--yes"];
        let mut arguments = given.to_vec();
        match how {
            "unknown" => {}
            "failed" => arguments.extend(["--status", "402"]),
            _ => arguments.extend([
                "--status",
                "201",
                "--header",
                "Content-Type: application/json",
                "--body-file",
                body.to_str().unwrap(),
            ]),
        }
        idem(&file.url, &arguments)
    };
    // The process may only have stalled, so it is kept from settling first.
    let unfenced = resolve("completed", &seen).expect(5);
    assert!(unfenced.stdout.contains("Mark it as unknown first"), "{}", unfenced.stdout);
    let planned = idem(&file.url, &["resolve", &id, "--as", "unknown", "--reason", "r", "--dry-run"]).expect(0).stdout;
    assert!(planned.contains("it would be resolved") && planned.contains("crashed or stalled"), "{planned}");
    resolve("unknown", &seen).expect(0);
    let outdated = resolve("completed", &seen).expect(5);
    assert!(outdated.stdout.contains("look again"), "{}", outdated.stdout);
    resolve("completed", &version(&show())).expect(0);
    let AcquireOutcome::Replay(replay) = answer(&file.store, &stuck).await else { panic!("it is replayed") };
    assert_eq!((replay.response.status, &replay.response.headers[0].name[..]), (201, &b"content-type"[..]));
    assert_eq!(replay.response.body, StoredResponse::new(201, "{\"paid\":true}").body);
    resolve("failed", &version(&show())).expect(5);
    let repairs = idem(&file.url, &["--json", "repairs"]).expect(0).json();
    let outcomes: Vec<_> = repairs.iter().map(|repair| repair["outcome"].as_str().unwrap()).collect();
    assert_eq!(
        outcomes,
        [
            "refused: final",
            "resolved",
            "changed meanwhile, or resolved by an earlier try",
            "resolved",
            "refused: not unknown yet"
        ]
    );
    assert_eq!((&repairs[0]["actor"], &repairs[0]["reason"]), (&"tester".into(), &"the bank has it".into()));
    assert!(idem(&file.url, &["repairs"]).expect(0).stdout.contains("by tester: the bank has it"));
}

#[tokio::test]
async fn what_is_refused_changes_nothing() {
    let file = File::new().await;
    let stuck = crash(&file.store, "stuck", Takeover::Unknown).await;
    let id = stuck.id.to_string();
    let version = file.store.peek(&stuck.id).await.unwrap().unwrap().version().to_string();
    let resolve = |id: &str, more: &[&str]| [&["resolve", id, "--reason", "r"], more].concat().join(" ");
    let seen = format!("--seen {version} --yes");
    for (arguments, code, advice) in [
        (resolve(&id, &["--as", "unknown", "--reason="]), 2, "--reason"),
        (format!("resolve {id} --as unknown --reason= {seen}"), 1, "--reason is empty"),
        (format!("resolve {id} --as unknown"), 2, "--reason"),
        (resolve(&id, &["--as", "unknown"]), 1, "--yes"),
        (resolve(&id, &["--as", "unknown", "--yes"]), 2, "--seen"),
        (resolve(&id, &["--as", "unknown", "--seen", "1", "--yes"]), 2, "32 lower-case"),
        (resolve("abc", &["--as", "unknown", &seen]), 1, "64 hexadecimal"),
        (resolve(&id, &["--as", "unknown", "--status", "504", &seen]), 1, "leave out"),
        (resolve(&id, &["--as", "unknown", "--body-file", "/no", &seen]), 1, "give --status"),
        (resolve(&id, &["--as", "unknown", "--retry-after", "1s", &seen]), 1, "may run again"),
        (resolve(&id, &["--as", "failed", &seen]), 1, "needs a status"),
        (resolve(&id, &["--as", "failed", "--status", "200", &seen]), 1, "from 400 on"),
        (resolve(&id, &["--as", "retryable", "--status", "201", &seen]), 1, "from 400 on"),
        (resolve(&id, &["--as", "completed", "--status", "99", &seen]), 1, "200 to 599"),
        (resolve(&id, &["--as", "failed", "--status", "402", "--header", "a", &seen]), 1, "name: value"),
        (
            resolve(&id, &["--as", "failed", "--status", "402", "--header", "Content-Length:9", &seen]),
            1,
            "`content-length`",
        ),
        (resolve(&id, &["--as", "failed", "--status", "402", "--body-file", "/no", &seen]), 1, "/no"),
        (resolve(&id, &["--as", "failed", "--status", "402", "--dry-run"]), 5, ""),
        (resolve(&id, &["--as", "unknown", "--dry-run"]), 0, ""),
        (resolve(&id, &["--json", "--as", "unknown"]), 1, "--json does not ask"),
        ("show abc".to_owned(), 1, "64 hexadecimal"),
        ("show".to_owned(), 2, "<ID>"),
        ("list --state gone".to_owned(), 2, "outcome-unknown"),
        ("list --older-than soon".to_owned(), 2, "--older-than"),
    ] {
        let words: Vec<&str> = arguments.split(' ').collect();
        let ran = idem(&file.url, &words).expect(code);
        assert!(ran.stderr.contains(advice), "{arguments}: {}", ran.stderr);
    }
    let missing = "0".repeat(64);
    idem(&file.url, &["show", &missing]).expect(5);
    idem(&file.url, &["resolve", &missing, "--as", "unknown", "--reason", "r", "--seen", &version, "--yes"]).expect(5);
    assert_eq!(file.store.peek(&stuck.id).await.unwrap().unwrap().version().to_string(), version);
    assert_eq!(idem(&file.url, &["--json", "repairs"]).expect(0).json().len(), 0);
}

#[tokio::test]
async fn stored_answers_are_shown_only_when_asked_for_and_control_characters_never() {
    let file = File::new().await;
    let origin = Origin { namespace: "shop".into(), scope: Scope::new("a\u{1b}[2Jb\u{9b}", "pay\nnow\u{202e}") };
    let request = Acquire { origin, ..request("k", Takeover::Rerun, HOUR) };
    let AcquireOutcome::Acquired(lease) = file.store.acquire(&request).await.unwrap() else { panic!("new") };
    let response = StoredResponse::new(201, "secret\u{1b}[2J");
    file.store.settle(&lease, &Settlement::Completed(response), HOUR).await.unwrap();
    let id = request.id.to_string();
    for (arguments, has_secret) in [
        (vec!["show", &*id], false),
        (vec!["show", &*id, "--answer"], true),
        (vec!["--json", "show", &*id], false),
        (vec!["list"], false),
        (vec!["--json", "list"], false),
    ] {
        let shown = idem(&file.url, &arguments).expect(0).stdout;
        assert_eq!(shown.contains("secret"), has_secret, "{arguments:?}: {shown}");
        assert!(!shown.contains(['\u{1b}', '\u{9b}', '\u{202e}']), "{arguments:?}: {shown}");
    }
}

#[tokio::test]
async fn records_are_counted_listed_swept_and_purged() {
    let file = File::new().await;
    for number in 0..3 {
        complete(&file.store, &format!("done-{number}"), StoredResponse::new(201, "four")).await;
        crash(&file.store, &format!("unknown-{number}"), Takeover::Unknown).await;
    }
    let rerun = crash(&file.store, "rerun", Takeover::Rerun).await;
    let counts = idem(&file.url, &["--json", "stats"]).expect(0).json();
    assert_eq!((&counts[0]["completed"], &counts[0]["abandoned"]), (&3.into(), &4.into()));
    assert_eq!(counts[0]["body_bytes"], 12);
    assert_eq!((&counts[0]["made_last_hour"], &counts[0]["unsuccessful_last_hour"]), (&7.into(), &4.into()));
    let counts = idem(&file.url, &["stats"]).expect(0).stdout;
    assert!(counts.contains("the oldest record in progress was made"), "{counts}");
    assert!(counts.contains("made in an hour              7  4 of them without success so far"), "{counts}");
    let few = idem(&file.url, &["list", "--limit", "2"]).expect(0);
    assert_eq!((few.stdout.lines().count(), few.stderr.contains("--limit")), (2, true));
    assert_eq!(idem(&file.url, &["list", "--principal", "acme"]).expect(0).stdout.lines().count(), 7);
    let answer_in =
        |trace: &str| StoredResponse { trace: Some(trace.parse().unwrap()), ..StoredResponse::new(201, "") };
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let parent = format!("00-{trace}-00f067aa0ba902b7-01");
    complete(&file.store, "traced", answer_in(&parent)).await;
    let traced = idem(&file.url, &["--json", "list", "--trace", trace]).expect(0).json();
    assert_eq!((traced.len(), &traced[0]["trace"]), (1, &parent.into()));
    assert!(
        idem(&file.url, &["list", "--trace", "4bf9"]).expect(2).stderr.contains("32 lower-case hexadecimal digits")
    );
    let none = idem(&file.url, &["list", "--principal", "other"]).expect(0);
    assert_eq!((none.stdout.as_str(), none.stderr.contains("8 were read")), ("", true));
    let swept = idem(&file.url, &["--json", "sweep", "--dry-run"]).expect(0).json();
    assert_eq!((&swept[0]["abandoned_at_most_once"], &swept[0]["swept"]), (&3.into(), &0.into()));
    let swept = idem(&file.url, &["--json", "sweep"]).expect(0).json();
    assert_eq!((&swept[0]["swept"], &swept[0]["left_to_their_next_caller"]), (&3.into(), &1.into()));
    assert_eq!(idem(&file.url, &["list", "--state", "outcome-unknown"]).expect(0).stdout.lines().count(), 3);
    assert!(matches!(answer(&file.store, &rerun).await, AcquireOutcome::Acquired(_)), "it runs again");
    // Nothing has expired yet.
    assert_eq!(idem(&file.url, &["purge"]).expect(0).stdout.trim(), "0 records removed");
    for number in 0..3 {
        let request = request(&format!("short-{number}"), Takeover::Rerun, HOUR);
        let AcquireOutcome::Acquired(lease) = file.store.acquire(&request).await.unwrap() else { panic!("new") };
        file.store
            .settle(&lease, &Settlement::Completed(StoredResponse::new(200, "")), Duration::from_millis(1))
            .await
            .unwrap();
    }
    while counted(&file.store).await.expired < 3 {
        tokio::task::yield_now().await;
    }
    assert_eq!(idem(&file.url, &["purge", "--limit", "2"]).expect(0).stdout.trim(), "2 records removed");
    assert_eq!(idem(&file.url, &["purge"]).expect(0).stdout.trim(), "1 records removed");
}

#[tokio::test]
async fn postgres_is_checked() {
    let check = |url: &str, more: &[&str]| idem(url, &[&["check"], more].concat());
    let server = Postgres::start().unwrap();
    let unmigrated = check(&server.url(), &[]).expect(4);
    assert!(
        unmigrated.stdout.contains("unusable open") && unmigrated.stdout.contains("migrat"),
        "{}",
        unmigrated.stdout
    );
    idem(&server.url(), &["migrate"]).expect(0);
    let good = check(&server.url(), &[]).expect(0);
    assert!(good.stdout.contains("PostgreSQL") && good.stdout.contains("clock"), "{}", good.stdout);
    assert!(good.stdout.lines().all(|line| line.starts_with("ok ")), "{}", good.stdout);
    let sql = |text: &str| {
        let mut psql = Command::new("psql");
        assert!(psql.args([&*server.url(), "-qc", text]).status().unwrap().success(), "{text}");
    };
    let asynchronous = format!("{}?options=-csynchronous_commit=off", server.url());
    let weak = check(&asynchronous, &[]).expect(3);
    assert!(weak.stdout.contains("weak     durability  fsync=on"), "{}", weak.stdout);
    let pair = PostgresPair::start_with(&[]).unwrap();
    let url = |port: u16| format!("postgres://postgres@127.0.0.1:{port}/postgres");
    PostgresStore::open(PostgresConfig::new(url(pair.primary_port()))).await.unwrap();
    let standby = check(&url(pair.standby_port().unwrap()), &[]).expect(4);
    assert!(standby.stdout.contains("unusable open        this server is a replica"), "{}", standby.stdout);
    sql("DELETE FROM idem.idem_migrations WHERE version = 2");
    let older = check(&server.url(), &[]).expect(4);
    assert!(older.stdout.contains("version 2 is needed; apply the migrations"), "{}", older.stdout);
    sql("INSERT INTO idem.idem_migrations VALUES (2, 'verbs')");
    sql("CREATE ROLE outsider LOGIN");
    let outsider = server.url().replace("postgres@", "outsider@");
    assert_ne!(outsider, server.url());
    let refused = check(&outsider, &[]).expect(4);
    assert!(refused.stdout.contains("permission") || refused.stdout.contains("privilege"), "{}", refused.stdout);
    // Its privileges on the records were lost, as when they moved to other tables.
    sql("GRANT USAGE ON SCHEMA idem TO outsider; GRANT SELECT ON idem.idem_migrations, idem.idem_identity TO outsider");
    let poor = check(&outsider, &[]).expect(4);
    let starts = ["ok       open", "unusable privileges", "unusable self-test", "weak     repairs", "unusable clock"];
    for (line, start) in poor.stdout.lines().zip(starts) {
        let is_told = ["ok", "unusable privileges"].iter().any(|known| start.starts_with(known));
        assert!(line.starts_with(start) && (is_told || line.contains("permission denied")), "{line}");
    }
    assert_eq!(poor.stdout.lines().count(), starts.len(), "{}", poor.stdout);
    let all = ["SELECT", "INSERT", "UPDATE", "DELETE"].map(|privilege| format!("{privilege} on idem_records"));
    assert!(poor.stdout.contains(&format!("lacks {}", all.join(", "))), "{}", poor.stdout);
    // As SECURITY.md advises for an application, which does not need the notes of repairs. Then one is missing.
    sql("GRANT SELECT, INSERT, UPDATE, DELETE ON idem.idem_records TO outsider");
    let weak = check(&outsider, &[]).expect(3);
    let of_repairs = "weak     privileges  this login lacks SELECT on idem_repairs, INSERT on idem_repairs, UPDATE on idem_repairs; only tools of operators need that\n";
    assert!(weak.stdout.contains(of_repairs), "{}", weak.stdout);
    sql("GRANT SELECT, INSERT, UPDATE ON idem.idem_repairs TO outsider");
    check(&outsider, &[]).expect(0);
    for (revoke, lacks) in [
        ("DELETE ON idem.idem_records", "DELETE on idem_records"),
        ("EXECUTE ON FUNCTION idem.idem_purge_v1", "EXECUTE on idem_purge_v1"),
    ] {
        sql(&format!("REVOKE {revoke} FROM outsider, PUBLIC"));
        let poor = check(&outsider, &[]).expect(4);
        assert!(poor.stdout.contains(&format!("unusable privileges  this login lacks {lacks}\n")), "{}", poor.stdout);
        sql(&format!("GRANT {revoke} TO outsider"));
    }
    drop(server);
    let away = check("postgres://postgres@127.0.0.1:1/postgres", &[]).expect(1);
    assert!(away.stderr.starts_with("idem: "), "{}", away.stderr);
}

#[tokio::test]
async fn redis_is_checked() {
    let weak = Redis::start_with(&["--appendonly", "no", "--save", ""]).unwrap();
    let found = idem(&weak.url(), &["check"]).expect(3);
    assert!(found.stdout.contains("weak     durability"), "{}", found.stdout);
    let evicts = Redis::start_with(&["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"]).unwrap();
    let found = idem(&evicts.url(), &["check"]).expect(4);
    assert!(found.stdout.contains("maxmemory-policy"), "{}", found.stdout);
    let synced =
        ["--appendonly", "yes", "--appendfsync", "always", "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"];
    let allowed = Redis::start_with(&synced).unwrap();
    let found = idem(&allowed.url(), &["--dangerous-allow-eviction", "check"]).expect(3);
    assert!(found.stdout.contains("weak     eviction"), "{}", found.stdout);
    let some = Redis::start_with(&["--appendonly", "yes", "--appendfsync", "everysec"]).unwrap();
    let found = idem(&some.url(), &["check"]).expect(3);
    assert!(found.stdout.contains("weak     durability"), "{}", found.stdout);
    let good = Redis::start_with(&["--appendonly", "yes", "--appendfsync", "always"]).unwrap();
    idem(&good.url(), &["check"]).expect(0);
    assert!(idem(&good.url(), &["purge"]).expect(0).stderr.contains("itself"));
    let by_principal = idem(&good.url(), &["list", "--principal", "acme"]).expect(1);
    assert!(by_principal.stderr.contains("does not keep"), "{}", by_principal.stderr);
    assert_eq!(idem(&good.url(), &["list", "--abandoned"]).expect(0).stdout, "");
}

#[tokio::test]
async fn a_store_that_is_not_there_is_not_made() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("missing.db");
    let ran = idem(&format!("sqlite://{}", path.display()), &["stats"]).expect(1);
    assert!(ran.stderr.contains("open the database"), "{}", ran.stderr);
    assert!(!path.exists());
    let url = format!("sqlite://{}", path.display());
    for _ in 0..2 {
        idem(&url, &["migrate"]).expect(0);
    }
    idem(&url, &["stats"]).expect(0);
    // Another application's file stays as it is.
    let other = folder.path().join("other.db");
    std::fs::write(&other, "").unwrap();
    let ran = idem(&format!("sqlite://{}", other.display()), &["check"]).expect(4);
    assert!(ran.stdout.contains("version 0"), "{}", ran.stdout);
    for url in ["oracle://x", ""] {
        let ran = idem(url, &["stats"]).expect(1);
        assert!(ran.stderr.contains("postgres://"), "{}", ran.stderr);
    }
    let ran = idem("postgres://user:hidden@127.0.0.1:1/x", &["stats"]).expect(1);
    assert!(!ran.stderr.contains("hidden"), "{}", ran.stderr);
}

#[tokio::test]
async fn the_same_commands_work_on_postgres() {
    let schema = Schema::new();
    let url = idem_servers::postgres_url();
    let config = PostgresConfig::new(&url).schema(&schema.name);
    let store = Arc::new(PostgresStore::open(config).await.unwrap());
    let stuck = crash(&*store, "stuck", Takeover::Unknown).await;
    complete(&*store, "done", StoredResponse::new(201, "paid")).await;
    let run = |arguments: &[&str]| idem(&url, &[&["--schema", &*schema.name], arguments].concat());
    assert_eq!(run(&["list", "--abandoned"]).expect(0).stdout.lines().count(), 1);
    assert_eq!(run(&["--json", "stats"]).expect(0).json()[0]["completed"], 1);
    assert_eq!(run(&["--json", "sweep"]).expect(0).json()[0]["swept"], 1);
    let id = stuck.id.to_string();
    let seen = run(&["--json", "show", &id]).expect(0).json()[0]["version"].as_str().unwrap().to_owned();
    let how = [
        "resolve",
        &id,
        "--as",
        "retryable",
        "--status",
        "503",
        "--reason",
        "the bank has nothing",
        "--seen",
        &seen,
        "--yes",
    ];
    run(&how).expect(0);
    let AcquireOutcome::Acquired(lease) = answer(&*store, &Acquire { max_attempts: NonZeroU32::MAX, ..stuck }).await
    else {
        panic!("it runs again")
    };
    assert_eq!(lease.attempt, 2);
    assert_eq!(run(&["--json", "repairs"]).expect(0).json().len(), 2);
}

/// `idem console`, which runs until the value is dropped.
struct Console {
    process: Child,
    address: String,
    /// What each path begins with.
    secret: String,
}

impl Console {
    fn start(store: &str, arguments: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_idem"));
        command.args(["--store", store, "console"]).args(arguments).env("USER", "tester").stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let (address, secret) = line.trim().strip_prefix("http://").unwrap().split_once('/').unwrap();
        Self { process, address: address.to_owned(), secret: format!("/{secret}") }
    }

    /// Sends a request with these header fields, and reads its answer.
    fn send(&self, line: &str, fields: &[&str], body: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let host = format!("host: {}", self.address);
        let host = if fields.iter().any(|field| field.starts_with("host:")) { None } else { Some(&*host) };
        let length = format!("content-length: {}", body.len());
        let head: Vec<_> =
            [line, "connection: close", &length].into_iter().chain(host).chain(fields.iter().copied()).collect();
        write!(stream, "{}\r\n\r\n{body}", head.join("\r\n")).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn get(&self, path: &str, fields: &[&str]) -> String {
        self.send(&format!("GET {path} HTTP/1.1"), fields, "")
    }

    /// Fills the form of a record in, and returns the answer.
    fn resolve(&self, id: &RecordId, fields: &str) -> String {
        let page = format!("{}/records/{id}", self.secret);
        let shown = self.get(&page, &[]);
        let hidden = shown.split("<input type=\"hidden\" name=\"").skip(1).map(|tag| {
            let (name, rest) = tag.split_once("\" value=\"").unwrap();
            format!("{name}={}&", rest.split_once('"').unwrap().0)
        });
        let body = hidden.collect::<String>() + fields;
        let kind = "content-type: application/x-www-form-urlencoded";
        self.send(&format!("POST {page}/resolve HTTP/1.1"), &[kind, "sec-fetch-site: same-origin"], &body)
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test]
async fn the_console_answers_under_its_secret_path_only() {
    let file = File::new().await;
    let (console, other) = (Console::start(&file.url, &[]), Console::start(&file.url, &[]));
    let own = console.get(&console.secret, &[]);
    assert!(own.starts_with("HTTP/1.1 200") && !own.contains("set-cookie"), "{own}");
    let style = console.get(&format!("{}/style.css", console.secret), &[]);
    assert!(style.starts_with("HTTP/1.1 200") && own.contains(&format!("{}/style.css", console.secret)), "{style}");
    for path in ["/", "/records", "/repairs", "/style.css", &other.secret, &format!("{}/records", other.secret)] {
        let answer = console.get(path, &[]);
        assert!(answer.starts_with("HTTP/1.1 404") && !answer.contains("idem"), "{path}: {answer}");
    }
    // Another name that leads to this machine.
    let elsewhere = console.get(&console.secret, &["host: attacker.example"]);
    assert!(elsewhere.starts_with("HTTP/1.1 403"), "{elsewhere}");
    let refused = idem(&file.url, &["console", "--listen", "0.0.0.0:0"]).expect(1);
    assert!(refused.stderr.contains("can be reached from other machines"), "{}", refused.stderr);
}

#[tokio::test]
async fn the_console_of_postgres_shows_and_resolves_what_is_stuck() {
    let schema = Schema::new();
    let url = idem_servers::postgres_url();
    let store = PostgresStore::open(PostgresConfig::new(&url).schema(&schema.name)).await.unwrap();
    let id = crash(&store, "stuck", Takeover::Unknown).await.id;
    let schema = ["--schema", &schema.name];
    let console = Console::start(&url, &schema);
    // The records are counted in the background.
    let begun = std::time::Instant::now();
    while !console.get(&console.secret, &[]).contains(&id.to_string()) {
        assert!(begun.elapsed() < Duration::from_secs(30), "{}", console.get(&console.secret, &[]));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(console.get(&console.secret, &[]).contains("abandoned"));
    let page = format!("{}/records/{id}", console.secret);
    for fields in ["as=outcome-unknown&reason=crashed", "as=completed&status=201&body=found&reason=the+bank+has+it"] {
        let answer = console.resolve(&id, fields);
        assert!(answer.starts_with("HTTP/1.1 303") && answer.contains(&format!("location: {page}\r\n")), "{answer}");
    }
    let acquired = store.acquire(&request("stuck", Takeover::Unknown, HOUR)).await.unwrap();
    let AcquireOutcome::Replay(replay) = acquired else { panic!("{acquired:?}") };
    assert_eq!(replay.response, StoredResponse::new(201, "found"));
    let noted = console.get(&format!("{}/repairs", console.secret), &[]);
    assert!(noted.contains("the bank has it") && noted.contains("tester"), "{noted}");
    let reader = Console::start(&url, &[&schema[..], &["--read-only"]].concat());
    let page = reader.get(&format!("{}/records/{id}", reader.secret), &[]);
    assert!(page.starts_with("HTTP/1.1 200") && !page.contains("<form class=\"resolve\""), "{page}");
}
