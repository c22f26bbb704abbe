//! Where the layer stands, and what it takes for one operation.

use axum::Router;
use axum::routing::{get, post as on_post};
use idem_axum::{HttpPolicy, ProblemKind};
use idem_log::Log;
use tower::Layer;

use crate::support::{Runs, at_most_once, counted, post, send, with, with_body};

#[tokio::test]
async fn two_layers_on_one_route_are_misconfigured_and_nothing_runs() {
    let (log, runs) = (Log::of_process(), Runs::default());
    let on_route = on_post(counted(&runs)).layer(at_most_once());
    let router = Router::new().route("/p", on_route).layer(at_most_once());
    let answer = send(&router, post("/p", "k")).await;
    answer.assert_problem(ProblemKind::Misconfigured);
    assert!(!answer.text().contains("two idempotency layers"), "{answer:?}");
    assert!(!log.lines(&["ERROR", "two idempotency layers"]).is_empty());
    assert_eq!(runs.count(), 0);
}

#[tokio::test]
async fn once_the_second_layer_is_taken_away_the_operation_can_run() {
    let (runs, outer) = (Runs::default(), at_most_once());
    let route = || on_post(counted(&runs));
    let twice = Router::new().route("/p", route().layer(at_most_once())).layer(outer.clone());
    for _ in 0..2 {
        send(&twice, post("/p", "k")).await.assert_problem(ProblemKind::Misconfigured);
    }
    let once = Router::new().route("/p", route()).layer(outer);
    send(&once, post("/p", "k")).await.assert_run(1);
}

#[tokio::test]
async fn two_layers_are_found_also_when_the_inner_one_looks_for_another_header() {
    let runs = Runs::default();
    let inner = at_most_once().policy(HttpPolicy::new().key_header("x-key"));
    let router = Router::new().route("/p", on_post(counted(&runs)).layer(inner)).layer(at_most_once());
    send(&router, post("/p", "k")).await.assert_problem(ProblemKind::Misconfigured);
    assert_eq!(runs.count(), 0);
}

#[tokio::test]
async fn a_layer_on_the_router_protects_all_its_routes() {
    let runs = Runs::default();
    let router =
        Router::new().route("/a", on_post(counted(&runs))).route("/b", on_post(counted(&runs))).layer(at_most_once());
    for target in ["/a", "/b"] {
        let first = send(&router, post(target, "k")).await;
        send(&router, post(target, "k")).await.assert_replay_of(&first);
    }
    assert_eq!(runs.count(), 2);
}

#[tokio::test]
async fn a_layer_on_one_route_leaves_the_others_alone() {
    let runs = Runs::default();
    let router =
        Router::new().route("/a", on_post(counted(&runs)).layer(at_most_once())).route("/b", on_post(counted(&runs)));
    send(&router, post("/b", "k")).await.assert_run(1);
    send(&router, post("/b", "k")).await.assert_run(2);
    let first = send(&router, post("/a", "k")).await;
    first.assert_run(3);
    send(&router, post("/a", "k")).await.assert_replay_of(&first);
}

#[tokio::test]
async fn a_method_that_is_added_after_the_layer_stays_outside_of_it() {
    let runs = Runs::default();
    let router = Router::new().route("/p", get(counted(&runs)).layer(at_most_once()).post(counted(&runs)));
    send(&router, post("/p", "k")).await.assert_run(1);
    send(&router, post("/p", "k")).await.assert_run(2);
}

#[tokio::test]
async fn a_layer_around_the_whole_router_keeps_paths_apart() {
    let runs = Runs::default();
    let routes = Router::new().route("/a", on_post(counted(&runs))).route("/b", on_post(counted(&runs)));
    let router = Router::new().fallback_service(at_most_once().layer(routes));
    let first = send(&router, post("/a", "k")).await;
    first.assert_run(1);
    send(&router, post("/b", "k")).await.assert_run(2);
    send(&router, post("/a", "k")).await.assert_replay_of(&first);
}

#[tokio::test]
async fn two_routes_and_two_methods_share_no_keys() {
    let runs = Runs::default();
    let both = || on_post(counted(&runs)).patch(counted(&runs));
    let router = Router::new().route("/a", both()).route("/b", both()).layer(at_most_once());
    send(&router, post("/a", "k")).await.assert_run(1);
    send(&router, post("/b", "k")).await.assert_run(2);
    let mut patch = post("/a", "k");
    *patch.method_mut() = http::Method::PATCH;
    send(&router, patch).await.assert_run(3);
    assert_eq!(send(&router, post("/a", "k")).await.text(), "run 1");
}

