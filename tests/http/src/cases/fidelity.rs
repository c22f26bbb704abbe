//! What a replay keeps, and what it leaves out.

use crate::client::Answer;
use crate::exchange::Protocol;
use crate::target::{Contract, Target};

const MEBIBYTE: usize = 1024 * 1024;

/// Sends a request twice and returns both answers.
fn twice(target: &Target, key: &str, simulate: &str) -> (Answer, Answer) {
    let request = target.pay(key).simulate(simulate);
    let (first, again) = (target.send(&request), target.send(&request));
    assert!(!first.is_replay(), "{first:?}");
    assert!(again.is_replay(), "{again:?}");
    (first, again)
}

pub(super) fn the_first_answer_is_replayed_again_and_again(target: &Target) {
    let (first, again) = twice(target, "k", "");
    assert_eq!(first.status, 201);
    let id = first.json()["id"].as_str().unwrap().to_owned();
    assert_eq!(first.header("location"), Some(format!("/v1/payments/{id}").as_str()));
    assert_eq!(first.header("etag"), Some(format!("\"{id}\"").as_str()));
    assert_eq!(again.values("idempotency-replayed"), [b"true"], "once");
    let stated: u64 = first.header("idempotency-retention").unwrap().parse().unwrap();
    assert!(stated > 0, "the answer says for how long a repeat gets it");
    assert_eq!(again.header("idempotency-retention"), None, "a replay does not know");
    for _ in 0..3 {
        assert_eq!(target.send(&target.pay("k")).essence(), first.essence());
    }
    assert_eq!(again.essence(), first.essence());
    assert_eq!(target.send(&target.get(&format!("/v1/payments/{id}"))).json(), first.json());
    assert_eq!(target.effects(), 1);
}

pub(super) fn header_fields_survive_in_order_repeated_and_not_utf_8(target: &Target) {
    let (first, again) = twice(target, "k", "raw-header");
    for answer in [&first, &again] {
        assert_eq!(answer.values("x-raw"), [b"\xFF\xFE raw"]);
        assert_eq!(answer.values("x-repeated"), [b"one", b"two"]);
    }
    assert_eq!(again.essence(), first.essence());
}

pub(super) fn a_cookie_reaches_the_first_client_only(target: &Target) {
    let (first, again) = twice(target, "k", "set-cookie");
    assert_eq!(first.header("set-cookie"), Some("session=secret"));
    assert_eq!(again.header("set-cookie"), None);
    assert_eq!(again.body, first.body);
}

/// Header fields of a single connection.
const OF_THE_CONNECTION: [&str; 2] = ["keep-alive", "x-hop"];

pub(super) fn fields_of_the_moment_reach_the_first_client_only(target: &Target) {
    const MOMENTARY: [&str; 9] = [
        "access-control-allow-origin",
        "keep-alive",
        "proxy-authenticate",
        "retry-after",
        "server-timing",
        "www-authenticate",
        // Named by Connection.
        "x-hop",
        "x-ratelimit-remaining",
        "x-request-id",
    ];
    let request = target.pay("k").simulate("momentary");
    let (first, again) = (target.ask(&request), target.ask(&request));
    for answer in [&first, &again] {
        let _ = target.note(answer.clone().without(&OF_THE_CONNECTION));
    }
    assert!(!first.is_replay() && again.is_replay());
    for name in MOMENTARY {
        // HTTP/2 has no such fields, and servers may drop them.
        let may_lack = target.protocol() == Protocol::Http2 && OF_THE_CONNECTION.contains(&name);
        assert!(may_lack || first.header(name).is_some(), "{name}");
        assert_eq!(again.header(name), None, "{name}");
    }
    assert_eq!(first.header("date"), Some("Thu, 01 Jan 2015 00:00:00 GMT"));
    assert!(again.header("date").is_some_and(|date| !date.contains("2015")), "{again:?}");
    assert_eq!(again.body, first.body);
}

pub(super) fn a_binary_body_in_chunks_is_replayed_byte_by_byte(target: &Target) {
    let (first, again) = twice(target, "k", "stream=300000");
    assert_eq!(first.body.len(), 300_000);
    assert!(std::str::from_utf8(&first.body).is_err(), "it is binary");
    assert!(again.body == first.body, "the bodies differ");
    assert_eq!(again.header("content-type"), Some("application/octet-stream"));
    assert_eq!(again.header("content-length"), Some("300000"));
}

pub(super) fn a_body_at_the_limit_is_kept_and_a_larger_one_leaves_a_tombstone(target: &Target) {
    for (length, is_kept) in [(MEBIBYTE - 1, true), (MEBIBYTE, true), (MEBIBYTE + 1, false)] {
        let (first, again) = twice(target, &length.to_string(), &format!("stream={length}"));
        assert_eq!((first.status, first.body.len()), (201, length), "the first client gets all of it");
        if is_kept {
            assert!(again.body == first.body, "the bodies differ");
        } else {
            assert_eq!((again.status, again.problem().as_deref()), (410, Some("body-not-retained")));
            assert_eq!(again.json()["original_status"], 201);
            assert_eq!(again.header("location"), first.header("location"));
            assert_eq!(again.header("etag"), None, "it describes the body that is gone");
        }
    }
    assert_eq!(target.effects(), 3);
}

