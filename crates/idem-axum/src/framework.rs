//! What differs in axum: its bodies, and where it keeps the route.

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{MatchedPath, OriginalUri};
use http::Uri;
use http::request::Parts;
use idem_tower::{BoxError, Framework};

/// axum.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but a name")]
pub struct Axum;

impl Framework for Axum {
    type Body = Body;

    fn body<B>(body: B) -> Body
    where
        B: HttpBody<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        Body::new(body)
    }

    fn target(head: &Parts) -> &Uri {
        head.extensions.get::<OriginalUri>().map_or(&head.uri, |original| &original.0)
    }

    fn route(head: &Parts) -> Option<&str> {
        head.extensions.get::<MatchedPath>().map(MatchedPath::as_str)
    }
}
