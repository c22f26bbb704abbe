//! Clients that go away, at five points.

use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use socket2::SockRef;

use super::uploads::awaited_upload;
use crate::client::Connection;
use crate::eventually;
use crate::target::Target;

/// How a client leaves; one that has left by half keeps its connection.
type Leave = fn(TcpStream) -> Option<TcpStream>;

const WAYS: [(&str, Leave); 3] = [("FIN", close), ("RST", reset), ("half-close", half_close)];

fn close(stream: TcpStream) -> Option<TcpStream> {
    drop(stream);
    None
}

fn reset(stream: TcpStream) -> Option<TcpStream> {
    // Closing with a linger of zero sends RST instead of FIN.
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
    None
}

fn half_close(stream: TcpStream) -> Option<TcpStream> {
    stream.shutdown(Shutdown::Write).unwrap();
    Some(stream)
}

/// Waits until the server knows that the client is gone, as far as it can know: nobody need notice that a client sends no more.
fn await_departure(target: &Target, way: &str) {
    if way == "RST" {
        target.await_stages("the departure", |stages| stages.open == 0);
    }
}

/// Waits until a payment is settled, whose own answer is held back.
pub(super) fn await_settlement(target: &Target, key: &str) {
    eventually("the settlement", || target.pay(key).send(target.address()).is_replay().then_some(()));
}

/// The retry of a client that left gets the replay, and money moved once for each key.
fn retry_gets_the_replay(target: &Target, key: &str, payments: u64) {
    let retry = target.send(&target.pay(key).waiting());
    assert_eq!((retry.status, retry.is_replay()), (201, true), "{key}: {retry:?}");
    assert_eq!(target.effects(), payments, "{key}");
}

pub(super) fn a_client_that_leaves_during_its_upload_leaves_nothing_behind(target: &Target) {
    for (way, leave) in WAYS {
        let mut connection = awaited_upload(target, way);
        connection.write(&crate::PAYMENT.as_bytes()[..10]);
        let half = leave(connection.into_stream());
        target.await_quiet();
        drop(half);
        // A record would make this a mismatch.
        let other = target.send(&target.pay(way).body(crate::PAYMENT.replace("1250", "1")));
        assert_eq!((other.status, other.is_replay()), (201, false), "{way}");
    }
    assert_eq!(target.effects(), WAYS.len() as u64);
}

pub(super) fn a_client_that_leaves_before_the_effect_finds_its_payment_made_once(target: &Target) {
    for ((way, leave), payments) in WAYS.into_iter().zip(1..) {
        let stream = target.pay(way).simulate("hold-before").begin(target.address());
        target.await_run();
        let half = leave(stream);
        await_departure(target, way);
        target.stays_held();
        target.release();
        retry_gets_the_replay(target, way, payments);
        drop(half);
    }
}

pub(super) fn a_client_that_leaves_after_the_effect_finds_its_payment_made_once(target: &Target) {
    for ((way, leave), payments) in WAYS.into_iter().zip(1..) {
        let stream = target.pay(way).simulate("hold-after").begin(target.address());
        target.await_effect();
        let half = leave(stream);
        await_departure(target, way);
        target.stays_held();
        target.release();
        retry_gets_the_replay(target, way, payments);
        drop(half);
    }
}

pub(super) fn a_client_that_leaves_after_the_settlement_finds_its_answer(target: &Target) {
    for ((way, leave), payments) in WAYS.into_iter().zip(1..) {
        let stream = target.pay(way).simulate("hold-answer").begin(target.address());
        await_settlement(target, way);
        let half = leave(stream);
        retry_gets_the_replay(target, way, payments);
        // A server may have noticed that its client is gone, and hold nothing any more.
        target.release();
        target.await_quiet();
        drop(half);
    }
}

pub(super) fn a_client_that_leaves_during_its_answer_finds_that_it_was_made(target: &Target) {
    for ((way, leave), payments) in WAYS.into_iter().zip(1..) {
        let mut connection = Connection::open(target.address());
        connection.write(&target.pay(way).simulate("stream=20000000").to_bytes());
        assert_eq!(connection.head().unwrap().status, 201);
        let half = leave(connection.into_stream());
        let retry = target.send(&target.pay(way));
        assert_eq!((retry.status, retry.problem().as_deref()), (410, Some("body-not-retained")), "{way}");
        assert_eq!(target.effects(), payments);
        drop(half);
    }
}
