//! How a run ends: a panic, an error of a middleware, a worker that stops, and many requests that wait for it.

use std::sync::Arc;
use std::time::Duration;

use actix_web::dev::{Service, ServiceRequest, ServiceResponse};
use actix_web::http::StatusCode;
use actix_web::test::init_service;
use actix_web::{App, Error, HttpResponse, error, rt, web};
use futures_util::{TryFutureExt, stream};
use idem_actix::{Idempotency, IdempotencyLayer, ProblemKind, ResponseDirectives, Settings};
use idem_log::Log;
use idem_testkit::{Fault, FaultyStore, Verb};
use tokio::runtime;
use tokio::sync::Semaphore;
use tokio::task::LocalSet;
use tracing::Instrument as _;

use crate::support::{Runs, at_most_once, counted, memory, post, post_and_wait, send};

/// A handler whose first run panics.
fn panicking(runs: &Runs) -> impl AsyncHandler {
    let runs = runs.clone();
    move || {
        let runs = runs.clone();
        Box::pin(async move {
            let run = runs.next();
            assert!(run != 1, "the first run panics");
            HttpResponse::Ok().body(format!("run {run}"))
        }) as std::pin::Pin<Box<dyn Future<Output = HttpResponse>>>
    }
}

/// A handler of actix that takes nothing.
trait AsyncHandler: actix_web::Handler<(), Output = HttpResponse> {}
impl<H: actix_web::Handler<(), Output = HttpResponse>> AsyncHandler for H {}

#[actix_web::test]
async fn the_lines_of_a_handler_have_the_span_of_its_operation_inside_that_of_the_request() {
    let log = Log::of_process();
    let handler = async || {
        tokio::task::yield_now().await;
        tracing::info!(target: "idem_test", "the handler runs");
        HttpResponse::Ok().finish()
    };
    let app = App::new().route("/logged", web::post().to(handler)).wrap(at_most_once()).wrap_fn(|request, inner| {
        inner.call(request).instrument(tracing::info_span!(target: "idem_test", "request", path = "logged"))
    });
    let app = init_service(app).await;
    assert_eq!(send(&app, post("/logged", "k")).await.status, 200);
    let spans = "request{path=\"logged\"}:idempotent_operation{record=";
    assert_eq!(log.lines(&[spans, "the handler runs"]).len(), 1);
}

#[actix_web::test]
async fn an_error_of_a_middleware_inside_is_settled_by_its_status() {
    for (status, is_kept) in [(404, true), (401, false)] {
        let runs = Runs::default();
        let refused = runs.clone();
        let refuse = move |_: ServiceRequest, _: &_| {
            refused.next();
            let error = if status == 404 { error::ErrorNotFound("none") } else { error::ErrorUnauthorized("none") };
            std::future::ready(Err::<ServiceResponse, Error>(error))
        };
        let route = web::resource("/p").route(web::post().to(counted(&runs))).wrap_fn(refuse).wrap(at_most_once());
        let app = init_service(App::new().service(route)).await;
        let (first, again) = (send(&app, post("/p", "k")).await, send(&app, post("/p", "k")).await);
        assert_eq!((first.status.as_u16(), first.text()), (status, "none"));
        assert_eq!((again.status.as_u16(), again.text(), again.is_replay()), (status, "none", is_kept));
        assert_eq!(runs.count(), if is_kept { 1 } else { 2 });
    }
}

/// A middleware may map the response of an error, as actix-cors does.
#[actix_web::test]
async fn an_error_that_a_middleware_inside_maps_is_settled_as_it_was_mapped() {
    let runs = Runs::default();
    let refused = runs.clone();
    let refuse = move |_: ServiceRequest, _: &_| {
        refused.next();
        std::future::ready(Err::<ServiceResponse, Error>(error::ErrorNotFound("none")))
    };
    let map = |mut error: Error| {
        error.add_response_mapper(|mut response| {
            *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
            response
        });
        error
    };
    let route = web::resource("/p").route(web::post().to(HttpResponse::Ok)).wrap_fn(refuse);
    let route = route.wrap_fn(move |request, inner| inner.call(request).map_err(map));
    let app = init_service(App::new().service(route.wrap(at_most_once()))).await;
    for run in [1, 2] {
        let answer = send(&app, post("/p", "k")).await;
        assert_eq!((answer.status.as_u16(), answer.is_replay(), runs.count()), (429, false, run));
    }
}

/// Like some loggers: makes an error show its response, and drops that response.
async fn look(answered: Result<ServiceResponse, Error>) -> Result<ServiceResponse, Error> {
    answered.inspect_err(|error| {
        let shown = error.error_response();
        assert_eq!(error.as_response_error().status_code(), shown.status());
    })
}

