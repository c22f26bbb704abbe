//! What it takes to make a service that exists safe to repeat, and what that gives.
#![expect(clippy::unwrap_used, reason = "a test says what it expects by failing")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions as _, Connection as _, PgConnection};

const BEFORE: &str = include_str!("../src/bin/before.rs");
const AFTER: &str = include_str!("../src/bin/after.rs");

/// The connections of the service's pool.
const POOL: i64 = 5;

/// A service on a new database.
struct Service {
    process: Child,
    port: u16,
    database: String,
}

impl Service {
    async fn start(program: &str) -> Self {
        let database = format!("orders_{}", uuid::Uuid::new_v4().simple());
        let mut beside = beside("postgres").await;
        sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {database}"))).execute(&mut beside).await.unwrap();
        beside.close().await.unwrap();
        let server: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
        let url = format!("postgres://postgres@127.0.0.1:{}/{database}", server.get_port());
        let mut command = Command::new(program);
        command.env("DATABASE_URL", url).env("LISTEN", "127.0.0.1:0").stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let port = line.trim().rsplit(':').next().unwrap().parse().unwrap();
        Self { process, port, database }
    }

    /// Orders, and says the status, whether it is a replay, and the body.
    fn order(&self, key: &str, body: &str) -> (u16, bool, String) {
        self.send("POST", &format!("Idempotency-Key: {key}\r\n"), body)
    }

    fn send(&self, method: &str, key: &str, body: &str) -> (u16, bool, String) {
        let length = body.len();
        let request = format!(
            "{method} /orders HTTP/1.1\r\nHost: orders\r\nAuthorization: Bearer token-of-acme\r\n{key}\
             Content-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        );
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, head.contains("\r\nidempotency-replayed: true"), body.to_owned())
    }

    async fn number(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&mut beside(&self.database).await).await.unwrap()
    }

    /// The sessions of the service.
    async fn connections(&self) -> i64 {
        let sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = $1 AND pid <> pg_backend_pid()";
        let sessions = sqlx::query_scalar(sessions).bind(self.database.as_str());
        sessions.fetch_one(&mut beside("postgres").await).await.unwrap()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

async fn beside(database: &str) -> PgConnection {
    let options: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    options.database(database).disable_statement_logging().connect().await.unwrap()
}

#[test]
fn it_takes_fifteen_lines() {
    let mut before: Vec<&str> = BEFORE.lines().collect();
    let mut added = Vec::new();
    for line in AFTER.lines() {
        match before.iter().position(|known| *known == line) {
            Some(place) => drop(before.remove(place)),
            None => added.push(line),
        }
    }
    assert!(added.len() <= 15, "{}", added.join("\n"));
    assert!(before.len() <= 5, "{}", before.join("\n"));
}

/// What the page shows is what the programs are.
#[test]
fn the_page_shows_the_difference() {
    let page = include_str!("../../../docs/adoption.md");
    let shown = page.split_once("```diff\n").unwrap().1.split_once("\n```").unwrap().0;
    let with = |sign: char, program: &str, other: &str| {
        let lines: Vec<_> = shown.lines().filter_map(|line| line.strip_prefix(sign)).collect();
        assert!(lines.iter().all(|line| program.lines().any(|known| known == *line)), "{lines:?}");
        let changed = |line: &&str| !line.starts_with("//!") && !other.lines().any(|known| known == *line);
        assert!(program.lines().filter(changed).all(|line| lines.contains(&line)), "a line is missing");
    };
    with('+', AFTER, BEFORE);
    with('-', BEFORE, AFTER);
}

#[tokio::test]
async fn an_order_that_is_repeated_is_made_once_and_without_idem_it_is_not() {
    for (program, orders) in [(env!("CARGO_BIN_EXE_before"), 2), (env!("CARGO_BIN_EXE_after"), 1)] {
        let service = Service::start(program).await;
        let first = service.order("k-1", r#"{"item":"pen","quantity":3}"#);
        let second = service.order("k-1", r#"{"item":"pen","quantity":3}"#);
        assert_eq!((first.0, second.0, first.1), (201, 201, false));
        assert_eq!(service.number("SELECT count(*) FROM orders.orders").await, orders);
        if orders == 1 {
            assert!(second.1 && second.2 == first.2, "{second:?}");
            assert_eq!(service.order("k-1", r#"{"item":"pen","quantity":4}"#).0, 422);
            assert_eq!(service.order("k-2", r#"{"item":"pen","quantity":0}"#).2, "order at least one");
            // What the page says of clients without keys, and of other methods.
            assert_eq!(service.send("POST", "", r#"{"item":"pen","quantity":1}"#).0, 400);
            assert_eq!(service.send("PATCH", "", "").0, 405);
            assert_eq!(service.send("GET", "", "").2, r#"[{"id":1,"item":"pen","quantity":3}]"#);
            let principal = "SELECT count(*) FROM orders.idem_records WHERE principal = 'acme'";
            assert_eq!(service.number(principal).await, 2, "the token is in no record");
        }
    }
}

#[tokio::test]
async fn many_at_once_run_once_through_the_pool_and_one_more_connection() {
    let service = Arc::new(Service::start(env!("CARGO_BIN_EXE_after")).await);
    // The server may still list a session that the start has ended.
    let since = Instant::now();
    while service.connections().await > POOL + 1 {
        assert!(since.elapsed() < Duration::from_secs(10), "{} connections", service.connections().await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let clients: Vec<_> = (0..40)
        .map(|client| {
            let service = Arc::clone(&service);
            thread::spawn(move || service.order(&format!("k-{}", client % 4), r#"{"item":"pen","quantity":1}"#).0)
        })
        .collect();
    let mut connections = vec![service.connections().await];
    while clients.iter().any(|client| !client.is_finished()) {
        connections.push(service.connections().await);
    }
    let statuses: Vec<_> = clients.into_iter().map(|client| client.join().unwrap()).collect();
    assert!(statuses.iter().all(|status| matches!(status, 201 | 409)), "{statuses:?}");
    assert_eq!(service.number("SELECT count(*) FROM orders.orders").await, 4);
    // The server may list a session for a moment after its end.
    let most = connections.windows(2).map(|two| two[0].min(two[1])).max();
    assert!(most.is_none_or(|most| most <= POOL + 1), "{most:?}");
    // One after the other, each of them is answered.
    for key in 0..4 {
        let (status, is_replay, _) = service.order(&format!("k-{key}"), r#"{"item":"pen","quantity":1}"#);
        assert_eq!((status, is_replay), (201, true));
    }
}

/// An error of the handler's own rolls its transaction back, and a repeat runs.
#[tokio::test]
async fn an_error_of_the_database_rolls_back_and_the_repeat_runs() {
    let service = Service::start(env!("CARGO_BIN_EXE_after")).await;
    let mut beside = beside(&service.database).await;
    sqlx::raw_sql("ALTER TABLE orders.orders RENAME TO gone").execute(&mut beside).await.unwrap();
    assert_eq!(service.order("k", r#"{"item":"pen","quantity":1}"#).0, 500);
    sqlx::raw_sql("ALTER TABLE orders.gone RENAME TO orders").execute(&mut beside).await.unwrap();
    let (status, is_replay, _) = service.order("k", r#"{"item":"pen","quantity":1}"#);
    assert_eq!((status, is_replay), (201, false));
    assert_eq!(service.number("SELECT count(*) FROM orders.orders").await, 1);
}
