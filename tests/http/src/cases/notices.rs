//! A page that takes its keys from bodies, and keeps no bodies of answers.

use crate::client::{Answer, Request};
use crate::target::Target;

fn notice(target: &Target, body: &str) -> Request {
    target.get("/v1/notices").method("POST").set("Content-Type", "application/json").body(body)
}

fn problem(answer: &Answer) -> (u16, String) {
    (answer.status, answer.json()["type"].as_str().unwrap_or_default().to_owned())
}

pub(super) fn the_key_is_a_member_of_the_body_and_replays_have_no_body(target: &Target) {
    let notices = ["notice-1", "notice-2"].map(|id| notice(target, &format!(r#"{{"id":"{id}","amount":7}}"#)));
    let firsts = notices.each_ref().map(|request| target.send(request));
    for (request, first) in notices.iter().zip(&firsts) {
        assert_eq!((first.status, first.is_replay(), first.json()["id"].is_string()), (201, false, true));
        for _ in 0..2 {
            let again = target.send(request);
            assert_eq!((again.status, again.is_replay(), again.body.len()), (201, true, 0));
            assert_eq!(again.header("location"), first.header("location"));
        }
    }
    assert_ne!(firsts[0].header("location"), firsts[1].header("location"));
}

pub(super) fn a_notice_that_is_corrected_runs_under_its_key(target: &Target) {
    let wrong = notice(target, r#"{"id":"notice-1","amount":"seven"}"#);
    for _ in 0..2 {
        let refused = target.send(&wrong);
        assert_eq!((refused.status, refused.is_replay()), (422, false), "it frees its key");
        assert_eq!(refused.json()["error"], "a notice needs an amount");
    }
    let right = notice(target, r#"{"id":"notice-1","amount":7}"#);
    let (first, again) = (target.send(&right), target.send(&right));
    assert_eq!((first.status, first.is_replay(), again.status, again.is_replay()), (201, false, 201, true));
}

pub(super) fn a_refused_notice_says_so_as_the_policy_has_it(target: &Target) {
    let taken = target.send(&notice(target, r#"{"id":"notice-1","amount":7}"#));
    assert_eq!(taken.status, 201);
    for (body, status, name) in [
        (r#"{"id":"notice-1","amount":8}"#, 409, "mismatch"),
        (r#"{"id":"short","amount":7}"#, 400, "key-invalid"),
        (r#"{"amount":7}"#, 400, "key-missing"),
        ("7", 400, "key-missing"),
    ] {
        let refused = target.send(&notice(target, body));
        assert_eq!(problem(&refused), (status, format!("https://errors.test/{name}")), "{body}");
    }
    // A key in the header is not what the policy asks for.
    let with_header = notice(target, r#"{"amount":7}"#).set("Idempotency-Key", "notice-9");
    assert_eq!(problem(&target.send(&with_header)), (400, "https://errors.test/key-missing".to_owned()));
}
