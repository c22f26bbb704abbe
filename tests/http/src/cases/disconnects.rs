//! Clients that go away, at five points.

use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use socket2::SockRef;

use crate::client::{Answer, Connection};
use crate::eventually;
use crate::target::Target;

type Leave = fn(TcpStream);

/// How a client leaves.
const WAYS: [(&str, Leave); 3] = [("FIN", drop), ("RST", reset), ("half-close", half_close)];

fn reset(stream: TcpStream) {
    // Closing with a linger of zero sends RST instead of FIN.
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
}

fn half_close(stream: TcpStream) {
    stream.shutdown(Shutdown::Write).unwrap();
    // Read to the end, as a client does that still wants its answer. Not every server takes it for one.
    let _ = Answer::read(stream, "POST");
}

/// The retry of a client that left gets the replay, and money moved once for each key.
fn retry_gets_the_replay(target: &Target, key: &str, payments: u64) {
    let retry = target.send(&target.pay(key).waiting());
    assert_eq!((retry.status, retry.is_replay()), (201, true), "{key}: {retry:?}");
    assert_eq!(target.effects(), payments, "{key}");
}

pub(super) fn a_client_that_leaves_during_its_upload_leaves_nothing_behind(target: &Target) {
    for (way, leave) in WAYS {
        leave(target.pay(way).begin_part(target.address(), 10));
        // A record would make this a mismatch.
        let other = target.send(&target.pay(way).body(crate::PAYMENT.replace("1250", "1")));
        assert_eq!((other.status, other.is_replay()), (201, false), "{way}");
    }
    assert_eq!(target.effects(), WAYS.len() as u64);
}

pub(super) fn a_client_that_leaves_before_the_effect_finds_its_payment_made_once(target: &Target) {
    for ((way, leave), payments) in WAYS.into_iter().zip(1..) {
        let stream = target.pay(way).simulate("delay-before=500").begin(target.address());
        target.await_run();
        leave(stream);
        retry_gets_the_replay(target, way, payments);
    }
}

pub(super) fn a_client_that_leaves_after_the_effect_finds_its_payment_made_once(target: &Target) {
    for ((way, leave), payments) in WAYS.into_iter().zip(1..) {
        let stream = target.pay(way).simulate("delay-after=500").begin(target.address());
        target.await_effect();
        leave(stream);
        retry_gets_the_replay(target, way, payments);
    }
}

pub(super) fn a_client_that_leaves_after_the_settlement_finds_its_answer(target: &Target) {
    for ((way, leave), payments) in WAYS.into_iter().zip(1..) {
        let stream = target.pay(way).simulate("delay-answer=1000").begin(target.address());
        eventually("the effect", || (target.effects() == payments).then_some(()));
        leave(stream);
        retry_gets_the_replay(target, way, payments);
    }
}

pub(super) fn a_client_that_leaves_during_its_answer_finds_that_it_was_made(target: &Target) {
    for ((way, leave), payments) in WAYS.into_iter().take(2).zip(1..) {
        let mut connection = Connection::open(target.address());
        connection.write(&target.pay(way).simulate("stream=20000000").to_bytes());
        assert_eq!(connection.head().unwrap().status, 201);
        leave(connection.into_stream());
        let retry = target.send(&target.pay(way));
        assert_eq!((retry.status, retry.problem().as_deref()), (410, Some("body-not-retained")), "{way}");
        assert_eq!(target.effects(), payments);
    }
}
