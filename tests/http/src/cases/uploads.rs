//! Uploads of request bodies.

use crate::PAYMENT;
use crate::client::{Answer, Connection};
use crate::exchange::{Exchange, Protocol};
use crate::target::Target;

/// The default limit of request bodies.
pub(super) const LIMIT: usize = 1024 * 1024;

fn padded(length: usize) -> String {
    format!("{PAYMENT}{}", " ".repeat(length - PAYMENT.len()))
}

fn assert_too_large(answer: &Answer) {
    assert_eq!((answer.status, answer.problem().as_deref()), (413, Some("body-too-large")), "{answer:?}");
}

pub(super) fn a_body_at_the_limit_is_taken_and_a_larger_one_is_refused(target: &Target) {
    for length in [LIMIT - 1, LIMIT] {
        let request = target.pay(&length.to_string()).body(padded(length));
        assert_eq!(target.send(&request).status, 201, "{length}");
        assert!(target.send(&request).is_replay(), "{length}");
    }
    let mut upload = target.upload(&target.pay("k"), Some(LIMIT + 1));
    // The server may close the connection before everything is sent.
    upload.write(padded(LIMIT / 2).as_bytes());
    assert_too_large(&target.note(upload.answer().unwrap()));
    assert_eq!(target.effects(), 2);
}

pub(super) fn a_body_that_declares_too_much_is_refused_before_it_is_sent(target: &Target) {
    let upload = target.upload(&target.pay("k"), Some(LIMIT + 1));
    assert_too_large(&target.note(upload.answer().unwrap()));
    assert_eq!(target.effects(), 0);
}

pub(super) fn a_body_in_chunks_over_the_limit_is_refused_while_it_arrives(target: &Target) {
    let mut upload = target.upload(&target.pay("k"), None);
    // Seventeen chunks exceed the limit; the last chunk, which would end the body, never comes.
    for _ in 0..17 {
        upload.write(&[b' '; 0x10000]);
    }
    assert_too_large(&target.note(upload.answer().unwrap()));
    assert_eq!(target.effects(), 0);
}

/// A payment whose head the server has read, and whose body it awaits.
pub(super) fn awaited_upload(target: &Target, key: &str) -> Exchange {
    let mut upload = target.upload(&target.pay(key).header("Expect", "100-continue"), Some(PAYMENT.len()));
    match target.protocol() {
        Protocol::Http1 => assert_eq!(upload.head().unwrap().status, 100),
        // A server need not send 100, and these do not.
        Protocol::Http2 => target.await_stages("the head", |stages| stages.open == 1),
    }
    upload
}

pub(super) fn a_slow_upload_holds_no_lease(target: &Target) {
    let request = target.pay("k");
    let mut slow = awaited_upload(target, "k");
    slow.write(&PAYMENT.as_bytes()[..10]);
    let fast = target.send(&request);
    assert_eq!((fast.status, fast.is_replay()), (201, false));
    slow.write(&PAYMENT.as_bytes()[10..]);
    slow.end();
    let slow = target.note(slow.answer().unwrap());
    assert!(slow.is_replay());
    assert_eq!(slow.essence(), fast.essence());
    assert_eq!(target.effects(), 1);
}

pub(super) fn how_a_body_is_cut_does_not_matter(target: &Target) {
    let first = target.send(&target.pay("k"));
    let mut upload = target.upload(&target.pay("k"), None);
    for byte in PAYMENT.bytes() {
        upload.write(&[byte]);
    }
    upload.end();
    let again = target.note(upload.answer().unwrap());
    assert!(again.is_replay());
    assert_eq!(again.essence(), first.essence());
}

pub(super) fn a_client_that_asks_before_it_sends_is_answered(target: &Target) {
    let mut upload = awaited_upload(target, "k");
    upload.write(PAYMENT.as_bytes());
    upload.end();
    assert_eq!(target.note(upload.answer().unwrap()).status, 201);
    // If the answer is a refusal, the framework may or may not request the body first.
    let mut connection = Connection::open(target.address());
    connection.write(&target.keyless().header("Expect", "100-continue").head_of(PAYMENT.len()));
    let refusal = match connection.answer("POST").unwrap() {
        answer if answer.status == 100 => {
            connection.try_write(PAYMENT.as_bytes());
            connection.answer("POST").unwrap()
        }
        answer => answer,
    };
    assert_eq!(target.note(refusal).problem().as_deref(), Some("key-missing"));
    assert_eq!(target.effects(), 1);
}
