//! Bodies on their way in and out.

use std::convert::Infallible;
use std::time::Duration;

use actix_web::body::{BodyStream, BoxBody, SizedStream};
use actix_web::dev::{Payload, Service, ServiceRequest};
use actix_web::error::PayloadError;
use actix_web::middleware::{Next, from_fn};
use actix_web::test::init_service;
use actix_web::{App, HttpMessage, HttpResponse, web};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use idem_actix::{HttpPolicy, IdempotencyLayer, ProblemKind, SingleTenant};
use idem_log::Log;

use crate::support::{Runs, at_most_once, counted, post, send, send_chunks};

/// Request bodies of at most 8 bytes, kept responses of at most 8 bytes.
fn small() -> IdempotencyLayer<SingleTenant> {
    let policy = HttpPolicy::new().request_body_limit(8).stored_response_limit(8);
    at_most_once().policy(policy.request_body_timeout(Duration::from_millis(200)))
}

#[actix_web::test]
async fn a_body_over_the_limit_is_refused_whether_its_length_is_declared_or_not() {
    let runs = Runs::default();
    let app = init_service(App::new().wrap(small()).route("/p", web::post().to(counted(&runs)))).await;
    let declared = post("/p", "k").insert_header(("content-length", "9"));
    send(&app, declared).await.assert_problem(ProblemKind::BodyTooLarge);
    let endless = stream::repeat_with(|| Ok(Bytes::from_static(b"12345")));
    send_chunks(&app, endless).await.assert_problem(ProblemKind::BodyTooLarge);
    assert_eq!(runs.count(), 0);
    send(&app, post("/p", "k").set_payload("12345678")).await.assert_run(1);
}

#[actix_web::test]
async fn a_body_that_breaks_off_or_takes_too_long_is_refused_and_leaves_no_record() {
    let runs = Runs::default();
    let app = init_service(App::new().wrap(small()).route("/p", web::post().to(counted(&runs)))).await;
    let broken = stream::iter([Ok(Bytes::from_static(b"1234")), Err(PayloadError::Incomplete(None))]);
    send_chunks(&app, broken).await.assert_problem(ProblemKind::BodyIncomplete);
    let limited = stream::iter([Err(PayloadError::Overflow)]);
    send_chunks(&app, limited).await.assert_problem(ProblemKind::BodyTooLarge);
    send_chunks(&app, stream::pending()).await.assert_problem(ProblemKind::BodyTooSlow);
    assert_eq!(runs.count(), 0);
    // With a record, another body would be a mismatch.
    send(&app, post("/p", "k").set_payload("12345")).await.assert_run(1);
}

#[actix_web::test]
async fn a_body_that_an_outer_middleware_has_consumed_is_a_misconfiguration_and_not_an_empty_body() {
    let (log, runs) = (Log::of_process(), Runs::default());
    let app = App::new().wrap(small()).route("/p", web::post().to(counted(&runs)));
    let app = app.wrap_fn(|mut request, inner| {
        drop(request.take_payload());
        inner.call(request)
    });
    let app = init_service(app).await;
    for body in ["1234", "5678"] {
        let refused = send(&app, post("/p", "k").insert_header(("content-length", "4")).set_payload(body)).await;
        refused.assert_problem(ProblemKind::Misconfigured);
        assert!(!refused.text().contains("consumed"), "{refused:?}");
    }
    assert!(!log.lines(&["ERROR", "operation=\"POST /p\"", "was consumed before"]).is_empty());
    assert_eq!(runs.count(), 0);
    send(&app, post("/p", "k").insert_header(("content-length", "0"))).await.assert_run(1);
}

#[actix_web::test]
async fn a_body_of_which_an_outer_middleware_keeps_a_part_is_a_misconfiguration_too() {
    let runs = Runs::default();
    let app = App::new().wrap(small()).route("/p", web::post().to(counted(&runs)));
    let take = async |mut request: ServiceRequest, next: Next<BoxBody>| {
        let mut chunks = request.take_payload();
        let first = chunks.next().await.unwrap()?;
        request.set_payload(Payload::from(first.slice(4..)));
        next.call(request).await
    };
    let app = init_service(app.wrap(from_fn(take))).await;
    for body in ["1234same", "5678same"] {
        let refused = send(&app, post("/p", "k").insert_header(("content-length", "8")).set_payload(body)).await;
        refused.assert_problem(ProblemKind::Misconfigured);
    }
    assert_eq!(runs.count(), 0);
}

