//! Operations that outlive their process.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use idem_client::{
    ClockFault, Error, ErrorKind, Journal, JournalConfig, JournalError, JournalErrorKind, Operation, Report,
    ResumeError, Stop, client,
};
use idem_core::IdempotencyKey;
use reqwest::Request;
use reqwest::header::{AUTHORIZATION, HeaderValue};
use reqwest_middleware::ClientWithMiddleware;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};
use tempfile::TempDir;

use crate::server::{Act, Arrived, Server, answer, made, problem, quick};

/// Names what a process of this test does: the URL and the journal follow.
const ROLE: &str = "IDEM_CLIENT_ROLE";

async fn open(folder: &TempDir) -> Journal {
    try_open(&folder.path().join("journal")).await.unwrap()
}

async fn try_open(path: &Path) -> Result<Journal, JournalError> {
    Journal::open(JournalConfig::new(path)).await
}

fn with(journal: &Journal) -> ClientWithMiddleware {
    client(quick().journal(journal.clone()), reqwest::Client::builder()).unwrap().build()
}

/// A body with every byte.
fn body() -> Vec<u8> {
    (0..=255).collect()
}

async fn pay(client: &ClientWithMiddleware, url: &str) -> reqwest_middleware::Result<reqwest::Response> {
    let request = client.post(url).body(body()).header("x-kept", HeaderValue::from_bytes(b"caf\xE9").unwrap());
    let operation = Operation::with_key(IdempotencyKey::new("order-4711").unwrap()).deadline(Duration::from_secs(60));
    request
        .header("authorization", "Bearer secret-token")
        .header("cookie", "secret-cookie")
        .with_extension(operation)
        .send()
        .await
}

fn credentials(request: &mut Request) {
    request.headers_mut().insert(AUTHORIZATION, HeaderValue::from_static("Bearer secret-token"));
    request.headers_mut().insert("cookie", HeaderValue::from_static("secret-cookie"));
}

/// The pool of a tool that looks into the journal.
async fn database(folder: &TempDir) -> SqlitePool {
    SqlitePool::connect_with(SqliteConnectOptions::new().filename(folder.path().join("journal"))).await.unwrap()
}

fn kind_of(error: &ResumeError) -> JournalErrorKind {
    let ResumeError::Journal(error) = error else { panic!("{error:?}") };
    error.kind()
}

async fn eventually(what: &str, holds: impl Fn() -> bool) {
    for _ in 0..3000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what} did not happen within 30 s");
}

/// Starts this executable again, in a role.
fn process(role: &str, url: &str, folder: &TempDir) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "journal::a_process_of_the_tests", "--nocapture"]);
    command.env(ROLE, format!("{role}|{url}|{}", folder.path().join("journal").display()));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap()
}

/// Does nothing, except in the processes that tests start.
#[tokio::test]
async fn a_process_of_the_tests() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let [role, url, path] = role.split('|').collect::<Vec<_>>()[..] else { panic!("{role}") };
    let journal = try_open(Path::new(path)).await.unwrap();
    let client = with(&journal);
    match role {
        "pay" => drop(pay(&client, url).await),
        "resume" => {
            for operation in journal.pending().await.unwrap() {
                match journal.resume(&operation.id, &client, credentials).await {
                    Ok(_) => println!("resumed"),
                    Err(error) => {
                        let kind = kind_of(&error);
                        assert!(matches!(kind, JournalErrorKind::Running | JournalErrorKind::NotPending), "{error:?}");
                    }
                }
            }
        }
        "fill" => {
            for number in 0.. {
                let request = client.post(url).body(vec![b'x'; 20_000]).header("x-number", number.to_string());
                if let Err(error) = request.send().await {
                    assert_eq!(Error::of(&error).unwrap().kind(), ErrorKind::Journal, "{error:?}");
                    println!("stored {number} and then none");
                    return;
                }
            }
        }
        role => panic!("{role}"),
    }
}

