//! What a handler gets: the context of its run, and its transaction.

use std::convert::Infallible;
use std::ops::{Deref, DerefMut};

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::request::Parts;
use idem_core::engine::{Context, TransactionError, TransactionGuard};

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

/// Why an extractor has nothing to give; answered with 500, because the server is put together wrongly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotProtected {
    /// The request did not come through an idempotency layer that protects it.
    NoContext,
    /// There is no such transaction.
    NoTransaction(TransactionError),
}

impl IntoResponse for NotProtected {
    fn into_response(self) -> Response {
        let message = match self {
            Self::NoContext => {
                "this request is not protected: its route has no idempotency layer, or the layer does not protect its \
                 method, or it came without an optional key"
                    .to_owned()
            }
            Self::NoTransaction(error) => error.to_string(),
        };
        (StatusCode::INTERNAL_SERVER_ERROR, message).into_response()
    }
}

impl<S: Sync> FromRequestParts<S> for IdempotencyContext {
    type Rejection = NotProtected;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, NotProtected> {
        parts.extensions.get().cloned().map(Self).ok_or(NotProtected::NoContext)
    }
}

impl<S: Sync> OptionalFromRequestParts<S> for IdempotencyContext {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get().cloned().map(Self))
    }
}

impl<S: Sync, T: 'static> FromRequestParts<S> for IdempotentTransaction<T> {
    type Rejection = NotProtected;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, NotProtected> {
        let context: &Context = parts.extensions.get().ok_or(NotProtected::NoContext)?;
        context.transaction().map(Self).map_err(NotProtected::NoTransaction)
    }
}

/// `None` where there is no transaction at all; a borrowed one, or one of another type, is still an error.
impl<S: Sync, T: 'static> OptionalFromRequestParts<S> for IdempotentTransaction<T> {
    type Rejection = NotProtected;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, NotProtected> {
        match parts.extensions.get::<Context>().map(Context::transaction) {
            Some(Ok(transaction)) => Ok(Some(Self(transaction))),
            None | Some(Err(TransactionError::NotTransactional)) => Ok(None),
            Some(Err(error)) => Err(NotProtected::NoTransaction(error)),
        }
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
