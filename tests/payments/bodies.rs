//! Open request bodies: the server memory that they take, and the budget that they share.

use std::net::TcpStream;
use std::path::Path;

use idem_http_suite::{Connection, PAYMENT};

use crate::support::{Contract, Request, Server, Setup, eventually, on_every_framework};

on_every_framework! {
    open_bodies_of_every_kind_take_at_most_twice_their_length_and_none_is_refused,
    one_principal_cannot_take_the_room_of_the_others,
}

/// The length of each body, which is the default limit. Its last byte is sent last.
const LENGTH: usize = 1 << 20;

/// The memory of connections and of the allocator, for bodies of any length.
const ALWAYS_BYTES: u64 = 32 << 20;

/// A kind of body.
struct Kind {
    name: &'static str,
    content_type: &'static str,
    /// How many are open concurrently. Hashing bodies as they arrive is slow in an unoptimised build.
    count: usize,
    body: Vec<u8>,
}

impl Kind {
    fn json(name: &'static str, body: Vec<u8>) -> Self {
        Self { name, content_type: "application/json", count: 240, body }
    }
}

/// Repeats `item` between a beginning and an end, and pads with blanks.
fn filled(begin: &str, item: impl Fn(usize) -> String, end: &str) -> Vec<u8> {
    let mut text = begin.to_owned();
    for at in 0.. {
        let item = item(at);
        if text.len() + item.len() + end.len() > LENGTH {
            break;
        }
        text.push_str(&item);
    }
    text.push_str(&" ".repeat(LENGTH - text.len() - end.len()));
    text.push_str(end);
    text.into_bytes()
}

fn kinds() -> Vec<Kind> {
    let order = PAYMENT.trim_end_matches('}');
    let line = |at| format!(r#"{{"article": "A-{at:06}", "quantity": {at}, "price": "12.50"}}, "#);
    let part = "Content-Disposition: form-data; name=\"a";
    let nested = |_| format!(r#"{}1{},"#, r#"{"b":"#.repeat(126), ",\"a\":1}".repeat(126));
    vec![
        Kind::json("ordinary", filled(&format!("{order}, \"lines\": ["), line, "{}]}")),
        Kind::json("many members", filled("{", |at| format!("\"{at:x}\":1,"), "\"\":1}")),
        Kind::json("the same members", filled("{", |_| "\"\":1,\"a\":1,".to_owned(), "\"\":1}")),
        Kind::json("deep", filled("[", nested, "1]")),
        Kind::json("numbers", filled("[", |_| "1,".to_owned(), "1]")),
        Kind { name: "raw", content_type: "text/plain", count: 48, body: vec![b'x'; LENGTH] },
        Kind {
            name: "parts",
            content_type: "multipart/form-data; boundary=b",
            count: 24,
            body: filled("--b\r\n\r\n", |at| format!("\r\n--b\r\n{part}{at}\"\r\n\r\n"), "\r\n--b--"),
        },
    ]
}

/// Begins to send a body of [`LENGTH`] bytes.
fn open(server: &Server, tenant: &str, content_type: &str, body: &[u8]) -> Connection {
    let head = Request::pay("k").tenant(tenant).set("Content-Type", content_type).head_of(LENGTH);
    let mut connection = Connection::open(server.address);
    connection.write(&head);
    connection.write(body);
    connection
}

/// Waits until the server has read everything, according to the socket queues in `/proc/net/tcp`.
fn await_read(server: &Server) {
    let port = format!(":{:04X}", server.address.port());
    eventually("the server to read what was sent", || {
        let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let of_server = sockets.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
        // The fields are number, local address, remote address, state, and the queues for sending and receiving.
        let mut of_server = of_server.filter(|fields| fields[1].ends_with(&port) || fields[2].ends_with(&port));
        // For a listening socket, state 0A, the queue holds connections instead.
        of_server.all(|fields| fields[3] == "0A" || fields[4] == "00000000:00000000").then_some(())
    });
}

fn resident_bytes(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.process_id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}

/// Whether the server has sent anything or closed the connection.
fn is_answered(connection: Connection) -> bool {
    let stream: TcpStream = connection.into_stream();
    stream.set_nonblocking(true).unwrap();
    stream.peek(&mut [0]).is_ok()
}

fn open_bodies_of_every_kind_take_at_most_twice_their_length_and_none_is_refused(setup: Setup) {
    assert!(Path::new("/proc/net/tcp").exists(), "this test asks Linux about the server");
    for kind in kinds() {
        let server = Server::start_on(setup, Contract::AtMostOnce, &[]);
        let (body, last) = kind.body.split_at(LENGTH - 1);
        let before = resident_bytes(&server);
        let connections = (0..kind.count).map(|at| open(&server, &format!("tenant-{at}"), kind.content_type, body));
        let mut connections: Vec<Connection> = connections.collect();
        await_read(&server);
        let taken = resident_bytes(&server).saturating_sub(before);
        let sent = (kind.count * LENGTH) as u64;
        let shown = format!("{} on {:?}: {} MiB took {} MiB", kind.name, setup.framework, sent >> 20, taken >> 20);
        println!("{shown}");
        assert!(taken <= 2 * sent + ALWAYS_BYTES, "{shown}");
        if kind.name == "ordinary" {
            let mut first = connections.remove(0);
            first.write(last);
            // The application read it, and rejects it as a payment.
            let answer = first.answer("POST").unwrap();
            assert!(answer.problem().is_none() && (400..429).contains(&answer.status), "{answer:?}: {shown}");
        }
        assert_eq!(server.send(&Request::pay("k").tenant("another")).status, 201, "{shown}");
        let answered = connections.into_iter().map(is_answered).filter(|&is_answered| is_answered);
        assert_eq!(answered.count(), 0, "a body below the budget was refused: {shown}");
    }
}

fn one_principal_cannot_take_the_room_of_the_others(setup: Setup) {
    let server = Server::start_on(setup, Contract::AtMostOnce, &[]);
    let body = filled("[", |_| "1,".to_owned(), "1]");
    // A quarter of the budget, except one byte of each body.
    let held: Vec<Connection> =
        (0..64).map(|_| open(&server, "greedy", "application/json", &body[..LENGTH - 1])).collect();
    await_read(&server);
    let more = Request::pay("more").tenant("greedy").body(format!("{PAYMENT}{}", " ".repeat(100)));
    let refused = server.send(&more);
    assert_eq!((refused.status, refused.problem().as_deref()), (429, Some("share-exceeded")), "{refused:?}");
    assert_eq!(refused.retry_after(), Some(1));
    assert_eq!(server.send(&Request::pay("k").tenant("another")).status, 201);
    drop(held);
    let answer = eventually("room for the first principal", || Some(server.send(&more)).filter(|it| it.status != 429));
    assert_eq!(answer.status, 201, "{answer:?}");
}
