use idem_core::engine::StepError;
use idem_core::{HeaderField, Timestamp};

use super::*;

fn fields(fields: &[(&'static str, &'static [u8])]) -> Vec<(Bytes, Bytes)> {
    fields.iter().map(|&(name, value)| (Bytes::from_static(name.as_bytes()), Bytes::from_static(value))).collect()
}

fn replay(status: u16, headers: &[(&'static str, &'static [u8])], body: StoredBody, kind: ReplayKind) -> Replay {
    let headers = fields(headers).into_iter().map(|(name, value)| HeaderField { name, value }).collect();
    let response = StoredResponse { status, headers, body, trace: None };
    Replay { response, kind, attempt: 1, settled_at: Timestamp::from_unix_micros(0) }
}

fn document(reply: &Reply) -> serde_json::Value {
    serde_json::from_slice(&reply.body).unwrap()
}

#[test]
fn a_replay_is_byte_for_byte_what_was_stored_and_says_that_it_is_one() {
    let headers: &[(&str, &[u8])] = &[("x-b", b"\xFF\x00"), ("etag", b"\"1\""), ("x-b", b""), ("content-type", b"x/y")];
    for kind in [ReplayKind::Completed, ReplayKind::Failed] {
        for (status, body) in [(201, &b"\x00\xFFbytes"[..]), (204, b""), (422, b"no")] {
            let body = Bytes::from_static(body);
            let reply = HttpPolicy::new().replay(&replay(status, headers, StoredBody::Retained(body.clone()), kind));
            let mut expected = fields(headers);
            expected.extend(fields(&[("idempotency-replayed", b"true")]));
            assert_eq!(reply, Reply { status, headers: expected, body, problem: None });
        }
    }
}

#[test]
fn a_replay_has_no_stored_field_that_frames_the_message() {
    let framed: &[(&str, &[u8])] = &[("content-length", b"9"), ("transfer-encoding", b"chunked"), ("x-kept", b"1")];
    let reply =
        HttpPolicy::new().replay(&replay(200, framed, StoredBody::Retained("whole".into()), ReplayKind::Completed));
    let names: Vec<_> = reply.headers.iter().map(|(name, _)| &name[..]).collect();
    assert!(names.contains(&&b"x-kept"[..]) && !names.contains(&&b"content-length"[..]), "{names:?}");
    assert!(!names.contains(&&b"transfer-encoding"[..]), "{names:?}");
}

#[test]
fn the_replay_header_can_have_another_name() {
    let policy = HttpPolicy::new().replay_header("X-Replay");
    let kept = policy.replay(&replay(200, &[], StoredBody::Retained(Bytes::new()), ReplayKind::Completed));
    assert_eq!(kept.headers, fields(&[("x-replay", b"true")]));
}

#[test]
fn a_tombstone_keeps_the_fields_of_the_operation_and_none_of_its_body() {
    let headers: &[(&str, &[u8])] = &[
        ("location", b"/p/1"),
        ("content-type", b"text/csv"),
        ("content-encoding", b"gzip"),
        ("content-disposition", b"attachment"),
        ("etag", b"\"1\""),
        ("last-modified", b"Mon, 01 Jan 2024 00:00:00 GMT"),
        ("accept-ranges", b"bytes"),
        ("digest", b"sha-256=x"),
        ("repr-digest", b"sha-256=:x:"),
        ("cache-control", b"max-age=3600"),
        ("expires", b"Mon, 01 Jan 2029 00:00:00 GMT"),
        ("x-payment", b"1"),
        ("x-payment", b"2"),
    ];
    let reply = HttpPolicy::new().replay(&replay(201, headers, StoredBody::NotRetained, ReplayKind::Completed));
    assert_eq!((reply.status, reply.problem), (410, Some(ProblemKind::BodyNotRetained)));
    let expected: &[(&str, &[u8])] = &[
        ("content-type", b"application/problem+json"),
        ("cache-control", b"no-store"),
        ("location", b"/p/1"),
        ("x-payment", b"1"),
        ("x-payment", b"2"),
        ("idempotency-replayed", b"true"),
    ];
    assert_eq!(reply.headers, fields(expected));
    assert_eq!(document(&reply)["original_status"], 201);
    assert_eq!(document(&reply)["status"], 410);
}

