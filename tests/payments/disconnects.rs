//! Clients that go away while their payment is made.

use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use bytes::Bytes;
use socket2::SockRef;

use crate::support::{Backend, Contract, Request, Server, eventually, on_every_backend};

on_every_backend! {
    a_client_that_leaves_in_the_middle_finds_its_payment_made_once,
    a_server_that_is_told_to_stop_first_makes_the_payments_of_clients_that_left,
    a_server_that_is_told_to_stop_answers_the_clients_that_stay,
    a_server_that_is_told_to_stop_twice_stops_at_once,
    an_http_2_stream_that_is_reset_finds_its_payment_made_once,
}

type Leave = fn(TcpStream);

/// How a client leaves.
const WAYS: [(&str, Leave); 3] = [("FIN", drop), ("RST", reset), ("half-close", half_close)];

fn reset(stream: TcpStream) {
    // Closing with a linger of zero sends RST instead of FIN.
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
}

fn half_close(stream: TcpStream) {
    stream.shutdown(Shutdown::Write).unwrap();
    // Read to the end, as a client does that still wants its answer.
    let _ = crate::support::Answer::read(stream, "POST");
}

/// The retry of a client that left gets the replay, and money moved once.
fn retry_gets_the_replay(server: &Server, what: &str) {
    let retry = server.send(&Request::pay("k").header("Prefer", "wait=20"));
    assert_eq!(retry.status, 201, "{what}");
    assert!(retry.is_replay(), "{what}");
    assert_eq!(server.effects(), 1, "{what}");
}

fn a_client_that_leaves_in_the_middle_finds_its_payment_made_once(backend: Backend) {
    for &contract in backend.contracts() {
        for (way, leave) in WAYS {
            let server = Server::start_on(backend, contract, &[]);
            let stream = Request::pay("k").simulate("delay-before=1000").begin(server.address);
            server.await_running();
            leave(stream);
            retry_gets_the_replay(&server, &format!("{way} under {contract:?}"));
        }
    }
}

fn a_server_that_is_told_to_stop_first_makes_the_payments_of_clients_that_left(backend: Backend) {
    for &contract in backend.contracts() {
        for (way, leave) in WAYS {
            let mut server = Server::start_on(backend, contract, &[]);
            let stream = Request::pay("k").simulate("delay-before=1000").begin(server.address);
            server.await_running();
            server.terminate();
            leave(stream);
            assert_eq!(server.wait().code(), Some(0), "{way} under {contract:?}");
            server.start_again();
            retry_gets_the_replay(&server, &format!("{way} and SIGTERM under {contract:?}"));
        }
    }
}

fn a_server_that_is_told_to_stop_answers_the_clients_that_stay(backend: Backend) {
    let mut server = Server::start_on(backend, backend.strongest_contract(), &[]);
    let stream = Request::pay("k").simulate("delay-before=1000").begin(server.address);
    server.await_running();
    server.terminate();
    assert_eq!(crate::support::Answer::read(stream, "POST").unwrap().status, 201);
    assert_eq!(server.wait().code(), Some(0));
}

fn a_server_that_is_told_to_stop_twice_stops_at_once(backend: Backend) {
    let mut server = Server::start_on(backend, Contract::AtMostOnce, &[]);
    let stream = Request::pay("k").simulate("delay-before=600000").begin(server.address);
    server.await_running();
    server.terminate();
    // A server that drains takes no more connections; from then on the second signal is heard.
    eventually("the end of the listener", || TcpStream::connect(server.address).err());
    server.terminate();
    assert_eq!(server.wait().code(), Some(1));
    assert_eq!(crate::support::Answer::read(stream, "POST"), None);
}

fn an_http_2_stream_that_is_reset_finds_its_payment_made_once(backend: Backend) {
    for &contract in backend.contracts() {
        let server = Server::start_on(backend, contract, &[]);
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let (mut response, _send) = runtime.block_on(begin_http_2(server.address));
        server.await_running();
        runtime.block_on(async {
            // The request is under way: there is no response yet.
            assert!(tokio::time::timeout(Duration::from_millis(1), &mut response).await.is_err());
        });
        drop(response);
        drop(_send);
        retry_gets_the_replay(&server, &format!("RST_STREAM under {contract:?}"));
    }
}

/// Sends the payment over HTTP/2; dropping both handles resets the stream.
async fn begin_http_2(address: SocketAddr) -> (h2::client::ResponseFuture, h2::SendStream<Bytes>) {
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let request = http::Request::post(format!("http://{address}/v1/payments"))
        .header("authorization", "Bearer acme")
        .header("content-type", "application/json")
        .header("idempotency-key", "k")
        .header("x-simulate", "delay-before=1000")
        .body(())
        .unwrap();
    let mut client = client.ready().await.unwrap();
    let (response, mut send) = client.send_request(request, false).unwrap();
    let body = r#"{"amount": 1250, "currency": "EUR", "recipient": "alice"}"#;
    send.send_data(Bytes::from_static(body.as_bytes()), true).unwrap();
    (response, send)
}

#[test]
fn http_2_gets_the_same_answers() {
    let server = Server::start(Contract::Transactional, &[]);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let over_http_2 = || {
        runtime.block_on(async {
            let (response, _send) = begin_http_2(server.address).await;
            let (head, mut body) = response.await.unwrap().into_parts();
            let mut bytes = Vec::new();
            while let Some(chunk) = body.data().await {
                bytes.extend(chunk.unwrap());
            }
            (head.status.as_u16(), head.headers.contains_key("idempotency-replayed"), bytes)
        })
    };
    let (first, again) = (over_http_2(), over_http_2());
    assert_eq!((first.0, first.1), (201, false));
    assert_eq!((again.0, again.1), (201, true));
    assert_eq!(first.2, again.2);
    let over_http_1 = server.send(&Request::pay("k"));
    assert!(over_http_1.is_replay());
    assert_eq!(over_http_1.body, first.2);
    assert_eq!(server.effects(), 1);
}
