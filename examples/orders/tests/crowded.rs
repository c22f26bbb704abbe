//! More slow requests at once than handlers may have transactions: what clients, the log and the gauge say.
#![expect(clippy::unwrap_used, reason = "a test says what it expects by failing")]

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::thread;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;
use idem_axum::IdempotencyLayer;
use idem_postgres::{PostgresConfig, PostgresStore};
use sqlx::postgres::PgConnectOptions;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// What `max_transactions` is by default.
const SLOTS: usize = 16;

#[derive(Clone, Default)]
struct LogLines(Arc<Mutex<Vec<u8>>>);

impl io::Write for LogLines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn request(port: u16, key: usize) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let head = format!("POST /slow HTTP/1.1\r\nHost: slow\r\nIdempotency-Key: k-{key}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn of_forty_slow_requests_sixteen_run_and_the_others_are_told_to_come_later() {
    let log = LogLines::default();
    let lines = log.clone();
    tracing_subscriber::fmt().with_ansi(false).with_writer(move || lines.clone()).init();
    let server: PgConnectOptions = idem_servers::postgres_url().parse().unwrap();
    let schema = format!("crowded_{}", uuid::Uuid::new_v4().simple());
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", server.get_port());
    let store = PostgresStore::open(PostgresConfig::new(url).schema(schema)).await.unwrap();
    let end = Arc::new(Semaphore::new(0));
    let handler = {
        let end = Arc::clone(&end);
        move || async move {
            end.acquire().await.unwrap().forget();
            StatusCode::CREATED
        }
    };
    let layer = IdempotencyLayer::transactional(Arc::new(store.clone())).single_tenant();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move { axum::serve(listener, Router::new().route("/slow", post(handler)).layer(layer)).await });

    let (answered, mut answers) = tokio::sync::mpsc::unbounded_channel();
    for key in 0..40 {
        let answered = answered.clone();
        thread::spawn(move || answered.send((key, request(port, key))));
    }
    // Only the refused ones are answered while the handlers are slow.
    let mut refused = Vec::new();
    while refused.len() < 40 - SLOTS {
        refused.push(answers.recv().await.unwrap());
    }
    let slots = store.transactions();
    assert_eq!((slots.in_use, slots.most, slots.waiting), (16, 16, 0));
    for (_, answer) in &refused {
        assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
        assert!(answer.contains("\r\nretry-after: 1\r\n"), "{answer}");
        assert!(answer.contains("All transactions of the server are in use; nothing ran"), "{answer}");
    }
    end.add_permits(40);
    for _ in 0..SLOTS {
        let (_, answer) = answers.recv().await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 201 "), "{answer}");
    }
    for (key, _) in refused {
        let answer = tokio::task::spawn_blocking(move || request(port, key)).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 201 ") && !answer.contains("idempotency-replayed"), "{answer}");
    }
    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let told = "no transaction was free within 1s: all 16 that max_transactions allows are in use";
    assert_eq!(log.lines().filter(|line| line.contains(told)).count(), 40 - SLOTS, "{log}");
}