#[test]
fn an_unknown_outcome_is_its_problem_and_nothing_of_the_record() {
    let headers: &[(&str, &[u8])] = &[("x-a", b"1")];
    for body in [StoredBody::Retained("stored".into()), StoredBody::NotRetained] {
        let reply = HttpPolicy::new().replay(&replay(200, headers, body, ReplayKind::OutcomeUnknown));
        assert_eq!((reply.status, reply.problem), (504, Some(ProblemKind::OutcomeUnknown)));
        let expected: &[(&str, &[u8])] = &[
            ("content-type", b"application/problem+json"),
            ("cache-control", b"no-store"),
            ("idempotency-replayed", b"true"),
        ];
        assert_eq!(reply.headers, fields(expected));
        assert!(document(&reply).get("original_status").is_none());
    }
}

#[test]
fn a_problem_has_the_status_of_its_kind_and_says_when_to_come_again() {
    let problem = Problem::new(ProblemKind::InProgress).retry_after(Duration::from_millis(2100));
    let reply = HttpPolicy::new().problem(&problem);
    assert_eq!((reply.status, reply.problem), (409, Some(ProblemKind::InProgress)));
    let expected: &[(&str, &[u8])] =
        &[("content-type", b"application/problem+json"), ("cache-control", b"no-store"), ("retry-after", b"3")];
    assert_eq!(reply.headers, fields(expected));
    assert_eq!(reply.body, Bytes::from(problem.to_json()));
}

#[test]
fn a_problem_without_a_time_has_no_retry_after() {
    let reply = HttpPolicy::new().problem(&Problem::new(ProblemKind::Mismatch));
    assert_eq!(reply.headers, fields(&[("content-type", b"application/problem+json"), ("cache-control", b"no-store")]));
}

#[test]
fn only_a_missing_principal_is_challenged_by_the_scheme_of_the_policy() {
    let headers = |policy: HttpPolicy| policy.problem(&Problem::new(ProblemKind::PrincipalMissing)).headers;
    let expected = |challenge: &'static [u8]| {
        fields(&[
            ("content-type", b"application/problem+json"),
            ("cache-control", b"no-store"),
            ("www-authenticate", challenge),
        ])
    };
    assert_eq!(headers(HttpPolicy::new()), expected(b"Bearer"));
    assert_eq!(headers(HttpPolicy::new().challenge("Basic realm=\"pay\"")), expected(b"Basic realm=\"pay\""));
}

#[test]
fn every_failure_of_the_engine_has_its_answer() {
    let store = |kind| StoreError::new(kind, "secret-dsn");
    let unavailable = (503, Some(ProblemKind::StoreUnavailable), Some("1"));
    let unclear = (503, Some(ProblemKind::CommitUnclear), Some("1"));
    let unreadable = (500, Some(ProblemKind::RecordUnreadable), None);
    let cases = [
        (ExecuteError::NotAdmitted(store(StoreErrorKind::Unavailable)), unavailable),
        (ExecuteError::NotAdmitted(store(StoreErrorKind::Timeout)), unavailable),
        (ExecuteError::NotAdmitted(store(StoreErrorKind::Capacity)), unavailable),
        (ExecuteError::NotAdmitted(store(StoreErrorKind::Misconfigured)), unavailable),
        (ExecuteError::NotAdmitted(store(StoreErrorKind::Corrupt)), unreadable),
        (ExecuteError::Busy(store(StoreErrorKind::Busy)), (503, Some(ProblemKind::Overloaded), Some("1"))),
        (ExecuteError::CommitUnclear(store(StoreErrorKind::Unavailable)), unclear),
        (
            ExecuteError::TransactionFailed(store(StoreErrorKind::TransactionFailed)),
            (500, Some(ProblemKind::HandlerFailed), None),
        ),
        (ExecuteError::TransactionHeld, (500, Some(ProblemKind::HandlerFailed), None)),
        (ExecuteError::Steps(StepError::Refused("a test")), (500, Some(ProblemKind::HandlerFailed), None)),
        (ExecuteError::ShuttingDown, (503, Some(ProblemKind::ShuttingDown), Some("1"))),
        (ExecuteError::Overloaded { limit: 1 }, (503, Some(ProblemKind::Overloaded), Some("1"))),
        (ExecuteError::Interrupted, unclear),
    ];
    for (error, (status, problem, retry_after)) in cases {
        let reply = HttpPolicy::new().failure(&error);
        assert_eq!((reply.status, reply.problem), (status, problem), "{error:?}");
        let found = reply.headers.iter().find(|(name, _)| name == "retry-after").map(|(_, value)| value.clone());
        assert_eq!(found, retry_after.map(Bytes::from), "{error:?}");
        assert!(!String::from_utf8_lossy(&reply.body).contains("secret"), "{error:?} shows the store's message");
    }
}

