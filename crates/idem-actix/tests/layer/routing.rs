//! Where a layer can stand, and which requests share keys.

use actix_web::http::Version;
use actix_web::test::init_service;
use actix_web::{App, HttpRequest, HttpResponse, guard, web};
use idem_actix::{HttpPolicy, ProblemKind};

use crate::support::{Runs, at_most_once, counted, post, send};

#[actix_web::test]
async fn a_layer_on_the_app_protects_all_its_routes_and_keeps_them_apart() {
    let runs = Runs::default();
    let app = App::new()
        .wrap(at_most_once())
        .route("/a", web::post().to(counted(&runs)))
        .route("/b", web::post().to(counted(&runs)));
    let app = init_service(app).await;
    send(&app, post("/a", "k")).await.assert_run(1);
    send(&app, post("/b", "k")).await.assert_run(2);
    assert!(send(&app, post("/a", "k")).await.is_replay());
}

#[actix_web::test]
async fn a_layer_on_a_scope_leaves_the_others_alone() {
    let runs = Runs::default();
    let inside = web::scope("/v1/{tenant}").wrap(at_most_once()).route("/p", web::post().to(counted(&runs)));
    let app = init_service(App::new().service(inside).route("/p", web::post().to(counted(&runs)))).await;
    send(&app, post("/v1/acme/p", "k")).await.assert_run(1);
    assert!(send(&app, post("/v1/acme/p", "k")).await.is_replay());
    for run in [2, 3] {
        send(&app, post("/p", "k")).await.assert_run(run);
    }
}

#[actix_web::test]
async fn a_layer_on_a_resource_or_on_one_route_of_it_protects_just_that() {
    let runs = Runs::default();
    let resource = web::resource("/r").wrap(at_most_once()).route(web::post().to(counted(&runs)));
    let route = web::resource("/p")
        .route(web::post().to(counted(&runs)).wrap(at_most_once()))
        .route(web::patch().to(counted(&runs)));
    let app = init_service(App::new().service(resource).service(route)).await;
    for target in ["/r", "/p"] {
        let first = send(&app, post(target, "k")).await;
        send(&app, post(target, "k")).await.assert_replay_of(&first);
    }
    let patch = || post("/p", "k").method(actix_web::http::Method::PATCH);
    send(&app, patch()).await.assert_run(3);
    send(&app, patch()).await.assert_run(4);
}

#[actix_web::test]
async fn one_key_for_two_resources_of_a_route_is_a_mismatch() {
    let runs = Runs::default();
    let app = init_service(App::new().wrap(at_most_once()).route("/p/{id}", web::post().to(counted(&runs)))).await;
    send(&app, post("/p/1", "k")).await.assert_run(1);
    send(&app, post("/p/2", "k")).await.assert_problem(ProblemKind::Mismatch);
    send(&app, post("/p/1?x=1", "k")).await.assert_problem(ProblemKind::Mismatch);
}

#[actix_web::test]
async fn two_layers_on_one_route_are_misconfigured_and_nothing_runs() {
    let runs = Runs::default();
    let route = web::resource("/p").wrap(at_most_once()).route(web::post().to(counted(&runs)));
    let app = init_service(App::new().wrap(at_most_once()).service(route)).await;
    send(&app, post("/p", "k")).await.assert_problem(ProblemKind::Misconfigured);
    assert_eq!(runs.count(), 0);
}

#[actix_web::test]
async fn once_the_second_layer_is_taken_away_the_operation_can_run() {
    let (runs, outer) = (Runs::default(), at_most_once());
    let resource = || web::resource("/p").route(web::post().to(counted(&runs)));
    let twice = App::new().wrap(outer.clone()).service(resource().wrap(at_most_once()));
    let twice = init_service(twice).await;
    for _ in 0..2 {
        send(&twice, post("/p", "k")).await.assert_problem(ProblemKind::Misconfigured);
    }
    let once = init_service(App::new().wrap(outer).service(resource())).await;
    send(&once, post("/p", "k")).await.assert_run(1);
}