pub(super) fn a_large_answer_streams_on_beyond_what_is_kept(target: &Target) {
    let (first, again) = twice(target, "k", "stream=20000000");
    assert_eq!((first.body.len(), again.status), (20_000_000, 410));
    assert_eq!(target.effects(), 1);
}

pub(super) fn an_answer_without_a_body_is_replayed_without_one(target: &Target) {
    let (first, again) = twice(target, "k", "stream=0");
    assert_eq!((first.status, first.body.len()), (201, 0));
    assert_eq!(again.essence(), first.essence());
}

pub(super) fn an_answer_without_content_is_replayed_without_any(target: &Target) {
    let (first, again) = twice(target, "k", "status=204");
    assert_eq!((first.status, again.status), (204, 204));
    for answer in [&first, &again] {
        let length = answer.header("content-length");
        // Hyper sends 0 over HTTP/2, even if the application sends no length.
        let says_nothing = length.is_none() || (target.protocol() == Protocol::Http2 && length == Some("0"));
        assert!(answer.body.is_empty() && says_nothing, "{answer:?}");
    }
}

pub(super) fn an_event_stream_is_not_kept_and_never_runs_again(target: &Target) {
    let (first, again) = twice(target, "k", "events=1000");
    assert_eq!((first.status, first.body.len()), (201, 1000));
    assert_eq!((again.status, again.problem().as_deref()), (410, Some("body-not-retained")));
    assert_eq!(target.effects(), 1);
}

pub(super) fn an_event_stream_is_sent_as_it_comes(target: &Target) {
    let mut connection = target.begin(&target.pay("k").simulate("events-held"));
    let head = connection.head().unwrap();
    assert_eq!((head.status, head.header("content-type")), (201, Some("text/event-stream")));
    assert_eq!(connection.chunk().unwrap().len(), 100, "the first events are here before the last one is made");
    let again = target.send(&target.pay("k"));
    assert_eq!((again.status, again.problem().as_deref()), (410, Some("body-not-retained")), "it is settled meanwhile");
    assert_eq!(target.stages().sending, 1);
    target.release();
    assert_eq!(connection.chunk().unwrap(), b"data: last\n\n");
    assert_eq!(connection.chunk().unwrap(), b"");
    assert_eq!(target.effects(), 1);
}

pub(super) fn an_answer_that_breaks_off_is_no_success(target: &Target) {
    let first = target.send(&target.pay("k").simulate("break-off=1000"));
    assert_eq!((first.status, first.problem().as_deref()), (500, Some("handler-failed")));
    let again = target.send(&target.pay("k"));
    let expected = match target.contract() {
        Contract::Transactional => (201, None),
        Contract::AtMostOnce => (500, Some("handler-failed")),
        Contract::AtLeastOnce => (409, Some("backoff")),
    };
    assert_eq!((again.status, again.problem().as_deref()), expected);
    assert_eq!(target.effects(), 1);
}

pub(super) fn an_answer_that_breaks_off_beyond_what_is_kept_was_made(target: &Target) {
    let broken = target.begin(&target.pay("k").simulate("break-off=3000000")).answer();
    assert!(broken.is_none(), "the client sees that the body is not whole");
    let again = target.send(&target.pay("k"));
    assert_eq!((again.status, again.problem().as_deref()), (410, Some("body-not-retained")));
    assert_eq!(target.effects(), 1);
}

pub(super) fn head_says_what_get_says_without_the_body(target: &Target) {
    let path = target.send(&target.pay("k")).header("location").unwrap().to_owned();
    let (get, head) = (target.send(&target.get(&path)), target.send(&target.get(&path).method("HEAD")));
    assert_eq!((head.status, head.essence().headers), (200, get.essence().headers));
    assert_eq!(head.header("content-length"), get.header("content-length"));
    assert!(head.body.is_empty());
}

pub(super) fn a_refusal_of_the_application_is_its_own_and_is_replayed(target: &Target) {
    let bodies = [
        r#"{"amount": 1250, "currency": "EUR", "recipient": "alice", "tip": 1}"#,
        r#"{"amount": 0, "currency": "EUR", "recipient": "alice"}"#,
        r#"{"amount": 9007199254740993, "currency": "EUR", "recipient": "alice"}"#,
        r#"{"amount": 1, "currency": "euro", "recipient": "alice"}"#,
        r#"{"amount": 1, "currency": "EUR", "recipient": ""}"#,
        "not json",
    ];
    for (at, body) in bodies.into_iter().enumerate() {
        let request = target.pay(&format!("k{at}")).body(body);
        let (first, again) = (target.send(&request), target.send(&request));
        assert_eq!((first.status, first.is_replay()), (422, false), "{body}");
        assert_eq!(first.json()["type"], "urn:payments:problem:invalid-payment");
        assert!(again.is_replay());
        assert_eq!(again.essence(), first.essence());
    }
    assert_eq!(target.effects(), 0);
}
