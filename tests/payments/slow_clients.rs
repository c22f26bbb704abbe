//! Slow clients, which the server disconnects.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use crate::support::{Contract, Framework, Request, Server, Setup, eventually, on_every_backend, on_every_framework};

on_every_framework! {
    a_head_that_never_ends_ends_its_connection,
    a_connection_without_a_further_request_ends,
    a_body_that_is_still_being_read_is_not_given_up,
}

// actix-web has no write timeout. The system's timeout replaces it, but does not end every such client.
on_every_backend!(@ axum_alone Axum Sqlite: a_client_that_does_not_read_is_given_up,);

/// The limit of the servers here.
const LIMIT: Duration = Duration::from_secs(2);

/// Far above the limit, so that reaching it is a failure.
const PATIENCE: Duration = Duration::from_secs(30);

fn server(setup: Setup) -> Server {
    Server::start_on(setup, Contract::AtMostOnce, &["--client-timeout-ms", "2000"])
}

fn connect(server: &Server) -> TcpStream {
    let stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Reads until the server ends the connection, by FIN or RST, and returns what came.
fn read_to_the_end(mut stream: TcpStream, what: &str) -> String {
    let mut read = Vec::new();
    if let Err(error) = stream.read_to_end(&mut read) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{what}: the connection is open still: {error}");
    }
    String::from_utf8_lossy(&read).into_owned()
}

fn a_head_that_never_ends_ends_its_connection(setup: Setup) {
    let server = server(setup);
    let whole = "POST /v1/payments HTTP/1.1\r\nHost: test\r\n";
    let preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let mut heads = vec!["P", "POST /v1/payments", whole, &preface[..16], preface];
    if setup.framework == Framework::Axum {
        // actix-web waits for the first byte without a limit.
        heads.push("");
    }
    // All at once, because each one takes as long as the limit.
    let began = Instant::now();
    let streams: Vec<_> = heads
        .iter()
        .map(|head| {
            let mut stream = connect(&server);
            stream.write_all(head.as_bytes()).unwrap();
            stream
        })
        .collect();
    for (stream, head) in streams.into_iter().zip(heads) {
        let answer = read_to_the_end(stream, head);
        let is_refused = answer.is_empty() || answer.starts_with("HTTP/1.1 408 ");
        assert!(is_refused || head.starts_with("PRI"), "{head:?}: {answer}");
    }
    assert!(began.elapsed() >= LIMIT, "they had no time");
    assert_eq!(server.send(&Request::pay("k")).status, 201);
}

fn a_connection_without_a_further_request_ends(setup: Setup) {
    let server = server(setup);
    for further in ["", "POST /v1/payments HTTP/1.1\r\n"] {
        let mut stream = connect(&server);
        stream.write_all(&Request::pay(&format!("k{}", further.len())).to_bytes()).unwrap();
        eventually("the payment", || (server.effects() > 0).then_some(()));
        stream.write_all(further.as_bytes()).unwrap();
        let answer = read_to_the_end(stream, further);
        assert!(answer.starts_with("HTTP/1.1 201 "), "{answer}");
    }
}

/// A client with a small receive buffer.
fn small_reader(address: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None).unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket.connect(&address.into()).unwrap();
    socket.into()
}

/// Whether the server has not closed the connection. The system may keep a closed one for a while, because of unread bytes.
fn is_open(server: SocketAddr, client: SocketAddr) -> bool {
    let port = |address: &str| u16::from_str_radix(address.rsplit(':').next()?, 16).ok();
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    table.lines().skip(1).any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_established = fields[3] == "01";
        (port(fields[1]), port(fields[2]), is_established) == (Some(server.port()), Some(client.port()), true)
    })
}

fn a_client_that_does_not_read_is_given_up(setup: Setup) {
    let server = server(setup);
    let mut stream = connect(&server);
    stream.write_all(&Request::pay("k").simulate("stream=20000000").to_bytes()).unwrap();
    let client = stream.local_addr().unwrap();
    eventually("the payment", || (server.effects() == 1).then_some(()));
    assert!(is_open(server.address, client));
    let began = Instant::now();
    eventually("the end of the connection", || (!is_open(server.address, client)).then_some(()));
    assert!(began.elapsed() < PATIENCE);
    assert_eq!(server.send(&Request::pay("k")).problem().as_deref(), Some("body-not-retained"), "it was made");
}

fn a_body_that_is_still_being_read_is_not_given_up(setup: Setup) {
    const BYTES: usize = 2_000_000;
    let server = server(setup);
    let mut stream = small_reader(server.address);
    let request = Request::pay("k").simulate(&format!("stream={BYTES}")).set("Connection", "close");
    stream.write_all(&request.to_bytes()).unwrap();
    // Longer than the limit in total, but never that long without a byte.
    let (began, mut read, mut buffer) = (Instant::now(), 0, vec![0; BYTES / 40]);
    loop {
        let length = stream.read(&mut buffer).unwrap();
        read += length;
        if length == 0 {
            break;
        }
        if began.elapsed() < LIMIT * 2 {
            std::thread::sleep(LIMIT / 20);
        }
    }
    assert!(read > BYTES && began.elapsed() > LIMIT, "{read} bytes in {:?}", began.elapsed());
}
