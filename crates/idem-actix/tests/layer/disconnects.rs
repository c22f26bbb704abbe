//! Clients that go away, and servers that stop, while a handler runs.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use actix_web::dev::ServerHandle;
use actix_web::{App, HttpResponse, HttpServer, rt, web};
use idem_actix::{IdempotencyLayer, SingleTenant};
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::support::{PATIENCE, Runs, at_most_once};

/// A server with one worker, whose handler says that it has begun and waits at a gate.
struct World {
    layer: IdempotencyLayer<SingleTenant>,
    address: SocketAddr,
    server: ServerHandle,
    began: Arc<Semaphore>,
    gate: Arc<Semaphore>,
    runs: Runs,
}

impl World {
    fn new() -> Self {
        Self::with(at_most_once(), &Runs::default())
    }

    fn with(layer: IdempotencyLayer<SingleTenant>, runs: &Runs) -> Self {
        let (began, gate) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        let (app_layer, app_runs) = (layer.clone(), runs.clone());
        let (app_began, app_gate) = (Arc::clone(&began), Arc::clone(&gate));
        let app = move || {
            let (runs, began, gate) = (app_runs.clone(), Arc::clone(&app_began), Arc::clone(&app_gate));
            let handler = move || handle(runs.clone(), Arc::clone(&began), Arc::clone(&gate));
            App::new().wrap(app_layer.clone()).route("/p", web::post().to(handler))
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = HttpServer::new(app).workers(1).disable_signals().shutdown_timeout(30).listen(listener);
        let server = server.unwrap().run();
        let handle = server.handle();
        rt::spawn(server);
        Self { layer, address, server: handle, began, gate, runs: runs.clone() }
    }

    /// Sends a POST, and returns when the handler has begun.
    async fn begin(&self) -> TcpStream {
        let stream = self.post("").await;
        rt::time::timeout(PATIENCE, self.began.acquire()).await.unwrap().unwrap().forget();
        stream
    }

    async fn post(&self, lines: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let head = format!("POST /p HTTP/1.1\r\nhost: test\r\nidempotency-key: k\r\nconnection: close\r\n{lines}\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        stream
    }

    /// The answer of a repeat that waits.
    async fn repeat(&self) -> String {
        read(self.post("prefer: wait=30\r\n").await).await
    }
}

async fn handle(runs: Runs, began: Arc<Semaphore>, gate: Arc<Semaphore>) -> HttpResponse {
    began.add_permits(1);
    gate.acquire().await.unwrap().forget();
    runs.answer()
}

async fn read(mut stream: TcpStream) -> String {
    let mut read = Vec::new();
    // A reset ends the connection as well; what arrived before it counts.
    let _ = rt::time::timeout(PATIENCE, stream.read_to_end(&mut read)).await.expect("the connection stays open");
    String::from_utf8(read).unwrap()
}

fn reset(stream: TcpStream) {
    // Closing with a linger of zero sends RST instead of FIN.
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
}

#[track_caller]
fn assert_replay(answer: &str) {
    assert!(answer.starts_with("HTTP/1.1 201 ") && answer.contains("idempotency-replayed: true\r\n"), "{answer}");
    assert!(answer.ends_with("run 1"), "{answer}");
}

#[actix_web::test]
async fn a_client_that_leaves_in_the_middle_finds_its_answer() {
    for leave in [drop, reset] {
        let world = World::new();
        leave(world.begin().await);
        // The server notices meanwhile, as it reads what comes next.
        rt::time::sleep(Duration::from_millis(50)).await;
        world.gate.add_permits(1);
        assert_replay(&world.repeat().await);
        assert_eq!(world.runs.count(), 1);
        world.server.stop(false).await;
    }
}

#[actix_web::test]
async fn a_half_closed_client_still_gets_its_answer() {
    let world = World::new();
    let mut stream = world.begin().await;
    stream.shutdown().await.unwrap();
    world.gate.add_permits(1);
    let answer = read(stream).await;
    assert!(answer.starts_with("HTTP/1.1 201 ") && !answer.contains("idempotency-replayed"), "{answer}");
    world.server.stop(false).await;
}

#[actix_web::test]
async fn an_engine_that_is_shut_down_before_the_workers_stop_settles_what_left_clients_began() {
    let world = World::new();
    reset(world.begin().await);
    let gate = Arc::clone(&world.gate);
    let opened = rt::spawn(async move {
        rt::time::sleep(Duration::from_millis(200)).await;
        gate.add_permits(1);
    });
    world.server.pause().await;
    world.layer.engine().shutdown().await;
    assert_eq!(world.runs.count(), 1, "the handler was awaited");
    world.server.stop(true).await;
    opened.await.unwrap();
}