#[test]
fn an_answer_that_was_left_elsewhere_counts_if_nothing_takes_its_place_and_a_lost_one_is_unclear() {
    let policy = HttpPolicy::new();
    assert_eq!(policy.answer_of(Ok(()), Some("left")), Ok("left"));
    let reply = policy.problem(&Problem::new(ProblemKind::Mismatch));
    assert_eq!(policy.answer_of(Err(reply.clone()), Some("left")), Err(reply.clone()));
    assert_eq!(policy.answer_of::<()>(Err(reply.clone()), None), Err(reply));
    let lost = policy.answer_of::<()>(Ok(()), None).unwrap_err();
    assert_eq!((lost.status, lost.problem), (503, Some(ProblemKind::CommitUnclear)));
}

#[test]
fn the_copy_of_an_answer_has_all_of_it_and_one_whose_body_streams_has_no_copy() {
    let lines: [(&str, &[u8]); 3] = [("set-cookie", b"a=1"), ("x-a", b"\xFF"), ("set-cookie", b"b=2")];
    let chunks = ["one, ".into(), "two".into()];
    let whole = HttpPolicy::new().copy_of(404, &lines[..], &chunks, Captured::More);
    assert_eq!((whole.status, &whole.body[..], whole.problem), (404, &b"one, two"[..], None));
    assert_eq!(whole.headers, fields(&lines));
    let in_part = HttpPolicy::new().copy_of(404, &lines[..], &chunks, Captured::Enough);
    assert_eq!((in_part.status, in_part.problem), (410, Some(ProblemKind::BodyNotRetained)));
    assert_eq!(document(&in_part)["original_status"], 404);
}

#[test]
fn a_transaction_that_was_kept_too_long_is_explained() {
    let detail = document(&HttpPolicy::new().failure(&ExecuteError::TransactionHeld))["detail"].clone();
    assert!(detail.as_str().unwrap().contains("transaction"), "{detail}");
}

#[test]
fn a_copy_declares_no_length_and_under_key_only_has_what_a_replay_has() {
    let headers = [("content-length", b"9".as_slice()), ("location", b"/p/1"), ("content-encoding", b"gzip")];
    let copy = |policy: HttpPolicy, captured| {
        let copy = policy.copy_of(201, &headers[..], &["body".into()], captured);
        (copy.status, copy.headers.len(), copy.body.len(), copy.problem)
    };
    assert_eq!(copy(HttpPolicy::new(), Captured::More), (201, 2, 4, None));
    assert_eq!(copy(HttpPolicy::new(), Captured::Enough).3, Some(ProblemKind::BodyNotRetained));
    assert_eq!(copy(HttpPolicy::new().key_only(), Captured::Enough), (201, 1, 0, None));
}

#[test]
fn what_a_reply_says_is_not_in_debug_output() {
    let body = StoredBody::Retained("secret".into());
    let reply = HttpPolicy::new().replay(&replay(200, &[("x-token", b"secret-value")], body, ReplayKind::Completed));
    assert!(!format!("{reply:?}").contains("secret"), "the reply shows the response: {reply:?}");
}

