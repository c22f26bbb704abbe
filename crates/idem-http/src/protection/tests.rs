use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::stream;
use idem_core::engine::{Event, ExecuteError, Observer, Settings};
use idem_core::{DurableStore, MemoryStore, RecordId, Replay, ReplayKind, StoredResponse, Writes};
use tokio::sync::oneshot;

use super::*;
use crate::budget::ByteBudget;

type Fields = [(&'static str, &'static [u8])];

/// A request's head: the principal that it claims.
struct Head(Option<&'static str>);

const KEYED: &Fields = &[("idempotency-key", b"k")];

fn protection() -> Protection<impl ScopeSource<Head>> {
    let store: Arc<dyn DurableStore> = Arc::new(MemoryStore::new(NonZeroUsize::new(100).unwrap()));
    Protection::new(Idempotency::at_most_once(store, Settings::new())).scope(|head: &Head| head.0)
}

fn post(headers: &Fields) -> RequestHead<'_, &Fields> {
    RequestHead {
        method: "POST",
        authority: None,
        path: "/p/1",
        query: None,
        route: Some("/p/{id}"),
        headers,
        is_protected: false,
    }
}

fn incoming<S: ScopeSource<Head>>(protection: &Protection<S>) -> Box<IncomingRequest> {
    incoming_of(protection, KEYED)
}

fn incoming_of<S: ScopeSource<Head>>(protection: &Protection<S>, headers: &Fields) -> Box<IncomingRequest> {
    match protection.decide(&Head(Some("acme")), &post(headers)) {
        Decision::Receive(incoming) => incoming,
        decision => panic!("{decision:?}"),
    }
}

fn refusal(decision: Decision) -> Option<ProblemKind> {
    match decision {
        Decision::Refuse(reply) => reply.problem,
        decision => panic!("{decision:?}"),
    }
}

async fn received<S: ScopeSource<Head>>(protection: &Protection<S>, body: &'static str) -> ReceivedRequest {
    protection.receive(incoming(protection), stream::iter([Ok(Bytes::from(body))])).await.unwrap()
}

