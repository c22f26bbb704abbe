//! The syntax and the scope of keys.

use crate::support::{Contract, Request, Server};

#[test]
fn a_quoted_and_a_bare_key_are_the_same_whatever_the_case_of_the_header_name() {
    let server = Server::start(Contract::Transactional, &[]);
    let first = server.send(&Request::pay("k-1"));
    assert_eq!(first.status, 201);
    for (name, value) in [("IDEMPOTENCY-KEY", "\"k-1\""), ("idempotency-key", "k-1"), ("Idempotency-Key", " k-1 ")] {
        let again = server.send(&Request::keyless().header(name, value));
        assert!(again.is_replay(), "{name}: {value}");
        assert_eq!(again.essence(), first.essence());
    }
    assert_eq!(server.effects(), 1);
}

#[test]
fn whatever_is_not_one_key_is_refused_and_leaves_no_record() {
    let server = Server::start(Contract::Transactional, &[]);
    let too_long = "k".repeat(256);
    let malformed: [&[u8]; 11] = [
        b"",
        b"\"\"",
        b"\"unterminated",
        b"\"a\"b",
        b"a b",
        b"a,b",
        b"a\tb",
        "caf\u{e9}".as_bytes(),
        b"\xFF",
        too_long.as_bytes(),
        b"\"a\\b\"",
    ];
    for value in malformed {
        let answer = server.send(&Request::keyless().header("Idempotency-Key", value));
        assert_eq!((answer.status, answer.problem().as_deref()), (400, Some("key-invalid")), "{value:?}");
    }
    let twice = server.send(&Request::pay("k").header("Idempotency-Key", "k"));
    assert_eq!((twice.status, twice.problem().as_deref()), (400, Some("key-invalid")));
    let missing = server.send(&Request::keyless());
    assert_eq!((missing.status, missing.problem().as_deref()), (400, Some("key-missing")));
    assert_eq!((server.effects(), server.records()), (0, 0));
    let longest = server.send(&Request::pay(&"k".repeat(255)));
    assert_eq!(longest.status, 201);
}

#[test]
fn two_tenants_with_the_same_key_never_meet() {
    let server = Server::start(Contract::Transactional, &[]);
    let acme = server.send(&Request::pay("k"));
    let other = server.send(&Request::pay("k").set("Authorization", "Bearer other"));
    assert_eq!((acme.status, other.status), (201, 201));
    assert!(!other.is_replay());
    assert_ne!(acme.body, other.body);
    assert!(server.send(&Request::pay("k").set("Authorization", "bearer other")).is_replay());
}

#[test]
fn a_request_without_a_principal_is_401_even_without_a_key() {
    let server = Server::start(Contract::Transactional, &[]);
    for request in [Request::pay("k"), Request::keyless()] {
        let answer = server.send(&request.without("Authorization"));
        assert_eq!((answer.status, answer.problem().as_deref()), (401, Some("principal-missing")));
        assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
    }
    assert_eq!(server.records(), 0);
}

#[test]
fn methods_that_are_safe_or_idempotent_by_themselves_create_no_record() {
    let server = Server::start(Contract::Transactional, &[]);
    for method in ["GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"] {
        let request = Request::get("/v1/payments").method(method).header("Idempotency-Key", "k");
        let answer = server.send(&request);
        assert!(!answer.is_replay() && answer.problem().is_none(), "{method}: {answer:?}");
    }
    assert_eq!(server.records(), 0);
}
