//! Clients that disconnect, and servers that stop, while a handler runs.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use actix_web::dev::{ServerHandle, Service};
use actix_web::test::init_service;
use actix_web::{App, HttpResponse, HttpServer, rt, web};
use idem_actix::{IdempotencyLayer, ProblemKind, SingleTenant};
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::support::{PATIENCE, Runs, at_most_once, eventually, post, send};

/// A server with one worker. Its handler signals that it has begun, and waits at a gate.
struct World {
    layer: IdempotencyLayer<SingleTenant>,
    address: SocketAddr,
    server: ServerHandle,
    began: Arc<Semaphore>,
    /// A permit for each request that ended outside of the layer, answered or not.
    ended: Arc<Semaphore>,
    gate: Arc<Semaphore>,
    runs: Runs,
}

impl World {
    fn new() -> Self {
        Self::with(at_most_once(), &Runs::default())
    }

    fn with(layer: IdempotencyLayer<SingleTenant>, runs: &Runs) -> Self {
        let [began, ended, gate] = [0; 3].map(|none| Arc::new(Semaphore::new(none)));
        let (app_layer, app_runs) = (layer.clone(), runs.clone());
        let (app_began, app_ended, app_gate) = (Arc::clone(&began), Arc::clone(&ended), Arc::clone(&gate));
        let app = move || {
            let (runs, began, gate) = (app_runs.clone(), Arc::clone(&app_began), Arc::clone(&app_gate));
            let handler = move || handle(runs.clone(), Arc::clone(&began), Arc::clone(&gate));
            let ended = Arc::clone(&app_ended);
            App::new().wrap(app_layer.clone()).route("/p", web::post().to(handler)).wrap_fn(move |request, inner| {
                let (answered, end) = (inner.call(request), End(Arc::clone(&ended)));
                async move {
                    let _end = end;
                    answered.await
                }
            })
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = HttpServer::new(app).workers(1).disable_signals().shutdown_timeout(30).listen(listener);
        let server = server.unwrap().run();
        let handle = server.handle();
        rt::spawn(server);
        Self { layer, address, server: handle, began, ended, gate, runs: runs.clone() }
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

    /// Returns when a request has ended outside of the layer.
    async fn end(&self) {
        rt::time::timeout(PATIENCE, self.ended.acquire()).await.unwrap().unwrap().forget();
    }

    /// Returns when the worker has handled all earlier events of its connections; fails if it ended one of their requests.
    /// The worker is one thread that gets events in order, and this request takes several.
    async fn see(&self) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n").await.unwrap();
        assert!(read(stream).await.starts_with("HTTP/1.1 404 "));
        self.end().await;
        assert_eq!(self.ended.available_permits(), 0);
    }

    /// The answer of a repeat that waits.
    async fn repeat(&self) -> String {
        read(self.post("prefer: wait=30\r\n").await).await
    }
}

/// Dropped with the request, or with the connection.
struct End(Arc<Semaphore>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.add_permits(1);
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
    for (leave, is_dropped) in [(drop as fn(TcpStream), false), (reset, true)] {
        let world = World::new();
        leave(world.begin().await);
        // Actix drops the request of a connection that was reset, and continues the one of a connection that was closed.
        if is_dropped {
            world.end().await;
        } else {
            world.see().await;
        }
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
    let (layer, gate) = (world.layer.clone(), Arc::clone(&world.gate));
    let opened = rt::spawn(async move {
        // Until the shutdown begins, the operation is in progress. After that, the engine asks the store no more.
        let app = init_service(App::new().wrap(layer).route("/p", web::post().to(HttpResponse::Ok))).await;
        let refused = eventually("the shutdown", async || {
            Some(send(&app, post("/p", "k")).await).filter(|answer| answer.problem != Some(ProblemKind::InProgress))
        });
        refused.await.assert_problem(ProblemKind::ShuttingDown);
        gate.add_permits(1);
    });
    world.server.pause().await;
    world.layer.engine().shutdown(PATIENCE).await.unwrap();
    assert_eq!(world.runs.count(), 1, "the handler was awaited");
    world.server.stop(true).await;
    opened.await.unwrap();
}