#[test]
fn a_status_that_no_handler_ends_with_is_an_unreadable_record() {
    for status in [0, 99, 100, 101, 199, 1000, u16::MAX] {
        let reply = HttpPolicy::new().replay(&Replay {
            response: StoredResponse::new(status, "success"),
            kind: ReplayKind::Completed,
            attempt: 1,
            settled_at: idem_core::Timestamp::from_unix_micros(0),
        });
        assert_eq!((reply.status, reply.problem), (500, Some(ProblemKind::RecordUnreadable)), "{status}");
        assert!(reply.headers.iter().all(|(name, _)| name != "idempotency-replayed"), "{status}");
    }
}

#[test]
fn a_failed_handler_is_a_fault_with_a_problem_and_no_body_of_its_own() {
    let conclusion = HttpPolicy::new().handler_failed::<()>();
    assert_eq!(conclusion.retention, None);
    assert_eq!(conclusion.value.unwrap_err().problem, Some(ProblemKind::HandlerFailed));
    let Disposition::Fault { response } = conclusion.disposition else { panic!("not a fault") };
    assert_eq!(response.status, 500);
    let fields: Vec<_> = response.headers.iter().map(|field| (field.name.clone(), field.value.clone())).collect();
    let no_store = ("cache-control".into(), "no-store".into());
    assert_eq!(fields, [("content-type".into(), "application/problem+json".into()), no_store]);
    let StoredBody::Retained(body) = &response.body else { panic!("a tombstone") };
    let document: serde_json::Value = serde_json::from_slice(body).unwrap();
    assert_eq!(document["type"], ProblemKind::HandlerFailed.type_uri());
}

fn content_type(reply: &Reply) -> &[u8] {
    &reply.headers.iter().find(|(name, _)| &name[..] == b"content-type").unwrap().1
}

#[test]
fn a_mismatch_may_be_a_conflict_in_the_status_and_in_the_document() {
    let policy = HttpPolicy::new().mismatch_is_conflict();
    let reply = policy.problem(&Problem::new(ProblemKind::Mismatch));
    let document: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
    assert_eq!((reply.status, document["status"].as_u64()), (409, Some(409)));
    assert_eq!(reply.problem, Some(ProblemKind::Mismatch));
    assert_eq!(policy.problem(&Problem::new(ProblemKind::KeyMissing)).status, 400);
}

#[test]
fn the_types_of_problems_may_lead_elsewhere() {
    let policy = HttpPolicy::new().problem_type_base("https://api.example.com/problems/");
    let reply = policy.problem(&Problem::new(ProblemKind::InProgress).retry_after(Duration::from_secs(3)));
    let document: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
    assert_eq!(document["type"], "https://api.example.com/problems/in-progress");
    assert_eq!(content_type(&reply), b"application/problem+json");
}

#[test]
fn problems_may_have_the_form_of_the_applications_errors() {
    let policy =
        HttpPolicy::new().mismatch_is_conflict().problem_body("application/vnd.api+json", |problem, status| {
            assert_ne!(problem.kind(), ProblemKind::Misconfigured, "this form cannot be written");
            format!("{status} {}: {}", problem.kind().name(), problem.detail_text()).into_bytes()
        });
    let reply = policy.problem(&Problem::new(ProblemKind::Mismatch).detail("another body"));
    assert_eq!((&reply.body[..], reply.status), (&b"409 mismatch: another body"[..], 409));
    assert_eq!(content_type(&reply), b"application/vnd.api+json");
    let waits = policy.problem(&Problem::new(ProblemKind::InProgress).retry_after(Duration::from_secs(3)));
    assert!(waits.headers.iter().any(|(name, value)| &name[..] == b"retry-after" && &value[..] == b"3"));
    // If the application's form panics, the client gets the default document.
    let reply = policy.problem(&Problem::new(ProblemKind::Misconfigured));
    let document: serde_json::Value = serde_json::from_slice(&reply.body).unwrap();
    assert_eq!((document["status"].as_u64(), content_type(&reply)), (Some(500), &b"application/problem+json"[..]));
}