#[actix_web::test]
async fn the_handler_gets_the_request_as_it_was_sent() {
    let handler = |request: HttpRequest, path: web::Path<String>, body: web::Bytes| async move {
        let told = format!("{} {path} {} {}", request.method(), request.uri(), request.headers().contains_key("x-a"));
        HttpResponse::Ok().insert_header(("x-told", told)).body(body)
    };
    let scope = web::scope("/v1").wrap(at_most_once()).route("/p/{id}", web::post().to(handler));
    let app = init_service(App::new().service(scope)).await;
    let body = "x".repeat(200_000);
    let answer = send(&app, post("/v1/p/7?q=1", "k").insert_header(("x-a", "1")).set_payload(body.clone())).await;
    assert_eq!(answer.header("x-told"), Some("POST 7 /v1/p/7?q=1 true"));
    assert_eq!(answer.text(), body);
}

/// For either spelling, actix runs the first route that fits, although the last route would match the encoded path.
#[actix_web::test]
async fn a_path_that_is_written_otherwise_belongs_to_the_route_that_runs() {
    let runs = Runs::default();
    let routes = |config: &mut web::ServiceConfig| {
        config.service(web::resource(["/one/{id}", "/two"]).route(web::post().to(counted(&runs))));
        config.route("/p", web::post().to(counted(&runs))).route("/{id}", web::post().to(counted(&runs)));
    };
    let app = init_service(App::new().wrap(at_most_once()).configure(routes)).await;
    for (run, [path, otherwise]) in [["/p", "/%70"], ["/two", "/tw%6F"]].into_iter().enumerate() {
        send(&app, post(otherwise, "k")).await.assert_run(run + 1);
        send(&app, post(path, "k")).await.assert_problem(ProblemKind::Mismatch);
    }
    send(&app, post("/q", "k")).await.assert_run(3);
}

#[actix_web::test]
async fn routes_that_only_guards_tell_apart_keep_their_own_keys_where_the_layer_is_inside() {
    let (runs, layer) = (Runs::default(), at_most_once());
    let resource = |pattern| web::resource(pattern).wrap(layer.clone()).route(web::post().to(counted(&runs)));
    let guarded = resource("/{id}").guard(guard::Header("x-a", "1"));
    let app = init_service(App::new().service(guarded).service(resource("/{name}"))).await;
    send(&app, post("/p", "k").insert_header(("x-a", "1"))).await.assert_run(1);
    send(&app, post("/p", "k")).await.assert_run(2);
}

/// Actix takes both spellings for one route; where the layer stands makes no difference.
#[actix_web::test]
async fn a_path_that_is_written_otherwise_is_the_same_operation() {
    let runs = Runs::default();
    let on_the_app = App::new().wrap(at_most_once()).route("/p", web::post().to(counted(&runs)));
    let on_the_app = init_service(on_the_app).await;
    let resource = web::resource("/p").wrap(at_most_once()).route(web::post().to(counted(&runs)));
    let on_the_route = init_service(App::new().service(resource)).await;
    send(&on_the_app, post("/p", "k")).await.assert_run(1);
    send(&on_the_app, post("/%70", "k")).await.assert_problem(ProblemKind::Mismatch);
    send(&on_the_route, post("/p", "k")).await.assert_run(2);
    send(&on_the_route, post("/%70", "k")).await.assert_problem(ProblemKind::Mismatch);
    assert_eq!(runs.count(), 2);
}

/// Two sites with the same page; guards keep them apart.
#[actix_web::test]
async fn two_sites_never_share_an_answer_where_the_host_counts() {
    let layer = at_most_once().policy(HttpPolicy::new().fingerprint_header("host"));
    let site = |host: &'static str| {
        web::resource("/p")
            .guard(guard::Host(host))
            .wrap(layer.clone())
            .route(web::post().to(move || std::future::ready(host)))
    };
    let app = init_service(App::new().service(site("a.example")).service(site("b.example"))).await;
    let over_http_1 = |host: &'static str| post("/p", "k").insert_header(("host", host));
    let over_http_2 = |target| post(target, "k").version(Version::HTTP_2);
    let first = send(&app, over_http_2("http://a.example/p")).await;
    assert_eq!((first.text(), first.is_replay()), ("a.example", false));
    send(&app, over_http_1("a.example")).await.assert_replay_of(&first);
    for other in [over_http_2("http://b.example/p"), over_http_1("b.example")] {
        send(&app, other).await.assert_problem(ProblemKind::Mismatch);
    }
    // The guard reads the field `Host` over HTTP/1.1, and the target over HTTP/2.
    for version in [Version::HTTP_11, Version::HTTP_2] {
        let two_hosts = post("http://a.example/p", "k").version(version).insert_header(("host", "b.example"));
        send(&app, two_hosts).await.assert_problem(ProblemKind::HostAmbiguous);
    }
}
