//! The consumer as a process, which is killed.

#![expect(clippy::unwrap_used, reason = "a test panics where it fails")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::jetstream;
use idem_servers::{Nats, Postgres};
use sqlx::{Connection as _, PgConnection, Row as _};
use tokio::time::{sleep, timeout};

const PATIENCE: Duration = Duration::from_secs(90);

struct Servers {
    nats: Nats,
    postgres: Postgres,
}

impl Servers {
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_consumer"));
        command.args(["--nats", &self.nats.url(), "--postgres", &self.postgres.url()]).args(words);
        command
    }

    /// Starts the consumer, and waits until it consumes.
    fn consume(&self) -> Child {
        let mut process = self.command(&[]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "consuming\n");
        process
    }

    fn output(&self, words: &[&str]) -> String {
        String::from_utf8(self.command(words).output().unwrap().stdout).unwrap()
    }

    /// The number of bookings, and of different ones.
    async fn bookings(&self) -> (i64, i64) {
        let mut connection = PgConnection::connect(&self.postgres.url()).await.unwrap();
        let count = "SELECT count(*), count(DISTINCT invoice) FROM billing.bookings";
        let row = sqlx::query(count).fetch_one(&mut connection).await.unwrap();
        (row.get(0), row.get(1))
    }

    async fn reach(&self, bookings: i64) {
        let reached = async {
            while self.bookings().await.0 < bookings {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(PATIENCE, reached).await.unwrap();
    }
}

async fn publish(context: &jetstream::Context, number: u32, payload: String) {
    let mut headers = HeaderMap::new();
    headers.insert("Nats-Msg-Id", format!("i-{number}").as_str());
    let sent = context.publish_with_headers(format!("invoices.{number}"), headers, payload.into());
    sent.await.unwrap().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_invoice_is_booked_once_and_unreadable_ones_are_parked_and_replayed() {
    let servers = Servers { nats: Nats::start().unwrap(), postgres: Postgres::start().unwrap() };
    let mut process = servers.consume();
    let context = jetstream::new(async_nats::connect(servers.nats.url()).await.unwrap());
    for number in 0..300 {
        publish(&context, number, format!(r#"{{"cents":{number}}}"#)).await;
    }
    servers.reach(50).await;
    process.kill().unwrap();
    process.wait().unwrap();
    let mut process = servers.consume();
    servers.reach(300).await;
    assert_eq!(servers.bookings().await, (300, 300));

    publish(&context, 300, "not JSON".into()).await;
    let parked = async {
        loop {
            let parked = servers.output(&["parked"]);
            if !parked.is_empty() {
                return parked;
            }
            sleep(Duration::from_millis(100)).await;
        }
    };
    let parked = timeout(PATIENCE, parked).await.unwrap();
    let (key, rest) = parked.split_once('\t').unwrap();
    assert!(rest.starts_with("invoices.300\tfailed: expected ident"), "{parked}");
    assert_eq!(servers.output(&["replay", key]), "requested\n");
    let replayed = async {
        while servers.output(&["replay", key]) != "requested\n" {
            sleep(Duration::from_millis(100)).await;
        }
    };
    timeout(PATIENCE, replayed).await.expect("it is parked again, and can be requested again");
    assert_eq!(servers.output(&["replay", "i-7"]), "not parked\n");
    let stopped = Command::new("kill").arg(process.id().to_string()).status().unwrap();
    assert!(stopped.success());
    assert!(process.wait().unwrap().success(), "it stops when it is asked to");
}
