//! The programs are killed at every message that their handlers send: each payment happens once.
#![expect(clippy::unwrap_used, reason = "a test says what it expects by failing")]

use std::io;
use std::process::Stdio;
use std::time::Duration;

use futures_util::StreamExt as _;
use idem_proxy::{Ended, Harm, Proxy};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions as _, PgConnection};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio::sync::{Mutex, Notify};
use tokio::time::timeout;

/// As long as a step may take on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// How many programs are killed at once: they mostly wait for leases.
const AT_ONCE: usize = 6;

/// When the program is killed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum When {
    /// The server never gets the message.
    Before,
    /// The server has executed it, and its answer is not delivered.
    After,
}

/// Stops a handler's connections at one of its messages.
#[derive(Debug)]
struct StopAt {
    message: usize,
    when: When,
    /// The number of messages that handlers have sent.
    sent: Mutex<usize>,
    stopped: Notify,
}

/// A message of a connection, with its type; the start-up message has none.
async fn message(stream: &mut (impl tokio::io::AsyncRead + Unpin), has_type: bool) -> io::Result<Vec<u8>> {
    let mut message = if has_type { vec![stream.read_u8().await?] } else { Vec::new() };
    let length = stream.read_u32().await?;
    message.extend(length.to_be_bytes());
    let begins = message.len();
    message.resize(begins + length as usize - 4, 0);
    stream.read_exact(&mut message[begins..]).await?;
    Ok(message)
}

impl Harm for StopAt {
    async fn carry(&self, client: &mut TcpStream, server: &mut TcpStream) -> io::Result<Ended> {
        let start = message(client, false).await?;
        server.write_all(&start).await?;
        // The store's connections have this application_name, the handler's have none.
        if start.windows(4).any(|window| window == b"idem") {
            tokio::io::copy_bidirectional(client, server).await?;
            return Ok(Ended::Closed);
        }
        let (mut from_client, mut to_client) = client.split();
        let (mut from_server, mut to_server) = server.split();
        let requests = async {
            loop {
                let next = message(&mut from_client, true).await?;
                let mut sent = self.sent.lock().await;
                *sent += 1;
                if *sent == self.message {
                    return Ok::<_, io::Error>(next);
                }
                drop(sent);
                to_server.write_all(&next).await?;
            }
        };
        let stopped_at = tokio::select! {
            next = requests => next?,
            ended = tokio::io::copy(&mut from_server, &mut to_client) => {
                ended?;
                return Ok(Ended::Closed);
            }
        };
        if self.when == When::After {
            to_server.write_all(&stopped_at).await?;
            // Sync, so that a server that waits for the rest of a pipeline executes and answers too.
            to_server.write_all(&[b'S', 0, 0, 0, 4]).await?;
            message(&mut from_server, true).await?;
        }
        self.stopped.notify_one();
        // Until the program is killed.
        from_client.read_to_end(&mut Vec::new()).await?;
        Ok(Ended::Closed)
    }
}

async fn connection(database: &str) -> PgConnection {
    let options: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    options.database(database).disable_statement_logging().connect().await.unwrap()
}

async fn number(database: &str, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(&mut connection(database).await).await.unwrap()
}

/// A database with a table of payments.
async fn new_database() -> String {
    let name = format!("drivers_{}", uuid::Uuid::new_v4().simple());
    let create = format!("CREATE DATABASE {name}");
    sqlx::raw_sql(AssertSqlSafe(create)).execute(&mut connection("postgres").await).await.unwrap();
    let create = "CREATE TABLE payments (id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, amount BIGINT NOT NULL)";
    sqlx::raw_sql(create).execute(&mut connection(&name).await).await.unwrap();
    name
}

fn pay(program: &str, database: &str, port: u16, order: &str) -> Command {
    let mut command = Command::new(program);
    command.args([order, "1250"]).env("DATABASE_URL", format!("postgres://postgres@127.0.0.1:{port}/{database}"));
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command
}

/// Kills the program at a message, runs it again, and returns whether it got as far as that message.
async fn kill_at(program: &str, database: &str, message: usize, when: When) -> bool {
    let server: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    let harm = StopAt { message, when, sent: Mutex::new(0), stopped: Notify::new() };
    let proxy = Proxy::start("127.0.0.1", server.get_port(), harm).await.unwrap();
    let order = format!("order-{message}-{when:?}");
    let mut killed = pay(program, database, proxy.port(), &order).spawn().unwrap();
    let is_stopped = timeout(PATIENCE, async {
        tokio::select! {
            () = proxy.stopped.notified() => true,
            ended = killed.wait() => {
                assert!(ended.unwrap().success());
                false
            }
        }
    });
    let is_stopped = is_stopped.await.unwrap();
    if is_stopped {
        // It may have ended, if it did not wait for the answer.
        let _ = killed.start_kill();
        killed.wait().await.unwrap();
    }
    drop(proxy);
    let mut answers = Vec::new();
    for _ in 0..2 {
        let again = pay(program, database, server.get_port(), &order).output();
        let again = timeout(PATIENCE, again).await.unwrap().unwrap();
        assert!(again.status.success(), "{message} {when:?}: {}", String::from_utf8_lossy(&again.stderr));
        answers.push(String::from_utf8(again.stdout).unwrap());
    }
    assert_eq!(answers[0], answers[1], "{message} {when:?}");
    assert!(answers[0].starts_with("payment "), "{message} {when:?}: {answers:?}");
    is_stopped
}

async fn is_killed_at_every_message(program: &str) {
    let database = new_database().await;
    // The first message after the start-up, and so on, until the program ends before it has sent so many.
    let (mut next, mut last) = (1, None);
    while last.is_none() {
        assert!(next < 100, "it does not end");
        let messages = (next..next + AT_ONCE).flat_map(|message| [(message, When::Before), (message, When::After)]);
        let kills = messages.map(|(message, when)| {
            let database = &database;
            async move { (message, kill_at(program, database, message, when).await) }
        });
        let ends: Vec<_> = futures_util::stream::iter(kills).buffer_unordered(AT_ONCE).collect().await;
        last = ends.iter().filter(|(_, is_stopped)| !is_stopped).map(|(message, _)| *message).min();
        next += AT_ONCE;
    }
    println!("{program}: killed before and after each of {} messages", last.unwrap() - 1);
    // At least BEGIN, INSERT, the settlement and COMMIT.
    assert!(last.unwrap() > 4, "{last:?}");
    let orders = i64::try_from(2 * (next - 1)).unwrap();
    assert_eq!(number(&database, "SELECT count(*) FROM payments").await, orders);
    assert_eq!(number(&database, "SELECT count(*) FROM idem.idem_records WHERE state = 2").await, orders);
    let drop_it = format!("DROP DATABASE {database} WITH (FORCE)");
    sqlx::raw_sql(AssertSqlSafe(drop_it)).execute(&mut connection("postgres").await).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokio_postgres_pays_once() {
    is_killed_at_every_message(env!("CARGO_BIN_EXE_tokio-postgres")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn diesel_async_pays_once() {
    is_killed_at_every_message(env!("CARGO_BIN_EXE_diesel-async")).await;
}
