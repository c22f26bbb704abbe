//! Clients that disconnect at five points.

use super::uploads::awaited_upload;
use crate::eventually;
use crate::exchange::{Leave, Protocol};
use crate::target::Target;

/// Waits until the server knows that the client is gone, if it can know. A server need not notice that a client sends no more,
/// nor that a stream is reset before there is something to send on it.
fn await_departure(target: &Target, way: Leave) {
    if (target.protocol(), way) == (Protocol::Http1, Leave::Reset) {
        target.await_stages("the departure", |stages| stages.open == 0);
    }
}

/// Waits until a payment is settled whose own answer is held back.
pub(super) fn await_settlement(target: &Target, key: &str) {
    eventually("the settlement", || target.ask(&target.pay(key)).is_replay().then_some(()));
}

/// The retry of a client that left gets the replay, and money moved once for each key.
fn retry_gets_the_replay(target: &Target, key: &str, payments: u64) {
    let retry = target.send(&target.pay(key).waiting());
    assert_eq!((retry.status, retry.is_replay()), (201, true), "{key}: {retry:?}");
    assert_eq!(target.effects(), payments, "{key}");
}

pub(super) fn a_client_that_leaves_during_its_upload_leaves_nothing_behind(target: &Target) {
    for way in target.protocol().ways_to_leave() {
        let mut connection = awaited_upload(target, way.name());
        connection.write(&crate::PAYMENT.as_bytes()[..10]);
        let half = connection.leave(way);
        target.await_quiet();
        drop(half);
        // A record would make this a mismatch.
        let other = target.send(&target.pay(way.name()).body(crate::PAYMENT.replace("1250", "1")));
        assert_eq!((other.status, other.is_replay()), (201, false), "{way:?}");
    }
    assert_eq!(target.effects(), 3);
}

pub(super) fn a_client_that_leaves_before_the_effect_finds_its_payment_made_once(target: &Target) {
    for (way, payments) in target.protocol().ways_to_leave().into_iter().zip(1..) {
        let stream = target.begin(&target.pay(way.name()).simulate("hold-before"));
        target.await_run();
        let half = stream.leave(way);
        await_departure(target, way);
        target.stays_held();
        target.release();
        retry_gets_the_replay(target, way.name(), payments);
        drop(half);
    }
}

pub(super) fn a_client_that_leaves_after_the_effect_finds_its_payment_made_once(target: &Target) {
    for (way, payments) in target.protocol().ways_to_leave().into_iter().zip(1..) {
        let stream = target.begin(&target.pay(way.name()).simulate("hold-after"));
        target.await_effect();
        let half = stream.leave(way);
        await_departure(target, way);
        target.stays_held();
        target.release();
        retry_gets_the_replay(target, way.name(), payments);
        drop(half);
    }
}

pub(super) fn a_client_that_leaves_after_the_settlement_finds_its_answer(target: &Target) {
    for (way, payments) in target.protocol().ways_to_leave().into_iter().zip(1..) {
        let stream = target.begin(&target.pay(way.name()).simulate("hold-answer"));
        await_settlement(target, way.name());
        let half = stream.leave(way);
        retry_gets_the_replay(target, way.name(), payments);
        // A server may have noticed that its client is gone, and hold nothing any more.
        target.release();
        target.await_quiet();
        drop(half);
    }
}

pub(super) fn a_client_that_leaves_during_its_answer_finds_that_it_was_made(target: &Target) {
    for (way, payments) in target.protocol().ways_to_leave().into_iter().zip(1..) {
        let mut connection = target.begin(&target.pay(way.name()).simulate("stream=20000000"));
        assert_eq!(connection.head().unwrap().status, 201);
        let half = connection.leave(way);
        let retry = target.send(&target.pay(way.name()));
        assert_eq!((retry.status, retry.problem().as_deref()), (410, Some("body-not-retained")), "{way:?}");
        assert_eq!(target.effects(), payments);
        drop(half);
    }
}
