//! The order of middlewares in the README: what each of them does outside of the layer, and what it would do inside.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use actix_cors::Cors;
use actix_web::body::BoxBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::middleware::{DefaultHeaders, Next, from_fn};
use actix_web::test::{TestRequest, init_service};
use actix_web::{App, Error, HttpResponse, web};
use idem_actix::ProblemKind;

use crate::support::{Answer, Runs, at_most_once, counted, post, send};

/// Where a middleware stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Outside,
    Inside,
}

/// The answers of an app with the layer, and another middleware outside or inside of it.
macro_rules! answers {
    ($place:expr, $runs:expr, $middleware:expr, [$($request:expr),+]) => {{
        let app = App::new().route("/p", web::post().to(counted($runs)));
        match $place {
            Place::Outside => {
                let app = init_service(app.wrap(at_most_once()).wrap($middleware)).await;
                [$(send(&app, $request).await),+]
            }
            Place::Inside => {
                let app = init_service(app.wrap($middleware).wrap(at_most_once())).await;
                [$(send(&app, $request).await),+]
            }
        }
    }};
}

fn from_origin(origin: &str) -> TestRequest {
    post("/p", "k").insert_header(("origin", origin))
}

fn allowed_origin(answer: &Answer) -> Option<&str> {
    answer.header("access-control-allow-origin")
}

#[actix_web::test]
async fn cors_outside_adds_its_fields_also_after_a_panic() {
    let handler = async || -> HttpResponse { panic!("the handler panics") };
    let app = App::new().route("/p", web::post().to(handler)).wrap(at_most_once()).wrap(Cors::permissive());
    let app = init_service(app).await;
    for is_replay in [false, true] {
        let answer = send(&app, from_origin("https://one.test")).await;
        assert_eq!((answer.status.as_u16(), answer.is_replay()), (500, is_replay));
        assert_eq!(allowed_origin(&answer), Some("https://one.test"));
    }
}

/// The middleware adds fields to responses. After a panic there is no response, except for its replay.
#[actix_web::test]
async fn fields_that_are_added_to_responses_outside_come_with_the_replay_of_a_panic_only() {
    let handler = async || -> HttpResponse { panic!("the handler panics") };
    let fields = DefaultHeaders::new().add(("x-a", "1"));
    let app = App::new().route("/p", web::post().to(handler)).wrap(at_most_once()).wrap(fields);
    let app = init_service(app).await;
    for (is_replay, added) in [(false, None), (true, Some("1"))] {
        let answer = send(&app, post("/p", "k")).await;
        assert_eq!((answer.is_replay(), answer.header("x-a")), (is_replay, added));
    }
}

fn refuse(request: ServiceRequest, mut answer: actix_web::HttpResponseBuilder) -> ServiceResponse {
    request.into_response(answer.finish())
}

/// Refuses requests without the right token.
async fn authenticate(request: ServiceRequest, next: Next<BoxBody>) -> Result<ServiceResponse, Error> {
    match request.headers().get("authorization").map(|value| value.as_bytes()) {
        Some(b"Bearer right") => next.call(request).await,
        _ => Ok(refuse(request, HttpResponse::Unauthorized())),
    }
}

#[actix_web::test]
async fn authentication_outside_keeps_replays_from_strangers_and_a_refusal_is_never_stored() {
    for place in [Place::Outside, Place::Inside] {
        let right = post("/p", "k").insert_header(("authorization", "Bearer right"));
        let requests = (post("/p", "k"), right, post("/p", "k"));
        let [refused, first, stranger] =
            answers!(place, &Runs::default(), from_fn(authenticate), [requests.0, requests.1, requests.2]);
        assert_eq!(refused.status.as_u16(), 401);
        first.assert_run(1);
        // Inside, authentication does not see requests for a replay.
        assert_eq!(stranger.status.as_u16() == 401, place == Place::Outside, "{place:?}");
    }
}

#[actix_web::test]
async fn a_rate_limit_outside_counts_replays_and_one_inside_counts_runs_and_neither_refusal_is_stored() {
    for (place, replays_pass) in [(Place::Outside, false), (Place::Inside, true)] {
        // The limit refuses the first request, as if others had used it up. It admits the second, and then refuses again.
        let seen = Arc::new(AtomicUsize::new(0));
        let limit = from_fn(move |request: ServiceRequest, next: Next<BoxBody>| {
            let passes = seen.fetch_add(1, Ordering::SeqCst) == 1;
            async move {
                match passes {
                    true => next.call(request).await,
                    false => Ok(refuse(request, HttpResponse::TooManyRequests())),
                }
            }
        });
        let [refused, first, again] =
            answers!(place, &Runs::default(), limit, [post("/p", "k"), post("/p", "k"), post("/p", "k")]);
        assert_eq!(refused.status.as_u16(), 429);
        first.assert_run(1);
        assert_eq!(again.is_replay(), replays_pass, "{place:?}: {again:?}");
    }
}

#[actix_web::test]
async fn tracing_outside_sees_every_request_and_inside_only_what_runs() {
    for (place, seen) in [(Place::Outside, 3), (Place::Inside, 1)] {
        let count = Runs::default();
        let counting = count.clone();
        let trace = from_fn(move |request: ServiceRequest, next: Next<BoxBody>| {
            counting.next();
            next.call(request)
        });
        answers!(place, &Runs::default(), trace, [post("/p", "k"), post("/p", "k"), post("/p", "k")]);
        assert_eq!(count.count(), seen, "{place:?}");
    }
}

#[actix_web::test]
async fn a_body_limit_outside_leaves_no_record_and_inside_its_refusal_is_the_answer() {
    let limit = async |request: ServiceRequest, next: Next<BoxBody>| {
        let length = request.headers().get("content-length").and_then(|length| length.to_str().ok()?.parse().ok());
        match length.unwrap_or(0) {
            0..=4 => next.call(request).await,
            _ => Ok(refuse(request, HttpResponse::PayloadTooLarge())),
        }
    };
    let body = |body: &'static str| {
        let length = ("content-length", body.len().to_string());
        post("/p", "k").insert_header(length).set_payload(body)
    };
    let runs = Runs::default();
    let requests = || [body("12345"), body("12345"), body("1234")];
    let [large, again, small] = requests();
    let [large, again, small] = answers!(Place::Outside, &runs, from_fn(limit), [large, again, small]);
    assert_eq!((large.status.as_u16(), again.status.as_u16(), again.is_replay()), (413, 413, false));
    small.assert_run(1);
    let [large, again, small] = requests();
    let [large, again, small] = answers!(Place::Inside, &runs, from_fn(limit), [large, again, small]);
    assert_eq!(large.status.as_u16(), 413);
    again.assert_replay_of(&large);
    small.assert_problem(ProblemKind::Mismatch);
    assert_eq!(runs.count(), 1);
}
