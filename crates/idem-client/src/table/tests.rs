use std::time::SystemTime;

use super::*;

const RETRY_AFTER_7: (&str, &str) = ("retry-after", "7");
const PROBLEM: (&str, &str) = ("content-type", "application/problem+json; charset=utf-8");

fn headers(fields: &[(&'static str, &str)]) -> HeaderMap {
    fields.iter().map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap())).collect()
}

fn outcome<'a>(status: u16, headers: &'a HeaderMap, body: &'a str) -> Result<Answer<'a>, Failure> {
    let status = StatusCode::from_u16(status).unwrap();
    Ok(Answer { status, headers, body: body.as_bytes(), is_whole: true, received_at: SystemTime::UNIX_EPOCH })
}

/// The same for an answer of which this is the beginning.
fn decide_cut(policy: &RetryPolicy, status: u16, fields: &[(&'static str, &str)], body: &str) -> Decision {
    let headers = headers(fields);
    policy.decide(outcome(status, &headers, body).map(|answer| Answer { is_whole: false, ..answer }))
}

fn decide(policy: &RetryPolicy, status: u16, fields: &[(&'static str, &str)], body: &str) -> Decision {
    policy.decide(outcome(status, &headers(fields), body))
}

fn problem(name: &str) -> String {
    format!(r#"{{"type":"{IDEM_PROBLEMS}{name}","title":"x","status":409}}"#)
}

fn retry(reason: &'static str) -> Decision {
    Decision::Retry { reason, after: None }
}

const FINAL: Decision = Decision::Final { replayed: false };

#[test]
fn an_attempt_without_an_answer_is_repeated_if_a_repeat_can_help() {
    for profile in [Profile::Idem, Profile::Stripe, Profile::IetfDraft { retention: Duration::from_secs(60) }] {
        let policy = RetryPolicy::new(profile);
        for failure in [Failure::Connect, Failure::Timeout, Failure::Interrupted] {
            assert_eq!(policy.decide(Err(failure)), retry(failure.name()));
            assert_eq!(policy.decide_poll(Err(failure)), retry(failure.name()));
        }
        for failure in [Failure::Tls, Failure::Request] {
            assert_eq!(policy.decide(Err(failure)), Decision::Stop(Stop::CannotSend(failure)));
        }
    }
}

#[test]
fn every_status_has_a_decision() {
    let policy = RetryPolicy::new(Profile::Idem);
    for status in 200..=599 {
        let expected = matches!(status, 408 | 425 | 429 | 500 | 502..=504 | 506..=599);
        let decision = decide(&policy, status, &[RETRY_AFTER_7], "");
        match decision {
            Decision::Retry { after, .. } => {
                assert!(expected, "{status} is repeated");
                assert_eq!(after, Some(Duration::from_secs(7)));
            }
            decision => assert_eq!((decision, expected), (FINAL, false), "{status}"),
        }
    }
}

#[test]
fn an_answer_of_a_gate_does_not_end_a_repeat() {
    for profile in [Profile::Idem, Profile::Stripe, Profile::IetfDraft { retention: Duration::from_secs(60) }] {
        let policy = RetryPolicy::new(profile);
        let replay = (profile.replay_header(), "true");
        for status in 200..=599 {
            let again = |fields: &[_]| policy.decide_repeat(outcome(status, &headers(fields), ""));
            let is_of_a_gate = matches!(status, 300..=399 | 401 | 403 | 404 | 405 | 407 | 421);
            let expected = match is_of_a_gate {
                true => Decision::Stop(Stop::NotAnswered),
                false => decide(&policy, status, &[], ""),
            };
            assert_eq!(again(&[]), expected, "{status}");
            let kept = [("idempotency-retention", "60")];
            assert_eq!(again(&kept), decide(&policy, status, &kept, ""), "{status}");
            assert_eq!(again(&[replay]), decide(&policy, status, &[replay], ""), "{status}");
        }
        assert_eq!(policy.decide_repeat(Err(Failure::Timeout)), retry("timeout"));
    }
}

#[test]
fn problems_of_idem_are_told_by_their_type_alone() {
    let policy = RetryPolicy::new(Profile::Idem);
    for (status, name, expected) in [
        (409, "in-progress", retry("in-progress")),
        (409, "backoff", retry("backoff")),
        (400, "body-incomplete", retry("body-incomplete")),
        (504, "outcome-unknown", Decision::Stop(Stop::OutcomeUnknown)),
        (500, "record-unreadable", Decision::Stop(Stop::RecordUnreadable)),
        (500, "misconfigured", Decision::Stop(Stop::Misconfigured)),
        (500, "handler-failed", retry("server-error")),
        (503, "store-unavailable", retry("unavailable")),
        (503, "commit-unclear", retry("unavailable")),
        (409, "mismatch", FINAL),
        (422, "mismatch", FINAL),
        (410, "body-not-retained", FINAL),
        (401, "principal-missing", FINAL),
        (409, "in-progress2", FINAL),
    ] {
        assert_eq!(decide(&policy, status, &[PROBLEM], &problem(name)), expected, "{name}");
    }
    // The application's own 409, and a page of a proxy that has the text in it.
    assert_eq!(decide(&policy, 409, &[PROBLEM], r#"{"type":"https://shop.test/in-progress"}"#), FINAL);
    assert_eq!(decide(&policy, 409, &[("content-type", "application/json")], &problem("in-progress")), FINAL);
    assert_eq!(decide(&policy, 409, &[], &problem("in-progress")), FINAL);
    assert_eq!(decide(&policy, 409, &[PROBLEM], "{"), FINAL);
    assert_eq!(
        decide(&policy, 504, &[("content-type", "text/html")], &problem("outcome-unknown")),
        retry("server-error")
    );
    // A success is no problem, whatever it quotes.
    assert_eq!(decide(&policy, 200, &[PROBLEM], &problem("outcome-unknown")), FINAL);
}

#[test]
fn other_profiles_do_not_know_the_problems_of_idem() {
    let draft = RetryPolicy::new(Profile::IetfDraft { retention: Duration::from_secs(60) });
    assert_eq!(decide(&draft, 409, &[PROBLEM], &problem("in-progress")), FINAL);
    assert_eq!(decide(&draft, 504, &[PROBLEM], &problem("outcome-unknown")), retry("server-error"));
    let told = draft.in_progress_type("https://api.test/busy");
    assert_eq!(decide(&told, 409, &[PROBLEM], r#"{"type":"https://api.test/busy"}"#), retry("in-progress"));
    assert_eq!(decide(&told, 409, &[PROBLEM], r#"{"type":"https://api.test/sold-out"}"#), FINAL);
}

#[test]
fn a_base_of_problem_types_replaces_the_default() {
    let policy = RetryPolicy::new(Profile::Idem).problem_type_base("https://errors.test/");
    assert_eq!(decide(&policy, 409, &[PROBLEM], r#"{"type":"https://errors.test/backoff"}"#), retry("backoff"));
    assert_eq!(decide(&policy, 409, &[PROBLEM], &problem("backoff")), FINAL);
}

#[test]
fn a_replay_is_final_unless_it_says_that_the_operation_goes_on() {
    let mark = ("idempotency-replayed", "true");
    let policy = RetryPolicy::new(Profile::Idem);
    for status in [201, 409, 422, 429, 500, 503, 504] {
        assert_eq!(decide(&policy, status, &[mark], ""), Decision::Final { replayed: true }, "{status}");
    }
    let unknown = decide(&policy, 504, &[mark, PROBLEM], &problem("outcome-unknown"));
    assert_eq!(unknown, Decision::Stop(Stop::OutcomeUnknown));
    for value in ["false", "", "1"] {
        assert_eq!(decide(&policy, 503, &[("idempotency-replayed", value)], ""), retry("unavailable"), "{value}");
    }
    let location = ("location", "/jobs/1");
    assert_eq!(decide(&policy, 202, &[mark, location], ""), Decision::Final { replayed: true }, "polling is off");
    let polls = policy.poll(true);
    let poll = Decision::Poll { location: Some("/jobs/1".to_owned()), after: Some(Duration::from_secs(7)) };
    assert_eq!(decide(&polls, 202, &[mark, location, RETRY_AFTER_7], ""), poll);
    assert_eq!(decide(&polls, 202, &[RETRY_AFTER_7], ""), FINAL, "there is no place to ask");
    let renamed = RetryPolicy::new(Profile::Idem).replay_header(HeaderName::from_static("x-again"));
    assert_eq!(decide(&renamed, 503, &[("x-again", "true")], ""), Decision::Final { replayed: true });
    assert_eq!(decide(&renamed, 503, &[mark], ""), retry("unavailable"));
}

#[test]
fn a_poll_ends_with_an_answer_that_does_not_ask_to_come_again() {
    let policy = RetryPolicy::new(Profile::Idem);
    let poll = |status, fields: &[(&'static str, &str)]| policy.decide_poll(outcome(status, &headers(fields), ""));
    let again = |after| Decision::Poll { location: None, after };
    assert_eq!(poll(202, &[]), again(None));
    assert_eq!(poll(202, &[RETRY_AFTER_7]), again(Some(Duration::from_secs(7))));
    assert_eq!(poll(200, &[RETRY_AFTER_7]), again(Some(Duration::from_secs(7))));
    for status in [200, 201, 303, 400, 409, 410, 422] {
        assert_eq!(poll(status, &[]), FINAL, "{status}");
    }
    for status in [301, 302, 307, 308, 401, 403, 404, 405, 407, 421] {
        assert_eq!(poll(status, &[]), Decision::Stop(Stop::NotAnswered), "{status}: the operation may still run");
    }
    assert_eq!(poll(503, &[]), retry("unavailable"));
    assert_eq!(poll(429, &[]), retry("too-many-requests"));
}

#[test]
fn a_body_that_was_not_read_whole_makes_no_end_that_the_rest_may_contradict() {
    let cut = r#"{"title":"x"#;
    let idem = RetryPolicy::new(Profile::Idem);
    let mark = ("idempotency-replayed", "true");
    for status in [400, 409, 422, 500, 503, 504] {
        let seven = Some(Duration::from_secs(7));
        let expected = Decision::Retry { reason: "unreadable", after: seven };
        assert_eq!(decide_cut(&idem, status, &[PROBLEM, RETRY_AFTER_7], cut), expected, "{status}");
    }
    assert_eq!(decide_cut(&idem, 504, &[PROBLEM, mark], cut), retry("unreadable"), "it may be an unknown outcome");
    assert_eq!(decide_cut(&idem, 409, &[PROBLEM, mark], cut), Decision::Final { replayed: true });
    let json = ("content-type", "application/json");
    assert_eq!(decide_cut(&idem, 409, &[json], cut), FINAL, "the application's own");
    assert_eq!(decide_cut(&idem, 201, &[PROBLEM], cut), FINAL);
    let draft = RetryPolicy::new(Profile::IetfDraft { retention: Duration::from_secs(60) });
    assert_eq!(decide_cut(&draft, 409, &[PROBLEM], cut), FINAL, "it knows no types");
    let told = draft.in_progress_type("https://api.test/busy");
    assert_eq!(decide_cut(&told, 409, &[PROBLEM], cut), retry("unreadable"));
    let stripe = RetryPolicy::new(Profile::Stripe);
    assert_eq!(decide_cut(&stripe, 409, &[json], cut), retry("unreadable"));
    assert_eq!(decide_cut(&stripe, 409, &[json, ("stripe-should-retry", "false")], cut), FINAL);
    assert_eq!(decide_cut(&stripe, 402, &[json], cut), FINAL);
}

/// Errors as Stripe's documentation describes them (docs.stripe.com, "Error handling", "Idempotent requests", "Rate limits"),
/// shortened.
#[test]
fn recorded_errors_of_stripe() {
    let policy = RetryPolicy::new(Profile::Stripe);
    let json = ("content-type", "application/json");
    let body = |kind: &str, code: &str| {
        format!(r#"{{"error":{{"type":"{kind}","code":"{code}","message":"m","doc_url":"https://stripe.com/docs"}}}}"#)
    };
    let replayed = Decision::Final { replayed: true };
    for (status, fields, body, expected) in [
        // A card error is the answer to the operation.
        (402, &[json][..], body("card_error", "card_declined"), FINAL),
        (400, &[json, ("stripe-should-retry", "false")], body("invalid_request_error", "parameter_missing"), FINAL),
        // The key was used with other parameters.
        (400, &[json], r#"{"error":{"type":"idempotency_error","message":"m"}}"#.to_owned(), FINAL),
        (401, &[json], body("invalid_request_error", "api_key_expired"), FINAL),
        (404, &[json], body("invalid_request_error", "resource_missing"), FINAL),
        // The same key at the same time.
        (409, &[json], body("idempotency_error", "idempotency_key_in_use"), retry("in-progress")),
        (409, &[json], body("invalid_request_error", "resource_already_exists"), FINAL),
        // Another request holds the object.
        (
            429,
            &[json, ("stripe-should-retry", "true")],
            body("invalid_request_error", "lock_timeout"),
            retry("stripe-should-retry"),
        ),
        (409, &[json, ("stripe-should-retry", "true")], body("api_error", "conflict"), retry("stripe-should-retry")),
        (429, &[json], body("rate_limit_error", "rate_limit"), retry("too-many-requests")),
        (500, &[json], body("api_error", ""), retry("server-error")),
        (503, &[json, ("stripe-should-retry", "false")], body("api_error", ""), FINAL),
        (500, &[json, ("idempotent-replayed", "true")], body("api_error", ""), replayed.clone()),
        (402, &[json, ("idempotent-replayed", "true")], body("card_error", "card_declined"), replayed),
    ] {
        assert_eq!(decide(&policy, status, fields, &body), expected, "{status} {body}");
    }
    let idem = RetryPolicy::new(Profile::Idem);
    assert_eq!(decide(&idem, 503, &[("stripe-should-retry", "false")], ""), retry("unavailable"), "no field of idem");
}