#[tokio::test]
async fn one_key_for_two_resources_of_a_route_is_a_mismatch() {
    let runs = Runs::default();
    let router = Router::new().route("/a/{id}", on_post(counted(&runs)).layer(at_most_once()));
    let first = send(&router, post("/a/1", "k")).await;
    send(&router, post("/a/2", "k")).await.assert_problem(ProblemKind::Mismatch);
    send(&router, post("/a/1", "k")).await.assert_replay_of(&first);
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn a_nested_layer_sees_the_path_that_the_client_sent() {
    let runs = Runs::default();
    let inner = Router::new().route("/p", on_post(counted(&runs))).layer(at_most_once());
    let router = Router::new().nest("/{tenant}", inner);
    send(&router, post("/a/p", "k")).await.assert_run(1);
    // Inside, both are `/p` of the route `/{tenant}/p`.
    send(&router, post("/b/p", "k")).await.assert_problem(ProblemKind::Mismatch);
    assert_eq!(runs.count(), 1);
}

#[tokio::test]
async fn one_router_nested_twice_is_two_operations() {
    let runs = Runs::default();
    let inner = Router::new().route("/p", on_post(counted(&runs))).layer(at_most_once());
    let router = Router::new().nest("/v1", inner.clone()).nest("/v2", Router::new().nest("/deep", inner));
    send(&router, post("/v1/p", "k")).await.assert_run(1);
    send(&router, post("/v2/deep/p", "k")).await.assert_run(2);
    assert!(send(&router, post("/v1/p", "k")).await.is_replay());
}

#[tokio::test]
async fn a_nested_layer_sees_the_query_that_the_client_sent() {
    let runs = Runs::default();
    let inner = Router::new().route("/p", on_post(counted(&runs))).layer(at_most_once());
    let router = Router::new().nest("/v1", inner);
    send(&router, post("/v1/p?a=1", "k")).await.assert_run(1);
    send(&router, post("/v1/p?a=2", "k")).await.assert_problem(ProblemKind::Mismatch);
    send(&router, post("/v1/p", "k")).await.assert_problem(ProblemKind::Mismatch);
    assert!(send(&router, post("/v1/p?a=1", "k")).await.is_replay());
}

#[tokio::test]
async fn the_handler_gets_the_request_as_it_was_sent() {
    async fn echo(request: axum::extract::Request) -> String {
        let (head, body) = request.into_parts();
        let body = axum::body::to_bytes(body, usize::MAX).await.unwrap();
        let header = |name| head.headers.get(name).map(|value| value.to_str().unwrap().to_owned());
        format!("{} {} {:?} {:?} {body:?}", head.method, head.uri, header("idempotency-key"), header("x-a"))
    }
    let router = Router::new().route("/p", on_post(echo).layer(at_most_once()));
    let request = with_body(with(post("/p?q=1", "k"), "x-a", "1"), "\0bytes");
    let answer = send(&router, request).await;
    assert_eq!(answer.text(), r#"POST /p?q=1 Some("k") Some("1") b"\0bytes""#);
}

#[tokio::test]
async fn a_host_counts_where_it_is_named_whichever_protocol_it_came_by() {
    let runs = Runs::default();
    let layer = at_most_once().policy(HttpPolicy::new().fingerprint_header("host"));
    let router = Router::new().nest("/v1", Router::new().route("/p", on_post(counted(&runs)).layer(layer)));
    let over_http_1 = |host| with(post("/v1/p", "k"), "host", host);
    let over_http_2 = |target| {
        let mut request = post(target, "k");
        *request.version_mut() = http::Version::HTTP_2;
        request
    };
    let first = send(&router, over_http_1("a.example")).await;
    first.assert_run(1);
    send(&router, over_http_2("http://a.example/v1/p")).await.assert_replay_of(&first);
    for other in [over_http_1("b.example"), over_http_2("http://b.example/v1/p"), post("/v1/p", "k")] {
        send(&router, other).await.assert_problem(ProblemKind::Mismatch);
    }
    let two_hosts = with(over_http_2("http://a.example/v1/p"), "host", "b.example");
    send(&router, two_hosts).await.assert_problem(ProblemKind::HostAmbiguous);
    assert_eq!(runs.count(), 1);
}
