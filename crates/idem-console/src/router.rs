//! The router.

use axum::Router;
use axum::middleware::map_response;
use axum::response::Response;
use axum::routing::{get, post};
use http::HeaderValue;
use http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS};

use crate::console::Console;
use crate::pages;

impl Console {
    /// The router. Mount it by [`Router::nest`], inside of the layer that authenticates.
    pub fn router(self) -> Router {
        Router::new()
            .route("/", get(pages::overview::get))
            .route("/records", get(pages::records::get))
            .route("/records/{id}", get(pages::record::get))
            .route("/records/{id}/resolve", post(pages::resolve::post))
            .route("/repairs", get(pages::repairs::get))
            .route("/style.css", get(pages::style))
            .layer(map_response(harden))
            .with_state(self)
    }
}

/// No script, no frame, no form elsewhere, no copy in a cache.
async fn harden(mut response: Response) -> Response {
    const POLICY: &str =
        "default-src 'none'; style-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'";
    let headers = response.headers_mut();
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("same-origin"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}
