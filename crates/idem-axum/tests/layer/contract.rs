//! The contract between tower services.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use http::StatusCode;
use http::request::Parts;
use idem_axum::IdempotencyLayer;
use tokio::sync::Semaphore;
use tower::limit::ConcurrencyLimit;
use tower::{Layer as _, Service as _, ServiceExt, service_fn};

use crate::support::{memory, post};

tokio::task_local! {
    static TENANT: &'static str;
}

async fn ok(_: Request) -> Result<Response, Infallible> {
    Ok(Response::new(Body::empty()))
}

fn layer_of_tenant() -> IdempotencyLayer<impl idem_axum::ScopeSource<Parts>> {
    IdempotencyLayer::at_least_once(memory()).scope(|_: &Parts| TENANT.try_with(|tenant| (*tenant).to_owned()).ok())
}

#[tokio::test]
async fn a_request_is_looked_at_in_the_future_so_that_layers_outside_can_put_something_around_it() {
    let mut service = layer_of_tenant().layer(service_fn(ok));
    let answering = ServiceExt::<Request>::ready(&mut service).await.unwrap().call(post("/p", "k"));
    assert_eq!(TENANT.scope("acme", answering).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn what_was_reserved_for_a_request_is_given_back_with_its_answer() {
    let free = Arc::new(Semaphore::new(1));
    let mut service = layer_of_tenant().layer(ConcurrencyLimit::with_semaphore(service_fn(ok), Arc::clone(&free)));
    let mut answer = async |tenant: Option<&'static str>| {
        let answering = ServiceExt::<Request>::ready(&mut service).await.unwrap().call(post("/p", "k"));
        let answer = match tenant {
            Some(tenant) => TENANT.scope(tenant, answering).await,
            None => answering.await,
        };
        (answer.unwrap().status(), free.available_permits())
    };
    assert_eq!(answer(None).await, (StatusCode::UNAUTHORIZED, 1));
    assert_eq!(answer(Some("acme")).await, (StatusCode::OK, 1));
    assert_eq!(answer(Some("acme")).await, (StatusCode::OK, 1), "a replay");
}
