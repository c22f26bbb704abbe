//! The programs as a user starts them: each request has one effect.
#![expect(clippy::unwrap_used, reason = "a test says what it expects by failing")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::SystemTime;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions as _, PgConnection, SqlitePool};

/// A program that listens.
struct Server {
    process: Child,
    output: BufReader<ChildStdout>,
    port: u16,
}

impl Server {
    fn start(command: &mut Command) -> Self {
        let mut process = command.env("LISTEN", "127.0.0.1:0").stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let port = line.trim().rsplit(':').next().unwrap().parse().unwrap();
        Self { process, output, port }
    }

    /// Sends a POST, and returns the status, whether it is a replay, and the body.
    fn post(&self, path: &str, headers: &str, body: &str) -> (u16, bool, String) {
        let length = body.len();
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        write!(
            stream,
            "POST {path} HTTP/1.1\r\nHost: small\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, head.contains("\r\nidempotency-replayed: true"), body.to_owned())
    }

    /// Ends it as Ctrl-C does, and returns what it has printed since its start.
    fn interrupt(mut self) -> String {
        let interrupted = Command::new("kill").args(["-INT", &self.process.id().to_string()]).status().unwrap();
        assert!(interrupted.success());
        let mut printed = String::new();
        self.output.read_to_string(&mut printed).unwrap();
        assert!(self.process.wait().unwrap().success(), "it ends in order");
        printed
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

async fn postgres(database: &str) -> PgConnection {
    let options: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    options.database(database).disable_statement_logging().connect().await.unwrap()
}

async fn count(file: &Path, sql: &'static str) -> i64 {
    let pool = SqlitePool::connect(&format!("sqlite://{}", file.display())).await.unwrap();
    sqlx::query_scalar(sql).fetch_one(&pool).await.unwrap()
}

#[tokio::test]
async fn axum_postgres_pays_once() {
    let database = format!("small_{}", uuid::Uuid::new_v4().simple());
    let create = format!("CREATE DATABASE {database}");
    sqlx::raw_sql(AssertSqlSafe(create)).execute(&mut postgres("postgres").await).await.unwrap();
    let server: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    let url = format!("postgres://postgres@127.0.0.1:{}/{database}", server.get_port());
    let server = Server::start(Command::new(env!("CARGO_BIN_EXE_axum-postgres")).env("DATABASE_URL", url));
    let account = "Authorization: Bearer token-of-acme\r\nContent-Type: application/json\r\n";
    let headers = format!("{account}Idempotency-Key: \"order-4711\"\r\n");
    let paid = server.post("/payments", &headers, r#"{"amount":1250}"#);
    assert_eq!((paid.0, paid.1), (201, false), "{paid:?}");
    assert_eq!(server.post("/payments", &headers, r#"{"amount":1250}"#), (201, true, paid.2));
    assert_eq!(server.post("/payments", &headers, r#"{"amount":1251}"#).0, 422);
    assert_eq!(server.post("/payments", account, r#"{"amount":1250}"#).0, 400);
    assert_eq!(server.post("/payments", "Idempotency-Key: \"order-4711\"\r\n", "{}").0, 401);
    server.interrupt();
    let payments = sqlx::query_scalar("SELECT count(*) FROM payments").fetch_one(&mut postgres(&database).await).await;
    assert_eq!(payments.map(|count: i64| count).unwrap(), 1);
    let drop_it = format!("DROP DATABASE {database} WITH (FORCE)");
    sqlx::raw_sql(AssertSqlSafe(drop_it)).execute(&mut postgres("postgres").await).await.unwrap();
}

#[test]
fn actix_redis_notifies_once() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_actix-redis"));
    let server = Server::start(command.env("REDIS_URL", idem_servers::redis_url()));
    let key = format!("Idempotency-Key: \"{}\"\r\n", uuid::Uuid::new_v4());
    assert_eq!(server.post("/notifications", &key, "shipped"), (202, false, "sent".to_owned()));
    assert_eq!(server.post("/notifications", &key, "shipped"), (202, true, "sent".to_owned()));
    let printed = server.interrupt();
    assert_eq!(printed.matches("attempt 1: \"shipped\" with the key ").count(), 1, "{printed}");
}

fn import(file: &Path, lines: &str) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_background-function"));
    let mut process =
        command.arg(file).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    process.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    process
}

#[tokio::test]
async fn a_background_function_imports_each_line_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("shop.db");
    let lines: String = (0..20).map(|number| format!("order-{number},1250\n")).collect();
    let first = import(&file, &lines[..lines.find("order-5").unwrap()]).wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&first.stdout), "5 imported, 0 imported before\n", "{first:?}");
    // Two imports at once.
    let both = [import(&file, &lines), import(&file, &lines)].map(|process| process.wait_with_output().unwrap());
    let imported = both.map(|output| {
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().split(' ').next().unwrap().parse::<u32>().unwrap()
    });
    assert_eq!(imported.iter().sum::<u32>(), 15, "{imported:?}");
    let changed = import(&file, "order-1,1\nnothing\n").wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&changed.stderr);
    assert!(told.contains("order-1 was imported with another amount"), "{told}");
    assert!(told.contains("is not NUMBER,AMOUNT") && !changed.status.success(), "{told}");
    assert_eq!(count(&file, "SELECT count(*) FROM orders").await, 20);
    assert_eq!(count(&file, "SELECT sum(amount) FROM orders").await, 20 * 1250);
}

#[tokio::test]
async fn a_webhook_receiver_handles_each_event_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("events.db");
    let mut command = Command::new(env!("CARGO_BIN_EXE_webhook-receiver"));
    let server = Server::start(command.arg(&file).env("WEBHOOK_SECRET", "secret"));
    let deliver = |secret: &str, event: &str| {
        let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).unwrap();
        mac.update(event.as_bytes());
        let signature = hex::encode(mac.finalize().into_bytes());
        let headers = format!("Content-Type: application/json\r\nX-Signature: {signature}\r\n");
        let (status, is_replay, _) = server.post("/events", &headers, event);
        (status, is_replay)
    };
    let event = r#"{"id":"evt_1","kind":"paid"}"#;
    // A stranger does not use up the id.
    assert_eq!(deliver("guess", r#"{"id":"evt_1","kind":"stolen"}"#), (401, false));
    assert_eq!(deliver("secret", event), (204, false));
    assert_eq!(deliver("secret", event), (204, true));
    assert_eq!(deliver("secret", r#"{"kind":"without an id"}"#).0, 400);
    server.interrupt();
    assert_eq!(count(&file, "SELECT count(*) FROM events WHERE kind = 'paid'").await, 1);
    assert_eq!(count(&file, "SELECT count(*) FROM events").await, 1);
}

#[tokio::test]
async fn signed_webhooks_handles_each_event_of_each_sender_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("events.db");
    let (acme, globex) = ("the secret of acme, of 32 bytes.", "the secret of globex, also long.");
    let secrets = [("acme", acme), ("globex", globex)]
        .map(|(sender, secret)| format!("{sender}=whsec_{}", BASE64_STANDARD.encode(secret)));
    let mut command = Command::new(env!("CARGO_BIN_EXE_signed-webhooks"));
    let server = Server::start(command.arg(&file).env("WEBHOOK_SECRETS", secrets.join(", ")));
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let deliver = |sender: &str, secret: &str, id: &str, time: u64| {
        let event = r#"{"kind":"paid"}"#;
        let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).unwrap();
        mac.update(format!("{id}.{time}.{event}").as_bytes());
        let signature = BASE64_STANDARD.encode(mac.finalize().into_bytes());
        let headers = format!(
            "Content-Type: application/json\r\nwebhook-id: {id}\r\nwebhook-timestamp: {time}\r\n\
             webhook-signature: v1,b2xk v1,{signature}\r\n"
        );
        let (status, is_replay, _) = server.post(&format!("/webhooks/{sender}"), &headers, event);
        (status, is_replay)
    };
    // Neither a stranger nor an old recording uses up the id.
    assert_eq!(deliver("acme", globex, "msg_1", now), (401, false));
    assert_eq!(deliver("acme", acme, "msg_1", now - 600), (401, false));
    assert_eq!(deliver("nobody", acme, "msg_1", now), (401, false));
    assert_eq!(deliver("acme", acme, "msg_1", now), (204, false));
    assert_eq!(deliver("acme", acme, "msg_1", now), (204, true));
    // The same id of another sender is another event.
    assert_eq!(deliver("globex", globex, "msg_1", now), (204, false));
    assert_eq!(deliver("acme", acme, "msg_2", now), (204, false));
    server.interrupt();
    assert_eq!(count(&file, "SELECT count(*) FROM events WHERE sender = 'acme'").await, 2);
    assert_eq!(count(&file, "SELECT count(*) FROM events").await, 3);
}
