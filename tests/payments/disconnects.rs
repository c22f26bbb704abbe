//! Servers that get SIGTERM during payments, whose clients stay or have left.

use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use socket2::SockRef;

use crate::support::{Answer, Contract, Request, Server, Setup, eventually, on_every_backend};

on_every_backend! {
    a_server_that_is_told_to_stop_first_makes_the_payments_of_clients_that_left,
    a_server_that_is_told_to_stop_answers_the_clients_that_stay,
    a_server_that_is_told_to_stop_twice_stops_at_once,
}

type Leave = fn(TcpStream);

/// The ways in which a client leaves.
const WAYS: [(&str, Leave); 3] = [("FIN", drop), ("RST", reset), ("half-close", half_close)];

fn reset(stream: TcpStream) {
    // Closing with a linger of zero sends RST instead of FIN.
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
}

fn half_close(stream: TcpStream) {
    stream.shutdown(Shutdown::Write).unwrap();
    // Read to the end, like a client that still wants its answer.
    let _ = Answer::read(stream, "POST");
}

/// The retry of a client that left gets the replay, and money moved once.
fn retry_gets_the_replay(server: &Server, what: &str) {
    let retry = server.send(&Request::pay("k").header("Prefer", "wait=20"));
    assert_eq!(retry.status, 201, "{what}");
    assert!(retry.is_replay(), "{what}");
    assert_eq!(server.effects(), 1, "{what}");
}

fn a_server_that_is_told_to_stop_first_makes_the_payments_of_clients_that_left(setup: Setup) {
    for &contract in setup.contracts() {
        for (way, leave) in WAYS {
            let mut server = Server::start_on(setup, contract, &[]);
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

fn a_server_that_is_told_to_stop_answers_the_clients_that_stay(setup: Setup) {
    let mut server = Server::start_on(setup, setup.strongest_contract(), &[]);
    let stream = Request::pay("k").simulate("delay-before=1000").begin(server.address);
    server.await_running();
    server.terminate();
    assert_eq!(Answer::read(stream, "POST").unwrap().status, 201);
    assert_eq!(server.wait().code(), Some(0));
}

fn a_server_that_is_told_to_stop_twice_stops_at_once(setup: Setup) {
    let mut server = Server::start_on(setup, Contract::AtMostOnce, &[]);
    let stream = Request::pay("k").simulate("delay-before=600000").begin(server.address);
    server.await_running();
    server.terminate();
    // From then on the server handles a second signal.
    eventually("the shutdown", || server.log().contains("a second signal ends it at once").then_some(()));
    server.terminate();
    assert_eq!(server.wait().code(), Some(1));
    assert_eq!(Answer::read(stream, "POST"), None);
}