#[actix_web::test]
async fn a_middleware_outside_that_looks_at_an_error_does_not_take_the_answer_away() {
    let refuse = |_: ServiceRequest, _: &_| {
        let answer = HttpResponse::NotFound().append_header(("x-a", "1")).append_header(("x-a", "2")).body("none");
        std::future::ready(Err::<ServiceResponse, Error>(error::InternalError::from_response("none", answer).into()))
    };
    let refused = web::resource("/refused").route(web::post().to(HttpResponse::Ok)).wrap_fn(refuse);
    let app = App::new().route("/p", web::post().to(panicking(&Runs::default()))).service(refused).wrap(at_most_once());
    let app = app.wrap_fn(|request, inner| {
        let answered = inner.call(request);
        async { look(look(answered.await).await).await }
    });
    let app = init_service(app).await;
    send(&app, post("/p", "k")).await.assert_problem(ProblemKind::HandlerFailed);
    let first = send(&app, post("/refused", "k")).await;
    assert_eq!((first.status.as_u16(), first.text()), (404, "none"));
    assert_eq!(first.headers.get_all("x-a").collect::<Vec<_>>(), ["1", "2"]);
    send(&app, post("/refused", "k")).await.assert_replay_of(&first);
}

#[actix_web::test]
async fn an_error_whose_answer_streams_gives_it_once_and_then_says_that_it_is_gone() {
    for looks in [0, 1] {
        let refuse = |_: ServiceRequest, _: &_| {
            let events = stream::iter(["1", "2"].map(|event| Ok::<_, Error>(event.into())));
            let answer = HttpResponse::NotFound().content_type("text/event-stream").streaming(events);
            std::future::ready(Err::<ServiceResponse, Error>(
                error::InternalError::from_response("none", answer).into(),
            ))
        };
        let route = web::resource("/p").route(web::post().to(HttpResponse::Ok)).wrap_fn(refuse).wrap(at_most_once());
        let app = App::new().service(route).wrap_fn(move |request, inner| {
            let answered = inner.call(request);
            async move { if looks == 1 { look(answered.await).await } else { answered.await } }
        });
        let answer = send(&init_service(app).await, post("/p", "k")).await;
        match looks {
            0 => assert_eq!((answer.status.as_u16(), answer.text()), (404, "12")),
            _ => answer.assert_problem(ProblemKind::BodyNotRetained),
        }
    }
}

#[actix_web::test]
async fn a_response_can_say_how_it_is_settled() {
    let runs = Runs::default();
    let handler = {
        let runs = runs.clone();
        move || {
            let mut response = runs.answer();
            response.extensions_mut().insert(ResponseDirectives::new().do_not_store());
            std::future::ready(response)
        }
    };
    let app = init_service(App::new().wrap(at_most_once()).route("/p", web::post().to(handler))).await;
    for run in [1, 2] {
        let answer = send(&app, post("/p", "k")).await;
        answer.assert_run(run);
        assert_eq!(answer.header("idempotency-retention"), None, "there is no record");
    }
}

#[actix_web::test]
async fn an_answer_states_the_retention_of_its_record_and_is_no_replay() {
    let runs = Runs::default();
    let handler = {
        let runs = runs.clone();
        move || {
            let mut response = runs.answer();
            response.extensions_mut().insert(ResponseDirectives::new().retain_for(Duration::from_secs(3600)));
            // An upstream server's do not count.
            for (name, value) in [("idempotency-retention", "5"), ("idempotency-replayed", "true")] {
                response.headers_mut().insert(name.try_into().unwrap(), value.parse().unwrap());
            }
            std::future::ready(response)
        }
    };
    let app = init_service(App::new().wrap(at_most_once()).route("/p", web::post().to(handler))).await;
    let first = send(&app, post("/p", "k")).await;
    assert_eq!((first.header("idempotency-retention"), first.is_replay()), (Some("3600"), false));
    let again = send(&app, post("/p", "k")).await;
    assert_eq!((again.header("idempotency-retention"), again.is_replay()), (None, true));
}

