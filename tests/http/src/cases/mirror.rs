//! A page that takes every method, behind a separately configured layer, and inside CORS and compression.

use std::io::Read;

use flate2::read::GzDecoder;

use crate::client::{Answer, Request};
use crate::target::Target;

/// Fields of the middleware outside the layer, which differs between frameworks.
const OF_OTHERS: [&str; 6] = [
    "access-control-allow-credentials",
    "access-control-allow-origin",
    "access-control-expose-headers",
    "content-encoding",
    "transfer-encoding",
    "vary",
];

fn mirrored(target: &Target, method: &'static str) -> Request {
    target.get("/v1/mirror").method(method)
}

pub(super) fn keyed(target: &Target, method: &'static str) -> Request {
    mirrored(target, method).header("X-Operation-Key", "k").body("{}")
}

/// Sends a request, and notes the part of the answer that comes from the layer and the page.
pub(super) fn send(target: &Target, request: &Request) -> Answer {
    let answer = target.ask(request);
    let mut noted = answer.clone().without(&OF_OTHERS);
    noted.body = plain(&answer);
    let _ = target.note(noted);
    answer
}

pub(super) fn is_replay(answer: &Answer) -> bool {
    assert!(!answer.is_replay(), "the mark has another name here");
    answer.header("x-operation-replayed") == Some("true")
}

/// The body, decompressed.
fn plain(answer: &Answer) -> Vec<u8> {
    if answer.header("content-encoding") != Some("gzip") {
        return answer.body.clone();
    }
    let mut plain = Vec::new();
    GzDecoder::new(answer.body.as_slice()).read_to_end(&mut plain).unwrap();
    plain
}

pub(super) fn two_methods_with_the_same_key_never_meet(target: &Target) {
    let requests = ["POST", "PUT"].map(|method| keyed(target, method));
    let firsts = requests.each_ref().map(|request| send(target, request));
    for (first, method) in firsts.iter().zip(["POST", "PUT"]) {
        assert_eq!((first.status, is_replay(first)), (200, false), "{method}");
        assert_eq!((&first.json()["method"], &first.json()["is_protected"]), (&method.into(), &true.into()));
    }
    for (request, first) in requests.iter().zip(&firsts) {
        let again = send(target, request);
        assert!(is_replay(&again));
        assert_eq!(again.body, first.body);
    }
}

pub(super) fn methods_that_are_safe_and_those_that_are_not_named_create_no_record(target: &Target) {
    // The policy names GET, in vain.
    for method in ["GET", "HEAD", "OPTIONS", "TRACE", "PATCH", "DELETE"] {
        let request = mirrored(target, method).header("X-Operation-Key", "k");
        // A record of the first request would be replayed to the second, and make the third a mismatch.
        for request in [request.clone(), request.clone(), request.target("/v1/mirror?x=1")] {
            let answer = target.ask(&request);
            assert_eq!((answer.status, is_replay(&answer), answer.problem()), (200, false, None), "{method}");
            // Some CORS middleware answers OPTIONS itself.
            if !["HEAD", "OPTIONS"].contains(&method) {
                assert_eq!(answer.json()["is_protected"].as_bool(), Some(false), "{method}");
            }
        }
    }
}

pub(super) fn the_options_of_a_policy_are_obeyed(target: &Target) {
    let unnamed = send(target, &mirrored(target, "POST").header("Idempotency-Key", "k"));
    assert_eq!((unnamed.status, unnamed.problem().as_deref()), (400, Some("key-missing")));
    let request = keyed(target, "POST").header("X-Version", "1");
    let (first, again) = (send(target, &request), send(target, &request));
    assert!(!is_replay(&first) && is_replay(&again));
    assert!(first.header("x-request-id").is_some());
    assert_eq!(again.header("x-request-id"), first.header("x-request-id"), "it is allowed by name");
    assert_eq!((first.header("x-unnamed"), again.header("x-unnamed")), (Some("1"), None));
    let other = send(target, &request.set("X-Version", "2"));
    assert_eq!((other.status, other.problem().as_deref()), (422, Some("mismatch")), "it counts");
}

pub(super) fn cors_outside_lets_pages_send_keys_and_see_replays(target: &Target) {
    let preflight = mirrored(target, "OPTIONS")
        .without("Authorization")
        .header("Origin", "https://one.test")
        .header("Access-Control-Request-Method", "POST")
        .header("Access-Control-Request-Headers", "x-operation-key");
    let allowed = target.ask(&preflight);
    assert_eq!(allowed.status, 200, "{allowed:?}");
    let named = allowed.header("access-control-allow-headers").unwrap().to_ascii_lowercase();
    assert!(named.contains("x-operation-key"), "{named}");
    for (origin, is_again) in [("https://one.test", false), ("https://two.test", true)] {
        let answer = send(target, &keyed(target, "POST").header("Origin", origin));
        assert_eq!((answer.status, is_replay(&answer)), (200, is_again));
        assert_eq!(answer.header("access-control-allow-origin"), Some(origin), "of who asks now");
        let exposed = answer.header("access-control-expose-headers").unwrap().to_ascii_lowercase();
        assert!(exposed.contains("x-operation-replayed"), "{exposed}");
    }
}

pub(super) fn compression_outside_is_for_who_asks_now(target: &Target) {
    for (key, codings) in [("first", [Some("gzip"), None]), ("later", [None, Some("gzip")])] {
        let request = keyed(target, "POST").set("X-Operation-Key", key);
        let answers = codings.map(|coding| {
            let request = request.clone();
            send(target, &coding.map_or(request.clone(), |coding| request.header("Accept-Encoding", coding)))
        });
        for (answer, coding) in answers.iter().zip(codings) {
            assert_eq!((answer.status, answer.header("content-encoding")), (200, coding), "{key}");
        }
        assert!(!is_replay(&answers[0]) && is_replay(&answers[1]));
        assert_eq!(plain(&answers[0]), plain(&answers[1]), "{key}");
    }
}