fn done(value: &'static str) -> Result<Conclusion<&'static str>, BrokenResponse> {
    let response = StoredResponse::new(201, value);
    let disposition = idem_core::engine::Disposition::Complete { response, writes: Writes::Keep };
    Ok(Conclusion { value, disposition, retention: None })
}

#[tokio::test]
async fn the_keys_of_one_principal_are_limited_until_their_requests_are_answered() {
    let protection = protection().policy(HttpPolicy::new().max_keys_per_principal(1));
    for is_first in [true, false] {
        let ReceivedRequest { operation, reservation, .. } = received(&protection, "").await;
        let Decision::Refuse(refused) = protection.decide(&Head(Some("acme")), &post(KEYED)) else { panic!("a place") };
        assert_eq!(refused.problem, Some(ProblemKind::ShareExceeded));
        assert!(matches!(protection.decide(&Head(Some("other")), &post(KEYED)), Decision::Receive(_)));
        let run = move |_| async move {
            drop(reservation);
            done("ran")
        };
        // The place of a replay goes with the handler that does not run.
        assert_eq!(protection.execute(operation, run).await.is_ok(), is_first);
    }
    let arriving = incoming(&protection);
    assert_eq!(
        refusal(protection.decide(&Head(Some("acme")), &post(KEYED))),
        Some(ProblemKind::ShareExceeded),
        "a request that arrives has a place"
    );
    drop(arriving);
    incoming(&protection);
}

#[tokio::test]
async fn a_run_knows_the_trace_of_its_request() {
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let protection = protection();
    for (key, trace) in [("k1", Some(parent.parse().unwrap())), ("k2", None)] {
        let field = ("traceparent", parent.as_bytes());
        let headers: Vec<_> =
            std::iter::once(("idempotency-key", key.as_bytes())).chain(trace.map(|_| field)).collect();
        let Decision::Receive(incoming) = protection.decide(
            &Head(Some("acme")),
            &RequestHead {
                method: "POST",
                authority: None,
                path: "/p/1",
                query: None,
                route: None,
                headers: &headers[..],
                is_protected: false,
            },
        ) else {
            panic!("it is received");
        };
        let received = protection.receive(incoming, stream::iter([Ok(Bytes::new())])).await.unwrap();
        let run = move |context: idem_core::engine::Context| async move {
            assert_eq!(context.trace(), trace);
            done("ran")
        };
        assert_eq!(protection.execute(received.operation, run).await.unwrap(), "ran");
    }
}

#[tokio::test]
async fn who_asks_comes_before_what_is_asked() {
    let protection = protection();
    for headers in [KEYED, &[], &[("idempotency-key", b"not a key")]] {
        for nobody in [None, Some("")] {
            assert_eq!(refusal(protection.decide(&Head(nobody), &post(headers))), Some(ProblemKind::PrincipalMissing));
        }
    }
    let missing = protection.decide(&Head(Some("acme")), &post(&[]));
    assert_eq!(refusal(missing), Some(ProblemKind::KeyMissing));
    let get = RequestHead { method: "GET", ..post(&[]) };
    assert!(matches!(protection.decide(&Head(None), &get), Decision::Pass));
}

#[tokio::test]
async fn two_layers_are_misconfigured_and_a_declared_length_is_refused_before_a_byte_is_read() {
    let protection = protection();
    let twice = RequestHead { is_protected: true, ..post(KEYED) };
    assert_eq!(refusal(protection.decide(&Head(Some("acme")), &twice)), Some(ProblemKind::Misconfigured));
    let large: &Fields = &[KEYED[0], ("content-length", b"1048577")];
    assert_eq!(refusal(protection.decide(&Head(Some("acme")), &post(large))), Some(ProblemKind::BodyTooLarge));
    let largest: &Fields = &[KEYED[0], ("content-length", b"1048576")];
    incoming_of(&protection, largest);
}

#[tokio::test]
async fn a_body_that_is_shorter_than_declared_was_consumed_before() {
    let protection = protection();
    let (declared, encoded) = (("content-length", b"4".as_slice()), ("content-encoding", b"gzip".as_slice()));
    let received = async |headers: &Fields, body: &[&'static str]| {
        let body = stream::iter(body.iter().map(|&chunk| Ok(Bytes::from(chunk))).collect::<Vec<_>>());
        protection.receive(incoming_of(&protection, headers), body).await.map(drop).map_err(|reply| reply.problem)
    };
    for nothing in [&[][..], &[""], &["", ""]] {
        assert_eq!(received(&[KEYED[0], declared], nothing).await, Err(Some(ProblemKind::Misconfigured)));
        assert_eq!(received(&[KEYED[0], ("content-length", b"0")], nothing).await, Ok(()));
        assert_eq!(received(KEYED, nothing).await, Ok(()), "a length need not be declared");
        assert_eq!(received(&[KEYED[0], declared, encoded], nothing).await, Ok(()), "it may decode to nothing");
    }
    for changed in [&["", "1"][..], &["123"], &["1", "23"]] {
        assert_eq!(
            received(&[KEYED[0], declared], changed).await,
            Err(Some(ProblemKind::Misconfigured)),
            "{changed:?}"
        );
        assert_eq!(received(&[KEYED[0], declared, encoded], changed).await, Ok(()), "it may decode to that");
    }
    assert_eq!(received(&[KEYED[0], declared], &["12", "", "34"]).await, Ok(()));
    let longer = received(&[KEYED[0], declared], &["123", "45"]).await;
    assert_eq!(longer, Ok(()), "an outer layer has put another body there");
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_arrive_is_refused_with_the_reason() {
    let protection = protection();
    for (error, kind) in
        [(BodyError::Incomplete, ProblemKind::BodyIncomplete), (BodyError::TooLarge, ProblemKind::BodyTooLarge)]
    {
        let body = stream::iter([Ok(Bytes::from("1234")), Err(error)]);
        assert_eq!(protection.receive(incoming(&protection), body).await.unwrap_err().problem, Some(kind));
    }
    let never =
        tokio::time::timeout(Duration::from_secs(61), protection.receive(incoming(&protection), stream::pending()));
    assert_eq!(never.await.unwrap().unwrap_err().problem, Some(ProblemKind::BodyTooSlow));
}

#[tokio::test]
async fn a_repeat_is_replayed_and_another_request_is_a_mismatch() {
    let protection = protection();
    let first = received(&protection, "1").await;
    assert_eq!(protection.execute(first.operation, |_| async { done("ran") }).await, Ok("ran"));
    let again = received(&protection, "1").await;
    let replay = protection.execute(again.operation, |_| async { done("ran again") }).await.unwrap_err();
    assert_eq!((replay.status, replay.body, replay.problem), (201, "ran".into(), None));
    let other = received(&protection, "2").await;
    let mismatch = protection.execute(other.operation, |_| async { done("ran too") }).await.unwrap_err();
    assert_eq!(mismatch.problem, Some(ProblemKind::Mismatch));
}

#[tokio::test]
async fn a_repeat_while_it_runs_is_in_progress() {
    let protection = Arc::new(protection());
    let (started, gate) = (oneshot::channel(), oneshot::channel::<()>());
    let first = received(&protection, "1").await;
    let running = tokio::spawn({
        let protection = Arc::clone(&protection);
        let run = |_| async move {
            started.0.send(()).unwrap();
            gate.1.await.unwrap();
            done("ran")
        };
        async move { protection.execute(first.operation, run).await }
    });
    started.1.await.unwrap();
    let again = received(&protection, "1").await;
    let refused = protection.execute(again.operation, |_| async { done("ran again") }).await.unwrap_err();
    assert_eq!(refused.problem, Some(ProblemKind::InProgress));
    gate.0.send(()).unwrap();
    assert_eq!(running.await.unwrap(), Ok("ran"));
}

#[tokio::test]
async fn an_answer_that_breaks_off_and_a_panic_are_the_same_failure() {
    for panics in [false, true] {
        let protection = protection();
        let first = received(&protection, "1").await;
        let run = move |_| async move {
            assert!(!panics, "the handler panics");
            let cut = stream::iter([Err::<Bytes, _>("cut")]);
            HttpPolicy::new().capture(200, &[][..], None).read(cut).await.map(|(conclusion, _)| conclusion)
        };
        let failed = protection.execute(first.operation, run).await.unwrap_err();
        assert_eq!(failed.problem, Some(ProblemKind::HandlerFailed));
        let again = received(&protection, "1").await;
        let replay = protection.execute(again.operation, |_| async { done("ran") }).await.unwrap_err();
        assert_eq!((replay.status, &replay.body), (500, &failed.body), "{panics}");
    }
}

#[tokio::test]
async fn a_run_that_never_began_leaves_the_key_as_it_was() {
    let protection = protection();
    let first = received(&protection, "1").await;
    let ran = protection.execute(first.operation, |_| async { Ok(crate::never_began(())) }).await;
    assert_eq!(ran, Ok(()));
    // With a record, another body would be a mismatch.
    let other = received(&protection, "2").await;
    let run = |context: Context| async move {
        assert_eq!(context.attempt(), 1);
        done("ran")
    };
    assert_eq!(protection.execute(other.operation, run).await, Ok("ran"));
}

#[tokio::test]
async fn what_a_request_says_is_not_in_debug_output() {
    let protection = protection();
    let headers: &Fields = &[("idempotency-key", b"secret-key"), ("authorization", b"secret-token")];
    let mut incoming = incoming_of(&protection, headers);
    incoming.push("secret-body".into()).unwrap();
    assert!(!format!("{incoming:?}").contains("secret"), "{incoming:?}");
    let received = incoming.finish(protection.shared_policy());
    assert!(!format!("{received:?}").contains("secret"), "{received:?}");
}

#[tokio::test]
async fn the_wait_that_a_client_prefers_reaches_the_operation() {
    let protection = protection();
    let operation = |prefer: &'static [u8]| {
        let incoming = incoming_of(&protection, &[KEYED[0], ("prefer", prefer)]);
        format!("{:?}", incoming.finish(protection.shared_policy()).unwrap().operation)
    };
    assert!(operation(b"wait=7").contains("wait: Some(7s)"), "{}", operation(b"wait=7"));
    assert!(operation(b"wait=0").contains("wait: Some(0ns)"), "{}", operation(b"wait=0"));
    assert!(operation(b"respond-async").contains("wait: None"), "{}", operation(b"respond-async"));
}

#[tokio::test]
async fn the_limits_of_a_policy_are_those_of_its_requests() {
    let policy = HttpPolicy::new().request_body_limit(4).budget(ByteBudget::new(6));
    let protection = protection().policy(policy);
    let declared = protection.decide(&Head(Some("acme")), &post(&[KEYED[0], ("content-length", b"5")]));
    assert_eq!(refusal(declared), Some(ProblemKind::BodyTooLarge));
    let kind = |result: Result<(), Problem>| result.map_err(|problem| problem.kind());
    let mut first = incoming(&protection);
    assert_eq!(kind(first.push("abcd".into())), Ok(()));
    assert_eq!(kind(first.push("e".into())), Err(ProblemKind::BodyTooLarge));
    let mut second = incoming(&protection);
    assert_eq!(kind(second.push("abc".into())), Err(ProblemKind::Overloaded), "the budget is shared");
    drop(first);
    assert_eq!(kind(incoming(&protection).push("abc".into())), Ok(()));
}

#[derive(Debug, Default)]
struct Refusals(Mutex<Vec<String>>);

impl Observer for Refusals {
    fn observe(&self, event: &Event<'_>) {
        assert!(event.kind.is_decision() && event.record.is_none(), "{event:?}");
        self.0.lock().unwrap().push(format!("{} {}", event.operation, event.kind.name()));
    }
}

#[tokio::test(start_paused = true)]
async fn the_observer_is_told_of_each_refusal_once() {
    let refusals = Arc::new(Refusals::default());
    let settings = Settings::new().observer(Arc::clone(&refusals) as Arc<dyn Observer>);
    let store: Arc<dyn DurableStore> = Arc::new(MemoryStore::new(NonZeroUsize::new(100).unwrap()));
    let protection = Protection::new(Idempotency::at_most_once(store, settings)).scope(|head: &Head| head.0);
    assert_eq!(refusal(protection.decide(&Head(Some("acme")), &post(&[]))), Some(ProblemKind::KeyMissing));
    assert_eq!(refusal(protection.decide(&Head(None), &post(KEYED))), Some(ProblemKind::PrincipalMissing));
    let get = RequestHead { method: "GET", ..post(&[]) };
    assert!(matches!(protection.decide(&Head(None), &get), Decision::Pass));
    protection.receive(incoming(&protection), stream::pending()).await.unwrap_err();
    let leaves = protection.receive(incoming(&protection), stream::pending());
    assert!(tokio::time::timeout(Duration::from_millis(1), leaves).await.is_err(), "its body does not come");
    received(&protection, "whole").await;
    let told = ["key-missing", "principal-missing", "body-too-slow", "interrupted"];
    assert_eq!(*refusals.0.lock().unwrap(), told.map(|refused| format!("POST /p/{{id}} {refused}")));
}

/// A webhook: the event in the body is the key, whatever a header says.
#[tokio::test]
async fn a_key_in_the_body_is_the_key() {
    let policy = HttpPolicy::new().key_member("/id".parse().unwrap()).min_key_length(5).key_optional();
    let protection = protection().policy(policy);
    let receive = async |headers: &Fields, body: &'static str| {
        let incoming = incoming_of(&protection, headers);
        let received = protection.receive(incoming, stream::iter([Ok(Bytes::from(body))])).await;
        received.map(|received| (received.operation, received.chunks.concat())).map_err(|reply| reply.problem)
    };
    let run = async |operation| {
        let ran = protection.execute(operation, |_| async { done("ran") }).await;
        ran.map_err(|reply| (reply.status, reply.problem))
    };
    let event = r#"{"id":"evt_1","amount":1}"#;
    let (operation, body) = receive(&[], event).await.unwrap();
    assert_eq!(body, event.as_bytes(), "the handler gets all of it");
    assert_eq!(run(operation).await, Ok("ran"));
    // Redelivered, with a header that names another key.
    let (operation, _) = receive(KEYED, event).await.unwrap();
    assert_eq!(run(operation).await, Err((201, None)), "it was no replay");
    let (operation, _) = receive(&[], r#"{"id":"evt_1","amount":2}"#).await.unwrap();
    assert_eq!(run(operation).await, Err((422, Some(ProblemKind::Mismatch))));
    let (operation, _) = receive(&[], r#"{"id":"evt_2","amount":1}"#).await.unwrap();
    assert_eq!(run(operation).await, Ok("ran"));
    assert_eq!(receive(KEYED, "{}").await.unwrap_err(), Some(ProblemKind::KeyMissing));
    assert_eq!(receive(KEYED, r#"{"id":"evt"}"#).await.unwrap_err(), Some(ProblemKind::KeyInvalid), "it is short");
}

/// Says what the work behind a request has come to.
#[derive(Debug, Default)]
struct Work {
    asked: Mutex<Vec<(RecordId, StoredResponse)>>,
    result: Mutex<Option<Result<Replay, idem_core::StoreError>>>,
}

#[async_trait::async_trait]
impl crate::Continuation for Work {
    async fn final_answer(&self, request: &RecordId, first: &StoredResponse) -> Result<Option<Replay>, ExecuteError> {
        self.asked.lock().unwrap().push((*request, first.clone()));
        self.result.lock().unwrap().take().transpose().map_err(ExecuteError::NotAdmitted)
    }
}

#[tokio::test]
async fn a_repeat_gets_the_final_answer_of_the_work_behind_it() {
    let work = Arc::new(Work::default());
    let protection = protection().policy(HttpPolicy::new().continued_by(work.clone()));
    let operation = received(&protection, "a").await.operation;
    let request = protection.engine().acquire_for(&operation).id;
    assert_eq!(protection.execute(operation.clone(), |_| async { done("first") }).await, Ok("first"));
    assert!(work.asked.lock().unwrap().is_empty(), "a first answer has no other one");

    let repeat = || protection.execute(operation.clone(), |_| async { done("twice") });
    let first = repeat().await.unwrap_err();
    assert_eq!((first.status, &first.body), (201, &Bytes::from("first")));
    assert_eq!(*work.asked.lock().unwrap(), [(request, StoredResponse::new(201, "first"))]);

    let replay = |kind, status| Replay {
        response: StoredResponse::new(status, "last"),
        kind,
        attempt: 1,
        settled_at: idem_core::Timestamp::from_unix_micros(0),
    };
    for (kind, status, problem) in [
        (ReplayKind::Completed, 200, None),
        (ReplayKind::Failed, 409, None),
        (ReplayKind::OutcomeUnknown, 504, Some(ProblemKind::OutcomeUnknown)),
    ] {
        *work.result.lock().unwrap() = Some(Ok(replay(kind, status)));
        let last = repeat().await.unwrap_err();
        assert_eq!((last.status, last.problem), (status, problem));
        assert!(last.headers.iter().any(|(name, _)| name == "idempotency-replayed"));
    }
    let away = idem_core::StoreError::new(idem_core::StoreErrorKind::Unavailable, "away");
    *work.result.lock().unwrap() = Some(Err(away));
    assert_eq!(repeat().await.unwrap_err().status, 503);
}

#[tokio::test]
async fn a_failed_request_has_no_work_behind_it() {
    let work = Arc::new(Work::default());
    let protection = protection().policy(HttpPolicy::new().continued_by(work.clone()));
    let operation = received(&protection, "a").await.operation;
    let failed = || Conclusion {
        value: "failed",
        disposition: idem_core::engine::Disposition::Fail { response: StoredResponse::new(422, "failed") },
        retention: None,
    };
    assert_eq!(protection.execute(operation.clone(), move |_| async move { Ok(failed()) }).await, Ok("failed"));
    assert_eq!(protection.execute(operation, |_| async { done("twice") }).await.unwrap_err().status, 422);
    assert!(work.asked.lock().unwrap().is_empty());
}
