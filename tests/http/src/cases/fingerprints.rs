//! Which requests count as the same.

use crate::target::{Contract, Target};

fn amount(amount: &str) -> String {
    format!(r#"{{"amount": {amount}, "currency": "EUR", "recipient": "alice"}}"#)
}

pub(super) fn white_space_and_member_order_do_not_matter(target: &Target) {
    let first = target.send(&target.pay("k"));
    let reordered = "{\"recipient\":\"\\u0061lice\",\n\t\"amount\":1250,\"currency\":\"EUR\"}";
    let again = target.send(&target.pay("k").body(reordered));
    assert!(again.is_replay());
    assert_eq!(again.body, first.body);
}

pub(super) fn any_other_request_under_the_same_key_is_a_mismatch_and_does_not_run(target: &Target) {
    let original = target.pay("k").body(amount("9007199254740992"));
    assert_eq!(target.send(&original).status, 201);
    let others = [
        original.clone().body(amount("9007199254740993")),
        original.clone().body(amount("9007199254740992.0")),
        original.clone().body(amount("9007199254740992e0")),
        original.clone().body(amount(r#"1, "amount": 9007199254740992"#)),
        original.clone().body(amount(r#""9007199254740992""#)),
        original.clone().body(""),
        original.clone().target("/v1/payments?x=1"),
        original.clone().target("/v1/payments?"),
        original.clone().set("Content-Type", "application/json; charset=utf-8"),
        original.clone().without("Content-Type"),
        original.clone().header("Content-Encoding", "gzip"),
        original.clone().header("Content-Range", "bytes 0-9/10"),
        original.clone().header("If-Match", "\"1\""),
        original.clone().header("If-None-Match", "*"),
        original.clone().header("If-Unmodified-Since", "Thu, 01 Jan 2015 00:00:00 GMT"),
        original.clone().header("X-HTTP-Method-Override", "DELETE"),
        original.clone().header("X-HTTP-Method", "DELETE"),
        original.clone().header("X-Method-Override", "DELETE"),
    ];
    for other in others {
        let answer = target.send(&other);
        assert_eq!((answer.status, answer.problem().as_deref()), (422, Some("mismatch")), "{other:?}");
        assert_eq!(answer.retry_after(), None, "a client must not retry this");
    }
    let again = target.send(&original);
    assert!(again.is_replay(), "a mismatch leaves the record alone");
    assert_eq!(target.effects(), 1);
}

pub(super) fn the_boundary_of_multipart_does_not_matter_and_its_parts_do(target: &Target) {
    let form = |boundary: &str, value: &str| {
        let part =
            format!("--{boundary}\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n{value}\r\n--{boundary}--\r\n");
        let content_type = format!("multipart/form-data; boundary={boundary}");
        target.pay("k").set("Content-Type", content_type).body(part)
    };
    // The application takes JSON only and refuses the form; that is an answer like any other.
    let first = target.send(&form("one", "1"));
    assert_eq!((first.status, first.problem()), (422, None));
    let again = target.send(&form("two", "1"));
    assert!(again.is_replay());
    assert_eq!(again.essence(), first.essence());
    assert_eq!(target.send(&form("two", "2")).problem().as_deref(), Some("mismatch"));
}

pub(super) fn other_headers_belong_to_no_fingerprint(target: &Target) {
    assert_eq!(target.send(&target.pay("k")).status, 201);
    let again = target.pay("k").header("User-Agent", "another").header("X-Request-Id", "2").simulate("status=500");
    let again = again.header("Accept", "text/html").header("Accept-Language", "de").header("Prefer", "return=minimal");
    assert!(target.send(&again).is_replay());
    assert_eq!(target.effects(), 1);
}

pub(super) fn another_request_while_the_first_runs_never_runs(target: &Target) {
    let running = target.begin(&target.pay("k").simulate("hold-before"));
    target.await_run();
    let other = target.pay("k").body(amount("1"));
    let answer = target.ask(&other);
    // If only a lock shows a run, its request is not known, and a possible duplicate gets "in progress". Stores differ in what
    // they know of a transaction before its end.
    let is_known = target.contract() != Contract::Transactional && !target.is_cached();
    let told = (answer.status, answer.problem());
    let mut possible = vec![(422, Some("mismatch".to_owned()))];
    if !is_known {
        possible.push((409, Some("in-progress".to_owned())));
    }
    assert!(possible.contains(&told), "{answer:?}");
    // A client that is willing to wait gets the same answer once the run is known, and immediately if it is known already.
    let waiting = target.begin(&other.clone().waiting());
    let told = if is_known {
        let told_at_once = waiting.answer();
        target.release();
        told_at_once
    } else {
        target.release();
        waiting.answer()
    };
    let told = told.unwrap();
    assert_eq!((told.status, told.problem().as_deref()), (422, Some("mismatch")));
    let first = running.answer().unwrap();
    assert_eq!(target.note(first).status, 201);
    assert_eq!(target.send(&other).problem().as_deref(), Some("mismatch"));
    assert_eq!(target.effects(), 1);
}