#[actix_web::test]
async fn how_a_body_is_cut_does_not_matter() {
    let handler = |body: web::Bytes| async move { HttpResponse::Ok().body(body) };
    let app = init_service(App::new().wrap(at_most_once()).route("/p", web::post().to(handler))).await;
    let long = Bytes::from(vec![b'x'; 5000]);
    let chunks = [Bytes::from("a"), Bytes::new(), long.clone(), Bytes::from("b")];
    let whole = chunks.concat();
    let first = send_chunks(&app, stream::iter(chunks.map(Ok))).await;
    assert_eq!(first.body, whole);
    send(&app, post("/p", "k").set_payload(whole)).await.assert_replay_of(&first);
}

#[actix_web::test]
async fn a_response_over_the_limit_reaches_the_first_client_whole_and_is_then_gone() {
    for is_sized in [false, true] {
        let runs = Runs::default();
        let counting = runs.clone();
        let handler = move || {
            counting.next();
            let chunks = stream::iter(["1234", "5678", "9"].map(|chunk| Ok::<_, Infallible>(Bytes::from(chunk))));
            let mut answer = HttpResponse::Created();
            let answer = answer.insert_header(("location", "/p/1"));
            std::future::ready(match is_sized {
                true => answer.body(SizedStream::new(9, chunks)),
                false => answer.body(BodyStream::new(chunks)),
            })
        };
        let app = init_service(App::new().wrap(small()).route("/p", web::post().to(handler))).await;
        let first = send(&app, post("/p", "k")).await;
        assert_eq!((first.status.as_u16(), first.text()), (201, "123456789"));
        let again = send(&app, post("/p", "k")).await;
        assert_eq!((again.status.as_u16(), again.is_replay()), (410, true));
        assert_eq!((again.json()["original_status"].as_u64(), again.header("location")), (Some(201), Some("/p/1")));
        assert_eq!(runs.count(), 1);
    }
}

#[actix_web::test]
async fn a_response_of_another_length_than_declared_is_a_failure() {
    for declared in [3, 9] {
        let handler = move || {
            let chunks = stream::iter([Ok::<_, Infallible>(Bytes::from("12345"))]);
            std::future::ready(HttpResponse::Created().body(SizedStream::new(declared, chunks)))
        };
        let app = init_service(App::new().wrap(at_most_once()).route("/p", web::post().to(handler))).await;
        let first = send(&app, post("/p", "k")).await;
        first.assert_problem(ProblemKind::HandlerFailed);
        send(&app, post("/p", "k")).await.assert_replay_of(&first);
    }
}

#[actix_web::test]
async fn a_response_that_breaks_off_under_the_limit_is_a_failure_and_not_its_first_half() {
    let handler = || {
        let chunks = stream::iter([Ok(Bytes::from("123")), Err(std::io::Error::other("broken"))]);
        std::future::ready(HttpResponse::Created().streaming(chunks))
    };
    let app = init_service(App::new().wrap(small()).route("/p", web::post().to(handler))).await;
    let first = send(&app, post("/p", "k")).await;
    first.assert_problem(ProblemKind::HandlerFailed);
    send(&app, post("/p", "k")).await.assert_replay_of(&first);
}

#[actix_web::test]
async fn header_fields_survive_repeated_and_not_utf_8() {
    use actix_web::http::header::HeaderValue;
    let handler = || {
        let mut answer = HttpResponse::Ok();
        answer.append_header(("x-a", "1")).append_header(("x-a", "2"));
        answer.append_header(("x-raw", HeaderValue::from_bytes(b"\xFF raw").unwrap()));
        answer.append_header(("set-cookie", "s=1"));
        std::future::ready(answer.finish())
    };
    let app = init_service(App::new().wrap(at_most_once()).route("/p", web::post().to(handler))).await;
    let first = send(&app, post("/p", "k")).await;
    assert_eq!(first.header("set-cookie"), Some("s=1"));
    let again = send(&app, post("/p", "k")).await;
    let values = |name: &str| again.headers.get_all(name).map(|value| value.as_bytes().to_vec()).collect::<Vec<_>>();
    assert_eq!(values("x-a"), [b"1", b"2"]);
    assert_eq!(values("x-raw"), [b"\xFF raw"]);
    assert!(values("set-cookie").is_empty());
}
