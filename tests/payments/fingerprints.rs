//! Which requests are the same.

use crate::support::{Contract, Request, Server};

#[test]
fn white_space_and_member_order_do_not_matter() {
    let server = Server::start(Contract::Transactional, &[]);
    let first = server.send(&Request::pay("k"));
    let reordered = "{\"recipient\":\"\\u0061lice\",\n\t\"amount\":1250,\"currency\":\"EUR\"}";
    let again = server.send(&Request::pay("k").body(reordered));
    assert!(again.is_replay());
    assert_eq!(again.body, first.body);
}

#[test]
fn any_other_request_under_the_same_key_is_a_mismatch_and_does_not_run() {
    let server = Server::start(Contract::Transactional, &[]);
    let large = |amount: &str| format!(r#"{{"amount": {amount}, "currency": "EUR", "recipient": "alice"}}"#);
    let original = Request::pay("k").body(large("9007199254740992"));
    assert_eq!(server.send(&original).status, 201);
    let others = [
        original.clone().body(large("9007199254740993")),
        original.clone().body(large("9007199254740992.0")),
        original.clone().body(large(r#"1, "amount": 9007199254740992"#)),
        original.clone().body(large(r#""9007199254740992""#)),
        original.clone().body(""),
        original.clone().target("/v1/payments?x=1"),
        original.clone().target("/v1/payments?"),
        original.clone().set("Content-Type", "application/json; charset=utf-8"),
        original.clone().without("Content-Type"),
        original.clone().header("Content-Encoding", "gzip"),
    ];
    for other in others {
        let answer = server.send(&other);
        assert_eq!((answer.status, answer.problem().as_deref()), (422, Some("mismatch")), "{other:?}");
        assert_eq!(answer.retry_after(), None, "a client must not retry this");
    }
    assert_eq!(server.effects(), 1);
    let again = server.send(&original.header("User-Agent", "another").simulate("status=500"));
    assert!(again.is_replay(), "other headers belong to no fingerprint");
}

#[test]
fn a_mismatch_is_told_while_the_original_runs_too() {
    let server = Server::start(Contract::Transactional, &[]);
    let running = Request::pay("k").simulate("delay-before=1000").begin(server.address);
    crate::support::eventually("the first request", || (server.records() == 1).then_some(()));
    assert_eq!(server.send(&Request::pay("k").body("{}")).status, 422);
    assert_eq!(crate::support::Answer::read(running, "POST").unwrap().status, 201);
}
