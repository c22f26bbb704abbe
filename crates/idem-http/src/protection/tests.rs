use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use idem_core::engine::Settings;
use idem_core::{DurableStore, MemoryStore, StoredResponse, Writes};
use tokio::sync::oneshot;

use super::*;

type Fields = [(&'static str, &'static [u8])];

/// A request's head: who it says to be.
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

fn arrival<S: ScopeSource<Head>>(protection: &Protection<S>) -> Box<Arrival> {
    arrival_of(protection, KEYED)
}

fn arrival_of<S: ScopeSource<Head>>(protection: &Protection<S>, headers: &Fields) -> Box<Arrival> {
    match protection.decide(&Head(Some("acme")), &post(headers)) {
        Decision::Receive(arrival) => arrival,
        decision => panic!("{decision:?}"),
    }
}

fn refusal(decision: Decision) -> Option<ProblemKind> {
    match decision {
        Decision::Refuse(reply) => reply.problem,
        decision => panic!("{decision:?}"),
    }
}

async fn arrived<S: ScopeSource<Head>>(protection: &Protection<S>, body: &'static str) -> Arrived {
    arrival(protection).receive(stream::iter([Ok(Bytes::from(body))])).await.unwrap()
}

fn done(value: &'static str) -> Option<Conclusion<&'static str>> {
    let response = StoredResponse::new(201, value);
    let disposition = idem_core::engine::Disposition::Complete { response, writes: Writes::Keep };
    Some(Conclusion { value, disposition, retention: None })
}

#[tokio::test]
async fn who_asks_comes_before_what_is_asked() {
    let protection = protection();
    for headers in [KEYED, &[], &[("idempotency-key", b"not a key")]] {
        assert_eq!(refusal(protection.decide(&Head(None), &post(headers))), Some(ProblemKind::PrincipalMissing));
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
    arrival_of(&protection, largest);
}

#[tokio::test]
async fn a_body_that_is_shorter_than_declared_was_consumed_before() {
    let protection = protection();
    let (declared, encoded) = (("content-length", b"4".as_slice()), ("content-encoding", b"gzip".as_slice()));
    let received = async |headers: &Fields, body: &[&'static str]| {
        let body = stream::iter(body.iter().map(|&chunk| Ok(Bytes::from(chunk))).collect::<Vec<_>>());
        arrival_of(&protection, headers).receive(body).await.map(drop).map_err(|reply| reply.problem)
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
        assert_eq!(arrival(&protection).receive(body).await.unwrap_err().problem, Some(kind));
    }
    let never = tokio::time::timeout(Duration::from_secs(61), arrival(&protection).receive(stream::pending()));
    assert_eq!(never.await.unwrap().unwrap_err().problem, Some(ProblemKind::BodyTooSlow));
}

#[tokio::test]
async fn a_repeat_is_replayed_and_another_request_is_a_mismatch() {
    let protection = protection();
    let first = arrived(&protection, "1").await;
    assert_eq!(protection.execute(first.operation, |_| async { done("ran") }).await, Ok("ran"));
    let again = arrived(&protection, "1").await;
    let replay = protection.execute(again.operation, |_| async { done("ran again") }).await.unwrap_err();
    assert_eq!((replay.status, replay.body, replay.problem), (201, "ran".into(), None));
    let other = arrived(&protection, "2").await;
    let mismatch = protection.execute(other.operation, |_| async { done("ran too") }).await.unwrap_err();
    assert_eq!(mismatch.problem, Some(ProblemKind::Mismatch));
}

#[tokio::test]
async fn a_repeat_while_it_runs_is_in_progress() {
    let protection = Arc::new(protection());
    let (started, gate) = (oneshot::channel(), oneshot::channel::<()>());
    let first = arrived(&protection, "1").await;
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
    let again = arrived(&protection, "1").await;
    let refused = protection.execute(again.operation, |_| async { done("ran again") }).await.unwrap_err();
    assert_eq!(refused.problem, Some(ProblemKind::InProgress));
    gate.0.send(()).unwrap();
    assert_eq!(running.await.unwrap(), Ok("ran"));
}

#[tokio::test]
async fn an_answer_that_breaks_off_and_a_panic_are_the_same_failure() {
    for panics in [false, true] {
        let protection = protection();
        let first = arrived(&protection, "1").await;
        let run = move |_| async move {
            assert!(!panics, "the handler panics");
            None::<Conclusion<()>>
        };
        let failed = protection.execute(first.operation, run).await.unwrap_err();
        assert_eq!(failed.problem, Some(ProblemKind::HandlerFailed));
        let again = arrived(&protection, "1").await;
        let replay = protection.execute(again.operation, |_| async { done("ran") }).await.unwrap_err();
        assert_eq!((replay.status, &replay.body), (500, &failed.body), "{panics}");
    }
}

#[tokio::test]
async fn a_run_that_never_began_leaves_the_key_as_it_was() {
    let protection = protection();
    let first = arrived(&protection, "1").await;
    let ran = protection.execute(first.operation, |_| async { Some(crate::never_began(())) }).await;
    assert_eq!(ran, Ok(()));
    // With a record, another body would be a mismatch.
    let other = arrived(&protection, "2").await;
    let run = |context: Context| async move {
        assert_eq!(context.attempt(), 1);
        done("ran")
    };
    assert_eq!(protection.execute(other.operation, run).await, Ok("ran"));
}

#[test]
fn neither_an_arrived_body_nor_a_key_is_in_debug_output() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let arrived = runtime.block_on(async { arrived(&protection(), "secret").await });
    assert!(!format!("{arrived:?}").contains("secret"), "{arrived:?}");
}
