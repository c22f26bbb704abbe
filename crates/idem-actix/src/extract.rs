//! What a handler gets: the context of its run, and its transaction.

use std::fmt;
use std::future::{Ready, ready};
use std::ops::{Deref, DerefMut};

use actix_web::dev::Payload;
use actix_web::http::header::ContentType;
use actix_web::{FromRequest, HttpMessage, HttpRequest, HttpResponse, ResponseError};
use idem_core::engine::{Context, TransactionGuard};
use idem_http::{NotProtected, ResponseDirectives, context_of, transaction_of};

/// The context of a protected run: attempt, checkpoints, downstream keys, loss of the lease.
///
/// `Option<IdempotencyContext>` is for handlers that also serve unprotected requests.
#[derive(Debug, Clone)]
pub struct IdempotencyContext(pub Context);

/// The transaction in which a handler makes its business writes; `T` is the store's type, such as `SqliteTransaction`.
///
/// It dereferences to `T`. Let it go out of scope with the handler: a transaction that is still held when the handler
/// has answered, for example by a streamed body, cannot be committed.
///
/// A handler that also serves requests without a transaction takes `Result<IdempotentTransaction<T>, Rejection>`. `Option`
/// hides errors: actix makes `None` of every rejection, also if the transaction has another type.
#[derive(Debug)]
pub struct IdempotentTransaction<T: 'static>(TransactionGuard<T>);

/// Why an extractor failed. Answered with 500; the log has the reason.
///
/// If the route lacks its layer or its store, the answer is not stored, because the route may be corrected. Middleware inside of
/// the layer that has had an effect before must answer something else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its reason")]
pub struct Rejection(pub NotProtected);

impl fmt::Display for Rejection {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl ResponseError for Rejection {
    fn error_response(&self) -> HttpResponse {
        let mut response =
            HttpResponse::InternalServerError().content_type(ContentType::plaintext()).body(self.0.report());
        if self.0.is_misconfiguration() {
            response.extensions_mut().insert(ResponseDirectives::new().do_not_store());
        }
        response
    }
}

impl FromRequest for IdempotencyContext {
    type Error = Rejection;
    type Future = Ready<Result<Self, Rejection>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(context_of(request.extensions().get()).cloned().map(Self).map_err(Rejection))
    }
}

impl<T: 'static> FromRequest for IdempotentTransaction<T> {
    type Error = Rejection;
    type Future = Ready<Result<Self, Rejection>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        ready(transaction_of(request.extensions().get()).map(Self).map_err(Rejection))
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
