//! Other middlewares around the layer and inside of it.

use std::convert::Infallible;
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use actix_web::dev::Service;
use actix_web::middleware::Compress;
use actix_web::test::{TestRequest, init_service};
use actix_web::{App, HttpResponse, error, rt, web};
use bytes::Bytes;
use flate2::read::GzDecoder;
use futures_util::future::LocalBoxFuture;
use futures_util::stream;
use tokio::sync::Semaphore;

use crate::support::{Answer, Runs, at_most_once, post, post_and_wait, send};

const TEXT: &str = "the same text again and again, the same text again and again";

fn gzipped(request: TestRequest) -> TestRequest {
    request.insert_header(("accept-encoding", "gzip"))
}

/// The text of an answer that came in gzip, or plain.
fn text(answer: &Answer) -> String {
    let mut text = String::new();
    match answer.header("content-encoding") {
        Some("gzip") => GzDecoder::new(&answer.body[..]).read_to_string(&mut text).unwrap(),
        _ => (&answer.body[..]).read_to_string(&mut text).unwrap(),
    };
    text
}

#[actix_web::test]
async fn an_answer_can_be_had_compressed_first_and_plain_later_and_the_other_way_round() {
    for first_in_gzip in [true, false] {
        let handler = || std::future::ready(HttpResponse::Ok().content_type("text/plain").body(TEXT.repeat(20)));
        let app = App::new().route("/p", web::post().to(handler)).wrap(at_most_once()).wrap(Compress::default());
        let app = init_service(app).await;
        for in_gzip in [first_in_gzip, !first_in_gzip] {
            let plain = post("/p", "k").insert_header(("accept-encoding", "identity"));
            let answer = send(&app, if in_gzip { gzipped(post("/p", "k")) } else { plain }).await;
            assert_eq!(answer.header("content-encoding") == Some("gzip"), in_gzip, "{answer:?}");
            assert_eq!(text(&answer), TEXT.repeat(20));
            assert_eq!(answer.is_replay(), in_gzip != first_in_gzip);
        }
    }
}

/// The reason why compression stands outside. The length that the handler declares is that of the plain text.
#[actix_web::test]
async fn a_compression_inside_is_part_of_the_answer_that_all_get() {
    let handler = || {
        let text = stream::iter([Ok::<_, Infallible>(Bytes::from(TEXT.repeat(20)))]);
        let length = TEXT.len() as u64 * 20;
        std::future::ready(HttpResponse::Ok().content_type("text/plain").no_chunking(length).streaming(text))
    };
    let app = App::new().route("/p", web::post().to(handler)).wrap(Compress::default()).wrap(at_most_once());
    let app = init_service(app).await;
    let first = send(&app, gzipped(post("/p", "k"))).await;
    let again = send(&app, post("/p", "k").insert_header(("accept-encoding", "identity"))).await;
    assert_eq!(again.header("content-encoding"), Some("gzip"));
    again.assert_replay_of(&first);
}

/// A handler that waits at a gate.
fn gated(runs: &Runs, gate: &Arc<Semaphore>) -> impl Fn() -> LocalBoxFuture<'static, HttpResponse> + Clone + use<> {
    let (runs, gate) = (runs.clone(), Arc::clone(gate));
    move || {
        let (runs, gate) = (runs.clone(), Arc::clone(&gate));
        Box::pin(async move {
            gate.acquire().await.unwrap().forget();
            runs.answer()
        })
    }
}

#[actix_web::test]
async fn a_timeout_outside_ends_the_request_and_not_the_operation() {
    let (runs, gate) = (Runs::default(), Arc::new(Semaphore::new(0)));
    let app = App::new().route("/p", web::post().to(gated(&runs, &gate))).wrap(at_most_once());
    let app = App::wrap_fn(app, |request, inner| {
        let answered = inner.call(request);
        async { rt::time::timeout(Duration::from_millis(100), answered).await.map_err(error::ErrorRequestTimeout)? }
    });
    let app = init_service(app).await;
    assert_eq!(send(&app, post("/p", "k")).await.status, 408);
    gate.add_permits(1);
    let again = crate::support::eventually("the answer", async || {
        Some(send(&app, post_and_wait("/p", "k")).await).filter(|answer| answer.status != 408)
    });
    let again = again.await;
    assert_eq!((again.text(), again.is_replay(), runs.count()), ("run 1", true, 1));
}

#[actix_web::test]
async fn a_timeout_inside_ends_the_operation_which_never_runs_again_under_at_most_once() {
    let (runs, gate) = (Runs::default(), Arc::new(Semaphore::new(0)));
    let app = App::new().route("/p", web::post().to(gated(&runs, &gate)));
    let app = app.wrap_fn(|request, inner| {
        let answered = inner.call(request);
        async { rt::time::timeout(Duration::from_millis(100), answered).await.map_err(error::ErrorRequestTimeout)? }
    });
    let app = init_service(app.wrap(at_most_once())).await;
    let first = send(&app, post("/p", "k")).await;
    assert_eq!((first.status.as_u16(), runs.count()), (408, 0));
    gate.add_permits(1);
    let again = send(&app, post("/p", "k")).await;
    assert_eq!((again.status.as_u16(), again.is_replay(), runs.count()), (408, true, 0));
}
