//! Connections that carry more than one request.

use crate::client::{Connection, Request};
use crate::target::{Contract, Target};

pub(super) fn a_connection_serves_on_after_each_kind_of_answer(target: &Target) {
    let fault = match target.contract() {
        Contract::Transactional => 201,
        Contract::AtMostOnce => 500,
        Contract::AtLeastOnce => 409,
    };
    let requests: [(&str, Request, u16); 12] = [
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
        ("a fault", target.pay("fault").simulate("status-before=500"), 500),
        ("its repeat", target.pay("fault"), fault),
    ];
    let mut connection = Connection::open(target.address());
    for (what, request, status) in requests {
        connection.write(&request.to_bytes());
        let method = if what.contains("page") { "GET" } else { "POST" };
        let answer = connection.answer(method).unwrap_or_else(|| panic!("the connection ended at {what}"));
        assert_eq!(target.note(answer).status, status, "{what}");
    }
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
