//! Connections that carry more than one request.

use super::uploads::LIMIT;
use crate::client::{Connection, Request};
use crate::exchange::Protocol;
use crate::target::{Contract, Target};

pub(super) fn a_connection_serves_on_after_each_kind_of_answer(target: &Target) {
    let fault = match target.contract() {
        Contract::Transactional => 201,
        Contract::AtMostOnce => 500,
        Contract::AtLeastOnce => 409,
    };
    let requests: [(&str, Request, u16); 21] = [
        ("a first answer", target.pay("k"), 201),
        ("a replay", target.pay("k"), 201),
        ("a mismatch", target.pay("k").body("{}"), 422),
        ("a key that is missing", target.keyless(), 400),
        ("a principal that is missing", target.pay("k").without("Authorization"), 401),
        ("no content", target.pay("empty").simulate("status=204"), 204),
        ("a stream", target.pay("stream").simulate("stream=100000"), 201),
        ("a tombstone", target.pay("events").simulate("events=1000"), 201),
        ("its replay", target.pay("events"), 410),
        ("a page that is read", target.get("/v1/ledger"), 200),
        ("a page without its body", target.get("/v1/ledger").method("HEAD"), 200),
        ("a page that is not there", target.get("/v1/nothing"), 404),
        ("a page that takes no such method", target.get("/v1/ledger").method("PUT"), 405),
        ("a key that is malformed", target.pay("a b"), 400),
        ("a body that is too large", target.pay("large").body(" ".repeat(LIMIT + 1)), 413),
        ("one without a key", target.keyless().target("/v1/quotes").body(" ".repeat(LIMIT + 1)), 413),
        ("an invalid payment", target.pay("invalid").body("{}"), 422),
        ("a panic", target.pay("panic").simulate("panic-before"), 500),
        ("a request that is running", target.pay("held"), 409),
        ("a fault", target.pay("fault").simulate("status-before=500"), 500),
        ("its repeat", target.pay("fault"), fault),
    ];
    let held = target.begin(&target.pay("held").simulate("hold-before"));
    target.await_run();
    let mut connection = target.connect();
    for (what, request, status) in requests {
        let answer = connection.ask(&request).unwrap_or_else(|| panic!("the connection ended at {what}"));
        let closes = answer.header("connection") == Some("close");
        assert_eq!(target.note(answer).status, status, "{what}");
        // A body that the request's head already forbids need not be read. The server then closes the connection, and says so.
        assert!(!closes || (request.method == "POST" && [400, 401, 413].contains(&status)), "{what}");
        if closes || (status == 413 && target.protocol() == Protocol::Http1) {
            connection = target.connect();
        }
    }
    target.release();
    assert_eq!(held.answer().unwrap().status, 201);
}

/// A body that is refused unread must not be taken for the next request on its connection.
pub(super) fn what_a_refused_body_says_is_never_obeyed(target: &Target) {
    let smuggled = target.pay("smuggled").to_bytes();
    let hidden = smuggled.repeat(LIMIT / smuggled.len() + 1);
    let refused = [
        ("too large", target.pay("k").body(&hidden), 413),
        ("without a key", target.keyless().body(&smuggled), 400),
        ("with a key that is malformed", target.pay("a b").body(&smuggled), 400),
        ("of nobody", target.pay("k").without("Authorization").body(&smuggled), 401),
        ("to a page that is not there", target.pay("k").target("/v1/nothing").body(&smuggled), 404),
        ("by a method that the page does not take", target.pay("k").target("/v1/ledger").body(&smuggled), 405),
    ];
    let last = target.get("/v1/ledger").header("Connection", "close");
    for (what, request, status) in refused {
        let mut connection = Connection::open(target.address());
        connection.try_write(&[request.to_bytes(), last.to_bytes()].concat());
        assert_eq!(connection.answer("POST").map(|answer| answer.status), Some(status), "{what}");
        // The server either continues after the end of the body, or reads no more.
        let next = connection.answer("GET").map(|answer| answer.status);
        assert!(next.is_none_or(|status| status == 200), "{what}: {next:?}");
        assert_eq!(connection.answer("GET").map(|answer| answer.status), None, "{what}");
    }
    assert_eq!(target.effects(), 0);
}

pub(super) fn pipelined_requests_are_answered_in_their_order(target: &Target) {
    let requests = [
        target.pay("one").simulate("delay-before=200"),
        target.pay("two"),
        target.pay("one"),
        target.keyless(),
        target.pay("two"),
    ];
    let mut connection = Connection::open(target.address());
    connection.write(&requests.iter().flat_map(Request::to_bytes).collect::<Vec<u8>>());
    let answers = requests.map(|_| target.note(connection.answer("POST").unwrap()));
    let told = answers.each_ref().map(|answer| (answer.status, answer.is_replay()));
    assert_eq!(told, [(201, false), (201, false), (201, true), (400, false), (201, true)]);
    assert_eq!(answers[2].body, answers[0].body);
    assert_eq!(answers[4].body, answers[1].body);
    assert_eq!(target.effects(), 2);
}

pub(super) fn a_page_that_is_not_there_or_takes_no_such_method_says_so(target: &Target) {
    let missing = target.send(&target.get("/v1/nothing"));
    assert_eq!((missing.status, missing.json()["type"].as_str()), (404, Some("urn:payments:problem:not-found")));
    let unknown = target.send(&target.get("/v1/payments/none"));
    assert_eq!(unknown.status, 404);
    for (path, method, allowed) in [
        ("/v1/payments", "DELETE", "GET, HEAD, POST"),
        ("/v1/ledger", "POST", "GET, HEAD"),
        ("/healthz", "PUT", "GET, HEAD"),
    ] {
        let refused = target.send(&target.get(path).method(method));
        assert_eq!((refused.status, refused.header("allow")), (405, Some(allowed)), "{method} {path}");
    }
}

pub(super) fn the_description_names_the_key_and_the_answers_of_the_layer(target: &Target) {
    let description = target.send(&target.get("/openapi.json")).json();
    for (path, is_required) in [("/v1/payments", true), ("/v1/quotes", false)] {
        let operation = &description["paths"][path]["post"];
        let parameters = operation["parameters"].as_array().unwrap();
        let key = parameters.iter().find(|parameter| parameter["name"] == "idempotency-key").unwrap();
        assert_eq!((&key["in"], &key["required"]), (&"header".into(), &is_required.into()), "{path}");
        for status in ["400", "401", "409", "410", "413", "422", "503"] {
            let response = &operation["responses"][status];
            assert!(response["content"]["application/problem+json"].is_object(), "{path} {status}");
        }
        assert!(operation["responses"]["201"]["headers"]["idempotency-replayed"].is_object(), "{path}");
    }
}