/// A worker that stops drops its tasks. The engine runs elsewhere, and settles what they left.
#[test]
fn a_handler_whose_worker_stops_counts_as_one_that_panicked() {
    let home = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let engine = Idempotency::at_most_once(memory(), Settings::new().runtime(home.handle().clone()));
    let layer = || IdempotencyLayer::new(engine.clone()).single_tenant();
    let started = Arc::new(Semaphore::new(0));
    let worker = runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let local = LocalSet::new();
    local.block_on(&worker, async {
        let began = Arc::clone(&started);
        let handler = move || {
            began.add_permits(1);
            std::future::pending::<HttpResponse>()
        };
        let app = init_service(App::new().wrap(layer()).route("/p", web::post().to(handler))).await;
        rt::spawn(async move { app.call(post("/p", "k").to_request()).await });
        started.acquire().await.unwrap().forget();
    });
    drop(local);
    drop(worker);
    let runs = Runs::default();
    let next = runtime::Builder::new_current_thread().enable_all().build().unwrap();
    LocalSet::new().block_on(&next, async {
        let app = init_service(App::new().wrap(layer()).route("/p", web::post().to(counted(&runs)))).await;
        let again = send(&app, post_and_wait("/p", "k")).await;
        assert_eq!((again.status.as_u16(), again.is_replay()), (500, true), "{again:?}");
        assert_eq!(again.json()["type"], ProblemKind::HandlerFailed.type_uri());
    });
    assert_eq!(runs.count(), 0);
}

/// Runs `work` on a new worker: one thread, as in actix.
fn on_a_worker<T>(work: impl Future<Output = T>) -> T {
    let worker = runtime::Builder::new_current_thread().enable_all().build().unwrap();
    LocalSet::new().block_on(&worker, work)
}

/// The settings name no runtime, and the layer is built on the worker, as in the closure that makes an app.
#[test]
fn a_handler_that_does_not_yield_keeps_its_lease() {
    let lease = Duration::from_secs(2);
    let engine = Idempotency::at_least_once(memory(), Settings::new().lease(lease));
    let (runs, began) = (Runs::default(), Arc::new(std::sync::Barrier::new(2)));
    let ends = Arc::new(std::sync::Barrier::new(2));
    let blocking = {
        let ends = Arc::clone(&ends);
        let (engine, runs, began) = (engine.clone(), runs.clone(), Arc::clone(&began));
        std::thread::spawn(move || {
            on_a_worker(async {
                let handler = move || {
                    let answer = runs.answer();
                    began.wait();
                    ends.wait();
                    async move { answer }
                };
                let layer = IdempotencyLayer::new(engine).single_tenant();
                let app = init_service(App::new().wrap(layer).route("/p", web::post().to(handler))).await;
                send(&app, post("/p", "k")).await.assert_run(1);
            });
        })
    };
    began.wait();
    // The first lease expires; the handler blocks until the test ends it.
    std::thread::sleep(lease * 2);
    on_a_worker(async {
        let layer = IdempotencyLayer::new(engine).single_tenant();
        let app = init_service(App::new().wrap(layer).route("/p", web::post().to(counted(&runs)))).await;
        send(&app, post("/p", "k")).await.assert_problem(ProblemKind::InProgress);
    });
    ends.wait();
    blocking.join().unwrap();
    assert_eq!(runs.count(), 1);
}

/// The engine checks the lease on its own thread, and the handler starts on its worker. A busy worker may start it much
/// later, when another process has taken over. The worker checks the lease by its clock, also if no thread renews the lease
/// or tells the run that it is over.
#[test]
fn a_handler_does_not_start_when_its_lease_ended_while_its_worker_was_busy() {
    let lease = Duration::from_secs(1);
    let home = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let not_driven = runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for is_told in [true, false] {
        let store = Arc::new(FaultyStore::new(memory()));
        let settings = Settings::new().lease(lease).runtime(home.handle().clone());
        let settings = if is_told { settings } else { settings.renewals_on(not_driven.handle().clone()) };
        let engine = Idempotency::at_least_once(Arc::clone(&store) as Arc<_>, settings);
        (0..1_000).for_each(|_| store.next(Verb::Renew, Fault::ErrorBefore));
        store.next(Verb::Acquire, Fault::Delay(lease / 10));
        let runs = Runs::default();
        on_a_worker(async {
            let layer = IdempotencyLayer::new(engine).single_tenant();
            let app = init_service(App::new().wrap(layer).route("/p", web::post().to(counted(&runs)))).await;
            let mut late = std::pin::pin!(send(&app, post("/p", "k")));
            while store.calls(Verb::Acquire) == 0 {
                assert!(futures_util::poll!(late.as_mut()).is_pending(), "it is asked for elsewhere");
                tokio::task::yield_now().await;
            }
            // A sleep stands for another handler that keeps the worker busy.
            std::thread::sleep(lease * 2);
            late.await.assert_problem(ProblemKind::CommitUnclear);
            assert_eq!(runs.count(), 0, "told: {is_told}");
            send(&app, post_and_wait("/p", "k")).await.assert_run(1);
        });
    }
}
