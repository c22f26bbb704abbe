//! The metrics of a client.

use std::sync::Arc;

use idem_client::{MetricsObserver, client};
use metrics_exporter_prometheus::PrometheusBuilder;

use crate::server::{Server, answer, made, problem, quick};

#[tokio::test]
async fn operations_attempts_and_retries_are_counted_without_urls() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let page = recorder.handle();
    let observer = Arc::new(MetricsObserver::with_recorder(Arc::new(recorder)));
    let client = client(quick().observer(observer), reqwest::Client::builder()).unwrap().build();
    let server = Server::start([
        answer("503 Service Unavailable"),
        problem("409 Conflict", "in-progress"),
        made(),
        answer("422 Unprocessable Content"),
        answer("201 Created\r\nidempotency-replayed: true"),
        problem("504 Gateway Timeout", "outcome-unknown"),
    ])
    .await;
    for _ in 0..4 {
        let _ = client.post(server.url("/secret-path")).send().await;
    }
    let page = page.render();
    for line in [
        "idem_client_attempts_total 6",
        "idem_client_retries_total{reason=\"unavailable\"} 1",
        "idem_client_retries_total{reason=\"in-progress\"} 1",
        "idem_client_operations_total{outcome=\"answered\"} 1",
        "idem_client_operations_total{outcome=\"refused\"} 1",
        "idem_client_operations_total{outcome=\"replayed\"} 1",
        "idem_client_operations_total{outcome=\"outcome-unknown\"} 1",
        "idem_client_operation_seconds_count{outcome=\"replayed\"} 1",
    ] {
        assert!(page.lines().any(|found| found == line), "{line} is missing:\n{page}");
    }
    assert!(!page.contains("secret-path") && !page.contains("127.0.0.1"), "{page}");
}
