//! What a handler gets: the context of its run, and its transaction.

use std::convert::Infallible;
use std::ops::{Deref, DerefMut};

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::request::Parts;
use idem_core::engine::{Context, TransactionGuard};
use idem_http::{NotProtected, ResponseDirectives, context_of, optional_transaction_of, transaction_of};

/// The context of a protected run: attempt, checkpoints, downstream keys, loss of the lease.
///
/// `Option<IdempotencyContext>` is for handlers that also serve unprotected requests.
#[derive(Debug, Clone)]
pub struct IdempotencyContext(pub Context);

/// The transaction in which a handler makes its business writes; `T` is the store's type, such as `SqliteTransaction`.
///
/// It dereferences to `T`. Let it go out of scope with the handler: a transaction that is still held when the handler
/// has answered, for example by a streamed body, cannot be committed.
#[derive(Debug)]
pub struct IdempotentTransaction<T: 'static>(TransactionGuard<T>);

/// Why an extractor failed. Answered with 500; the log has the reason.
///
/// If the route lacks its layer or its store, the answer is not stored, because the route may be corrected. Middleware inside of
/// the layer that has had an effect before must answer something else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its reason")]
pub struct Rejection(pub NotProtected);

impl IntoResponse for Rejection {
    fn into_response(self) -> Response {
        let mut response = (StatusCode::INTERNAL_SERVER_ERROR, self.0.report()).into_response();
        if self.0.is_misconfiguration() {
            response.extensions_mut().insert(ResponseDirectives::new().do_not_store());
        }
        response
    }
}

impl<S: Sync> FromRequestParts<S> for IdempotencyContext {
    type Rejection = Rejection;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Rejection> {
        context_of(parts.extensions.get()).cloned().map(Self).map_err(Rejection)
    }
}

impl<S: Sync> OptionalFromRequestParts<S> for IdempotencyContext {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get().cloned().map(Self))
    }
}

impl<S: Sync, T: 'static> FromRequestParts<S> for IdempotentTransaction<T> {
    type Rejection = Rejection;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Rejection> {
        transaction_of(parts.extensions.get()).map(Self).map_err(Rejection)
    }
}

/// `None` where there is no transaction at all; a borrowed one, or one of another type, is still an error.
impl<S: Sync, T: 'static> OptionalFromRequestParts<S> for IdempotentTransaction<T> {
    type Rejection = Rejection;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Rejection> {
        optional_transaction_of(parts.extensions.get()).map(|found| found.map(Self)).map_err(Rejection)
    }
}

impl<T> Deref for IdempotentTransaction<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for IdempotentTransaction<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}