#[tokio::test]
async fn a_killed_process_is_continued_with_the_same_key_and_the_same_bytes() {
    let folder = TempDir::new().unwrap();
    let server = Server::deciding(|number, _| if number == 0 { Act::Hang } else { made() }).await;
    let mut process = process("pay", &server.url("/pay?to=me"), &folder);
    eventually("the first request", || server.arrived().len() == 1).await;

    // While the process lives, no other one sends its operation.
    let journal = open(&folder).await;
    let pending = journal.pending().await.unwrap();
    assert_eq!((pending.len(), pending[0].is_running, &*pending[0].key), (1, true, "order-4711"));
    let error = journal.resume(&pending[0].id, &with(&journal), credentials).await.unwrap_err();
    assert_eq!(kind_of(&error), JournalErrorKind::Running);
    assert_eq!(journal.forget(&pending[0].id).await.unwrap_err().kind(), JournalErrorKind::Running);

    process.kill().unwrap();
    process.wait().unwrap();
    let pending = journal.pending().await.unwrap();
    assert!(!pending[0].is_running);
    let response = journal.resume(&pending[0].id, &with(&journal), credentials).await.unwrap();
    assert_eq!((response.status().as_u16(), Report::of(&response).unwrap().attempts), (201, 1));
    let arrived = server.arrived();
    assert_eq!(arrived.len(), 2);
    let fields = |request: &Arrived| {
        let mut lines: Vec<String> = request.head.lines().map(str::to_ascii_lowercase).collect();
        lines.sort();
        lines
    };
    assert_eq!((fields(&arrived[0]), &arrived[0].body), (fields(&arrived[1]), &arrived[1].body));
    assert_eq!(arrived[1].body, body());
    assert!(journal.pending().await.unwrap().is_empty());
    let error = journal.resume(&pending[0].id, &with(&journal), credentials).await.unwrap_err();
    assert_eq!(kind_of(&error), JournalErrorKind::NotPending);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_that_resume_at_once_share_the_operations() {
    const OPERATIONS: usize = 12;
    let folder = TempDir::new().unwrap();
    let refused = Server::deciding(|_, _| problem("504 Gateway Timeout", "outcome-unknown")).await;
    let journal = open(&folder).await;
    for _ in 0..OPERATIONS {
        with(&journal).post(refused.url("/pay")).body("x").send().await.unwrap_err();
    }
    let address = refused.address;
    drop((refused, journal));
    // At the same address, because the URL is in the journal.
    let database = database(&folder).await;
    let server = Server::start([]).await;
    let moved = format!("UPDATE operations SET url = replace(url, '{address}', '{}')", server.address);
    // The digest shows the change.
    sqlx::raw_sql(sqlx::AssertSqlSafe(moved)).execute(&database).await.unwrap();
    let journal = open(&folder).await;
    let error = journal.resume(&journal.pending().await.unwrap()[0].id, &with(&journal), |_| ()).await.unwrap_err();
    assert_eq!(kind_of(&error), JournalErrorKind::Corrupt);
    assert_eq!(server.arrived(), []);
    drop(journal);

    let folder = TempDir::new().unwrap();
    let server =
        Server::deciding(
            |number, _| {
                if number < OPERATIONS { problem("504 Gateway Timeout", "outcome-unknown") } else { made() }
            },
        )
        .await;
    let journal = open(&folder).await;
    for _ in 0..OPERATIONS {
        with(&journal).post(server.url("/pay")).body("x").send().await.unwrap_err();
    }
    let processes: Vec<Child> = (0..3).map(|_| process("resume", "-", &folder)).collect();
    let outputs: Vec<_> = processes.into_iter().map(|process| process.wait_with_output().unwrap()).collect();
    assert!(outputs.iter().all(|output| output.status.success()), "{outputs:?}");
    let resumed: usize =
        outputs.iter().map(|output| String::from_utf8_lossy(&output.stdout).matches("resumed").count()).sum();
    assert_eq!((resumed, server.arrived().len()), (OPERATIONS, 2 * OPERATIONS), "each once");
    assert_eq!(journal.answers(0, 100).await.unwrap().len(), OPERATIONS);
}

#[tokio::test]
async fn an_unknown_outcome_stays_until_an_operator_has_resolved_it() {
    let folder = TempDir::new().unwrap();
    let server = Server::start([problem("504 Gateway Timeout", "outcome-unknown"), made()]).await;
    let journal = open(&folder).await;
    let error = pay(&with(&journal), &server.url("/pay")).await.unwrap_err();
    assert_eq!(Error::of(&error).unwrap().kind(), ErrorKind::Stopped(Stop::OutcomeUnknown));
    let pending = journal.pending().await.unwrap();
    assert_eq!(pending[0].stopped.as_deref(), Some("outcome-unknown"));
    // Another process can resume it, although this one lives.
    let other = open(&folder).await;
    other.resume(&pending[0].id, &with(&other), credentials).await.unwrap();
    let answers = journal.answers(0, 100).await.unwrap();
    let [answer] = &answers[..] else { panic!("{answers:?}") };
    assert_eq!(Error::of(&error).unwrap().report().journal_id.as_ref(), Some(&answer.id));
    assert_eq!((answer.status.as_u16(), &answer.body[..], &*answer.key), (201, &br#"{"id":1}"#[..], "order-4711"));
    assert!(!format!("{answers:?}{pending:?}").contains("order-4711"));
    journal.forget(&answer.id).await.unwrap();
    assert!(journal.answers(0, 100).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_dropped_operation_can_be_resumed_at_once() {
    let folder = TempDir::new().unwrap();
    let server = Server::start([Act::Hang, made()]).await;
    let journal = open(&folder).await;
    let (client, url) = (with(&journal), server.url("/pay"));
    tokio::select! {
        _ = pay(&client, &url) => panic!("the server hangs"),
        () = eventually("the first request", || server.arrived().len() == 1) => {}
    }
    let pending = journal.pending().await.unwrap();
    assert!(!pending[0].is_running);
    journal.resume(&pending[0].id, &client, credentials).await.unwrap();
    assert_eq!(server.arrived()[0].key(), server.arrived()[1].key());
}

#[tokio::test]
async fn two_tasks_of_a_process_do_not_send_one_operation() {
    let folder = TempDir::new().unwrap();
    let server = Server::start([problem("504 Gateway Timeout", "outcome-unknown"), Act::Hang, made()]).await;
    let journal = open(&folder).await;
    pay(&with(&journal), &server.url("/pay")).await.unwrap_err();
    let id = journal.pending().await.unwrap()[0].id.clone();
    let (first, second) = (journal.clone(), with(&journal));
    let (task_id, task_client) = (id.clone(), second.clone());
    let task = tokio::spawn(async move { first.resume(&task_id, &task_client, credentials).await.map(drop) });
    eventually("the second request", || server.arrived().len() == 2).await;
    let error = journal.resume(&id, &second, credentials).await.unwrap_err();
    assert_eq!(kind_of(&error), JournalErrorKind::Running);
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    journal.resume(&id, &second, credentials).await.unwrap();
}

#[tokio::test]
async fn nothing_is_sent_after_the_retention_or_when_the_clock_was_set_back() {
    let folder = TempDir::new().unwrap();
    let server =
        Server::start([answer("503 Service Unavailable\r\nretry-after: 1000\r\nidempotency-retention: 1")]).await;
    let journal = open(&folder).await;
    let client = with(&journal);
    pay(&client, &server.url("/pay")).await.unwrap_err();
    let id = journal.pending().await.unwrap()[0].id.clone();
    // Nine tenths of what the server stated.
    let older = "UPDATE operations SET first_sent_ms = first_sent_ms - 900";
    sqlx::raw_sql(older).execute(&database(&folder).await).await.unwrap();
    let error = journal.resume(&id, &client, credentials).await.unwrap_err();
    let ResumeError::Client(error) = error else { panic!("{error:?}") };
    assert_eq!(Error::of(&error).unwrap().kind(), ErrorKind::RetentionOver);
    assert_eq!(journal.pending().await.unwrap()[0].stopped.as_deref(), Some("retention-over"));

    sqlx::raw_sql("UPDATE clock SET latest_ms = latest_ms + 3600000").execute(&database(&folder).await).await.unwrap();
    let error = journal.resume(&id, &client, credentials).await.unwrap_err();
    assert_eq!(kind_of(&error), JournalErrorKind::ClockSetBack);
    assert_eq!(server.arrived().len(), 1, "nothing was sent again");
    // A new operation is not concerned.
    client.post(server.url("/pay")).send().await.unwrap();
}

const HOUR: Duration = Duration::from_secs(3600);

/// Moves the latest time that the journal has seen, as if the clock had been there.
async fn move_clock(folder: &TempDir, by: &str) {
    let moved = format!("UPDATE clock SET latest_ms = latest_ms {by}");
    sqlx::raw_sql(sqlx::AssertSqlSafe(moved)).execute(&database(folder).await).await.unwrap();
}

async fn resume_fails(journal: &Journal, id: &str) -> JournalErrorKind {
    kind_of(&journal.resume(id, &with(journal), credentials).await.unwrap_err())
}

/// The operation was stored at a time that is not known, and the server may have forgotten it.
#[tokio::test]
async fn after_a_clock_that_was_ahead_only_what_was_stored_before_is_resumed() {
    let folder = TempDir::new().unwrap();
    let script = (0..3).map(|_| problem("504 Gateway Timeout", "outcome-unknown"));
    let server = Server::start(script).await;
    let journal = open(&folder).await;
    let url = server.url("/pay");
    for _ in 0..2 {
        with(&journal).post(&url).send().await.unwrap_err();
    }
    let pending = journal.pending().await.unwrap();
    let (before, ahead) = (&pending[0].id, &pending[1].id);
    // The second one was stored while the clock was two days ahead.
    let later = format!("UPDATE operations SET first_sent_ms = first_sent_ms + 2 * 86400000 WHERE id = '{ahead}'");
    sqlx::raw_sql(sqlx::AssertSqlSafe(later)).execute(&database(&folder).await).await.unwrap();
    move_clock(&folder, "+ 2 * 86400000").await;
    assert_eq!(resume_fails(&journal, before).await, JournalErrorKind::ClockSetBack);
    // Stored by the right clock, after the fault was noticed.
    with(&journal).post(&url).send().await.unwrap_err();
    let after = &journal
        .pending()
        .await
        .unwrap()
        .iter()
        .find(|one| !pending.iter().any(|old| old.id == one.id))
        .unwrap()
        .id
        .clone();
    // When the clock comes to this time again, the ages are still not known.
    move_clock(&folder, "- 2 * 86400000").await;
    for id in [before, ahead, after] {
        assert_eq!(resume_fails(&journal, id).await, JournalErrorKind::ClockSetBack);
    }
    let since = SystemTime::now() + HOUR;
    journal.trust_clock(ClockFault::WasAhead { since }).await.unwrap();
    assert_eq!(resume_fails(&journal, ahead).await, JournalErrorKind::AgeUnknown);
    for id in [before, after] {
        journal.resume(id, &with(&journal), credentials).await.unwrap();
    }
    // Nothing that is said of a later fault makes it known.
    move_clock(&folder, "+ 3600000").await;
    assert_eq!(resume_fails(&journal, ahead).await, JournalErrorKind::ClockSetBack);
    move_clock(&folder, "- 3600000").await;
    journal.trust_clock(ClockFault::WasBehind).await.unwrap();
    let left = journal.pending().await.unwrap();
    assert_eq!((left.len(), left[0].is_age_unknown, &left[0].id), (1, true, ahead));
    assert_eq!(resume_fails(&journal, ahead).await, JournalErrorKind::AgeUnknown);
    journal.forget(ahead).await.unwrap();
    assert_eq!(server.arrived().len(), 5);
}

#[tokio::test]
async fn after_a_clock_that_was_ahead_for_an_unknown_time_nothing_of_that_time_is_resumed() {
    let folder = TempDir::new().unwrap();
    let server = Server::start([problem("504 Gateway Timeout", "outcome-unknown")]).await;
    let journal = open(&folder).await;
    pay(&with(&journal), &server.url("/pay")).await.unwrap_err();
    let id = journal.pending().await.unwrap()[0].id.clone();
    move_clock(&folder, "+ 3600000").await;
    assert_eq!(resume_fails(&journal, &id).await, JournalErrorKind::ClockSetBack);
    journal.trust_clock(ClockFault::WasAhead { since: UNIX_EPOCH }).await.unwrap();
    assert_eq!(resume_fails(&journal, &id).await, JournalErrorKind::AgeUnknown);
    assert_eq!(server.arrived().len(), 1);
}

#[tokio::test]
async fn after_a_clock_that_was_behind_everything_is_resumed_once_it_is_right() {
    let folder = TempDir::new().unwrap();
    let server = Server::start([problem("504 Gateway Timeout", "outcome-unknown")]).await;
    let journal = open(&folder).await;
    pay(&with(&journal), &server.url("/pay")).await.unwrap_err();
    let id = journal.pending().await.unwrap()[0].id.clone();
    move_clock(&folder, "+ 3600000").await;
    // Any use of the journal notices it, here that of another process.
    open(&folder).await;
    let error = journal.trust_clock(ClockFault::WasBehind).await.unwrap_err();
    assert_eq!(error.kind(), JournalErrorKind::ClockSetBack);
    move_clock(&folder, "- 3600000").await;
    assert_eq!(resume_fails(&journal, &id).await, JournalErrorKind::ClockSetBack, "an operator has to say it");
    journal.trust_clock(ClockFault::WasBehind).await.unwrap();
    journal.resume(&id, &with(&journal), credentials).await.unwrap();
    assert_eq!(server.arrived().len(), 2);
}

#[tokio::test]
async fn a_clock_that_jumps_ahead_removes_no_answers() {
    let folder = TempDir::new().unwrap();
    let server = Server::start([]).await;
    let journal = open(&folder).await;
    pay(&with(&journal), &server.url("/pay")).await.unwrap();
    let used = async || -> i64 {
        sqlx::query_scalar("SELECT used_ms FROM clock").fetch_one(&database(&folder).await).await.unwrap()
    };
    let before = used().await;
    move_clock(&folder, "- 30 * 86400000").await;
    open(&folder).await;
    assert_eq!(journal.answers(0, 100).await.unwrap().len(), 1);
    assert_eq!(used().await - before, 600_000, "ten minutes at most between two uses");
    // A day in which the journal is used.
    sqlx::raw_sql("UPDATE clock SET used_ms = used_ms + 86400000").execute(&database(&folder).await).await.unwrap();
    open(&folder).await;
    assert!(journal.answers(0, 100).await.unwrap().is_empty());
}

/// A second row would count the retention anew.
#[tokio::test]
async fn a_key_without_a_final_answer_is_resumed_and_not_begun_again() {
    let folder = TempDir::new().unwrap();
    let server = Server::start([problem("504 Gateway Timeout", "outcome-unknown")]).await;
    let (journal, url) = (open(&folder).await, server.url("/pay"));
    pay(&with(&journal), &url).await.unwrap_err();
    // Another process knows it as well.
    let other = open(&folder).await;
    for journal in [&journal, &other] {
        let error = pay(&with(journal), &url).await.unwrap_err();
        let error = Error::of(&error).unwrap();
        let source = std::error::Error::source(error).unwrap().downcast_ref::<JournalError>().unwrap();
        assert_eq!((error.kind(), source.kind()), (ErrorKind::Journal, JournalErrorKind::Pending));
        let id = &journal.pending().await.unwrap()[0].id;
        assert!(source.to_string().contains(id.as_str()), "{source}");
    }
    assert_eq!(server.arrived().len(), 1);
    // The same key of another account, or for another route, is another operation.
    let key = || Operation::with_key(IdempotencyKey::new("order-4711").unwrap());
    let client = with(&journal);
    client.post(&url).with_extension(key().label("other")).send().await.unwrap();
    client.post(server.url("/refund")).with_extension(key()).send().await.unwrap();
    assert_eq!(server.arrived().len(), 3);
}

#[tokio::test]
async fn a_key_with_an_answer_is_sent_again_within_its_first_retention_only() {
    let folder = TempDir::new().unwrap();
    let server = Server::start([]).await;
    let (journal, url) = (open(&folder).await, server.url("/pay"));
    let client = with(&journal);
    pay(&client, &url).await.unwrap();
    pay(&client, &url).await.unwrap();
    let a_day = 24 * 60 * 60 * 1000;
    let older = format!("UPDATE operations SET first_sent_ms = first_sent_ms - {a_day}");
    sqlx::raw_sql(sqlx::AssertSqlSafe(older)).execute(&database(&folder).await).await.unwrap();
    let error = pay(&client, &url).await.unwrap_err();
    assert_eq!(Error::of(&error).unwrap().kind(), ErrorKind::RetentionOver);
    assert_eq!(server.arrived().len(), 2);
}

/// To Stripe, a key in quotes is another key.
#[tokio::test]
async fn an_operation_goes_on_by_the_rules_that_it_began_with() {
    let folder = TempDir::new().unwrap();
    let server = Server::deciding(|_, _| answer("503 Service Unavailable\r\nretry-after: 1000")).await;
    let journal = open(&folder).await;
    let began = quick().bare_keys(true).retention(Duration::from_secs(3600)).journal(journal.clone());
    let began = client(began, reqwest::Client::builder()).unwrap().build();
    began.post(server.url("/pay")).with_extension(Operation::new().label("acme")).send().await.unwrap_err();
    let pending = journal.pending().await.unwrap();
    assert_eq!(pending[0].label.as_deref(), Some("acme"));
    journal.resume(&pending[0].id, &with(&journal), credentials).await.unwrap_err();
    let arrived = server.arrived();
    assert_eq!((arrived[0].key(), arrived[1].key()), (&*pending[0].key, &*pending[0].key));

    let older = "UPDATE operations SET first_sent_ms = first_sent_ms - 3600000";
    sqlx::raw_sql(older).execute(&database(&folder).await).await.unwrap();
    let error = journal.resume(&pending[0].id, &with(&journal), credentials).await.unwrap_err();
    let ResumeError::Client(error) = error else { panic!("{error:?}") };
    assert_eq!(Error::of(&error).unwrap().kind(), ErrorKind::RetentionOver);

    let other = "UPDATE operations SET label = 'other'";
    sqlx::raw_sql(other).execute(&database(&folder).await).await.unwrap();
    let error = journal.resume(&pending[0].id, &with(&journal), credentials).await.unwrap_err();
    assert_eq!(kind_of(&error), JournalErrorKind::Corrupt);
    assert_eq!(server.arrived().len(), 2);
}

/// The login that refuses a resumed operation says nothing about its first attempt.
#[tokio::test]
async fn a_refused_login_ends_no_operation_that_may_have_run() {
    let folder = TempDir::new().unwrap();
    let server = Server::start([Act::Close, answer("401 Unauthorized"), answer("401 Unauthorized"), made()]).await;
    let journal = open(&folder).await;
    let error = pay(&with(&journal), &server.url("/pay")).await.unwrap_err();
    assert_eq!(Error::of(&error).unwrap().kind(), ErrorKind::Stopped(Stop::NotAnswered), "{error}");
    let pending = journal.pending().await.unwrap();
    assert_eq!(pending[0].stopped.as_deref(), Some("not-answered"));
    journal.resume(&pending[0].id, &with(&journal), |_| ()).await.unwrap_err();
    let response = journal.resume(&pending[0].id, &with(&journal), credentials).await.unwrap();
    assert_eq!((response.status().as_u16(), server.arrived().len()), (201, 4));
}

#[tokio::test]
async fn secrets_are_not_on_the_disk_and_the_file_is_private() {
    let folder = TempDir::new().unwrap();
    let server = Server::start([answer("201 Created\r\nset-cookie: secret-session")]).await;
    let journal = open(&folder).await;
    pay(&with(&journal), &server.url("/pay")).await.unwrap();
    let mut found = 0;
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        let path = entry.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        let has = |text: &[u8]| bytes.windows(text.len()).any(|window| window == text);
        found += usize::from(has(b"order-4711"));
        for secret in ["secret-token", "secret-cookie", "secret-session"] {
            assert!(!has(secret.as_bytes()), "{secret} is in {}", path.display());
        }
        // Values are stored as lists of numbers, so their names are looked for, too.
        for name in ["authorization", "cookie"] {
            assert!(!has(format!("\"{name}\"").as_bytes()), "{name} is in {}", path.display());
        }
        assert!(!has(b"\"set-cookie\""));
        #[cfg(unix)]
        if !path.to_string_lossy().contains("-owner-") {
            let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
            assert_eq!(mode & 0o077, 0, "{} can be read by others", path.display());
        }
    }
    assert!(found > 0);
}

#[tokio::test]
async fn answers_are_kept_for_the_time_that_was_set() {
    let folder = TempDir::new().unwrap();
    let server = Server::start([]).await;
    let path = folder.path().join("journal");
    let forgetful = Journal::open(JournalConfig::new(&path).keep_answers(Duration::ZERO)).await.unwrap();
    pay(&with(&forgetful), &server.url("/pay")).await.unwrap();
    assert!(forgetful.answers(0, 100).await.unwrap().is_empty() && forgetful.pending().await.unwrap().is_empty());
    let journal = open(&folder).await;
    pay(&with(&journal), &server.url("/pay")).await.unwrap();
    assert_eq!(journal.answers(0, 100).await.unwrap().len(), 1);
    Journal::open(JournalConfig::new(&path).keep_answers(Duration::ZERO)).await.unwrap();
    assert!(journal.answers(0, 100).await.unwrap().is_empty(), "opening removes old answers");
}

/// The application finds them in pages, and a busy client does not fill the disk.
#[tokio::test]
async fn answers_are_kept_in_so_many_bytes_and_read_in_pages() {
    let folder = TempDir::new().unwrap();
    let server = Server::deciding(|number, _| {
        Act::Answer("201 Created", format!("{number:04}").repeat(if number == 4 { 300 } else { 25 }))
    })
    .await;
    let journal = open(&folder).await;
    let mut ids = Vec::new();
    for _ in 0..4 {
        let response = with(&journal).post(server.url("/pay")).body(vec![b'x'; 100]).send().await.unwrap();
        ids.push(Report::of(&response).unwrap().journal_id.clone().unwrap());
    }
    let pages = [journal.answers(0, 3).await.unwrap(), journal.answers(0, 100).await.unwrap()];
    assert_eq!(pages.each_ref().map(Vec::len), [3, 4]);
    let rest = journal.answers(pages[0][2].number, 3).await.unwrap();
    let in_order: Vec<&String> = pages[0].iter().chain(&rest).map(|answer| &answer.id).collect();
    assert_eq!(in_order, ids.iter().collect::<Vec<_>>());
    assert_eq!(rest[0].body, "0003".repeat(25));

    // One takes more than 200 bytes, and less than 300.
    let path = folder.path().join("journal");
    let small = Journal::open(JournalConfig::new(&path).keep_bytes(600)).await.unwrap();
    let kept =
        async || -> Vec<String> { small.answers(0, 100).await.unwrap().into_iter().map(|answer| answer.id).collect() };
    assert_eq!(kept().await, ids[2..], "the oldest make room when it is opened");
    let order = |key| Operation::with_key(IdempotencyKey::new(key).unwrap());
    let large = || with(&small).post(server.url("/pay")).body(vec![b'x'; 100]).with_extension(order("large")).send();
    assert_eq!(large().await.unwrap().text().await.unwrap(), "0004".repeat(300));
    assert!(kept().await.is_empty(), "it is larger than all may be");
    let after = with(&small).post(server.url("/pay")).body(vec![b'x'; 100]).send().await.unwrap();
    assert_eq!(kept().await, [Report::of(&after).unwrap().journal_id.clone().unwrap()]);
    // What is forgotten gives its room back.
    small.forget(&kept().await[0]).await.unwrap();
    for number in 1..=3 {
        with(&small).post(server.url("/pay")).body(vec![b'x'; 100]).send().await.unwrap();
        assert_eq!(kept().await.len(), number.min(2));
    }
    // The key of an answer without contents is known with its age.
    let older = "UPDATE operations SET first_sent_ms = first_sent_ms - 86400000";
    sqlx::raw_sql(older).execute(&database(&folder).await).await.unwrap();
    let error = large().await.unwrap_err();
    assert_eq!(Error::of(&error).unwrap().kind(), ErrorKind::RetentionOver);
}

/// Owners are found beside the file itself, so that another name does not make a second owner.
#[cfg(unix)]
#[tokio::test]
async fn a_journal_behind_a_link_is_the_same_journal() {
    let (folder, elsewhere) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let server = Server::start([Act::Hang]).await;
    let journal = open(&folder).await;
    let link = elsewhere.path().join("link");
    std::os::unix::fs::symlink(folder.path().join("journal"), &link).unwrap();
    let (client, url) = (with(&journal), server.url("/pay"));
    tokio::select! {
        _ = pay(&client, &url) => panic!("the server hangs"),
        () = async {
            eventually("the first request", || server.arrived().len() == 1).await;
            let other = try_open(&link).await.unwrap();
            let pending = other.pending().await.unwrap();
            assert!(pending[0].is_running);
            let error = other.resume(&pending[0].id, &with(&other), credentials).await.unwrap_err();
            assert_eq!(kind_of(&error), JournalErrorKind::Running);
        } => {}
    }
}

/// A client without this crate's middleware sends the key, too. It cannot mark the operation.
#[tokio::test]
async fn an_operation_that_is_resumed_by_another_client_has_its_key() {
    let folder = TempDir::new().unwrap();
    let server = Server::start([problem("504 Gateway Timeout", "outcome-unknown"), made()]).await;
    let journal = open(&folder).await;
    pay(&with(&journal), &server.url("/pay")).await.unwrap_err();
    let id = journal.pending().await.unwrap()[0].id.clone();
    let other = reqwest_middleware::ClientBuilder::new(reqwest::Client::new()).build();
    journal.resume(&id, &other, credentials).await.unwrap();
    assert_eq!(server.arrived()[1].key(), "\"order-4711\"");
    assert_eq!(journal.pending().await.unwrap().len(), 1);
}

/// `ulimit -f` bounds the size of files, as a full disk does.
#[tokio::test]
async fn nothing_is_sent_that_could_not_be_stored() {
    let folder = TempDir::new().unwrap();
    let server = Server::start([]).await;
    let script = "trap '' XFSZ; ulimit -f 400; exec \"$0\" --exact journal::a_process_of_the_tests --nocapture";
    let mut command = Command::new("sh");
    command.arg("-c").arg(script).arg(std::env::current_exe().unwrap());
    command.env(ROLE, format!("fill|{}|{}", server.url("/pay"), folder.path().join("journal").display()));
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    assert!(output.status.success(), "{output:?}");
    let sent = server.arrived().len();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(sent > 0 && printed.contains("and then none"), "{printed}");
    // Each request that was sent is in the journal, with its answer or without.
    let journal = open(&folder).await;
    let stored = journal.answers(0, 100).await.unwrap().len() + journal.pending().await.unwrap().len();
    assert!(stored >= sent, "{sent} sent, {stored} stored");
}

#[tokio::test]
async fn a_file_that_is_no_journal_is_refused_and_left_alone() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("journal");
    let refused = async |expected: JournalErrorKind| {
        let before = std::fs::read(&path).unwrap();
        let error = try_open(&path).await.unwrap_err();
        assert_eq!(error.kind(), expected, "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), before);
    };
    std::fs::write(&path, "a diary, not a journal; ".repeat(100)).unwrap();
    refused(JournalErrorKind::Corrupt).await;

    std::fs::remove_file(&path).unwrap();
    let other =
        SqlitePool::connect_with(SqliteConnectOptions::new().filename(&path).create_if_missing(true)).await.unwrap();
    sqlx::raw_sql("CREATE TABLE users (name TEXT)").execute(&other).await.unwrap();
    other.close().await;
    refused(JournalErrorKind::NotAJournal).await;

    std::fs::remove_file(&path).unwrap();
    drop(try_open(&path).await.unwrap());
    let database = database(&folder).await;
    sqlx::raw_sql("PRAGMA user_version = 2; PRAGMA wal_checkpoint(TRUNCATE)").execute(&database).await.unwrap();
    database.close().await;
    refused(JournalErrorKind::NotAJournal).await;
}

#[tokio::test]
async fn a_damaged_operation_is_not_sent_and_a_damaged_file_is_not_opened() {
    let folder = TempDir::new().unwrap();
    let server = Server::start([problem("504 Gateway Timeout", "outcome-unknown")]).await;
    let journal = open(&folder).await;
    pay(&with(&journal), &server.url("/pay")).await.unwrap_err();
    let id = journal.pending().await.unwrap()[0].id.clone();
    let database = database(&folder).await;
    sqlx::raw_sql("UPDATE operations SET body = x'00'").execute(&database).await.unwrap();
    let error = journal.resume(&id, &with(&journal), credentials).await.unwrap_err();
    assert_eq!(kind_of(&error), JournalErrorKind::Corrupt);
    assert_eq!(server.arrived().len(), 1);
    journal.forget(&id).await.unwrap();

    sqlx::raw_sql("PRAGMA wal_checkpoint(TRUNCATE)").execute(&database).await.unwrap();
    database.close().await;
    drop(journal);
    let path = folder.path().join("journal");
    let mut bytes = std::fs::read(&path).unwrap();
    // All pages but the first one, which says that it is a journal.
    bytes[4096..].fill(0xA5);
    std::fs::write(&path, bytes).unwrap();
    let _ = std::fs::remove_file(folder.path().join("journal-wal"));
    assert_eq!(try_open(&path).await.unwrap_err().kind(), JournalErrorKind::Corrupt);
}
