//! What a handler's extractors get: the context and the transaction of its run.

use idem_core::engine::{Context, TransactionError, TransactionGuard};

/// Why an extractor fails. Adapters answer with 500, and [log](Self::report) the reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotProtected {
    /// The request did not come through an idempotency layer that protects it.
    #[error(
        "this request is not protected: its route has no idempotency layer, or the layer does not protect its method, \
         or it came without an optional key; add a layer to the route, or its method to HttpPolicy::methods, or make the extractor optional"
    )]
    NoContext,
    /// The extractor cannot have the transaction.
    #[error(transparent)]
    NoTransaction(#[from] TransactionError),
}

impl NotProtected {
    /// Logs the reason as an error, and returns the text for the client, which does not contain it.
    #[must_use]
    pub fn report(&self) -> &'static str {
        tracing::error!(error = self as &dyn std::error::Error, "an extractor of a handler has failed");
        "The server cannot handle this request; its log says why."
    }

    /// Whether the route is at fault and not the handler. The answer should not be stored then: the route may be corrected.
    #[must_use]
    pub fn is_misconfiguration(&self) -> bool {
        !matches!(self, Self::NoTransaction(TransactionError::Borrowed))
    }
}

/// The context of the run, from the extensions of its request.
///
/// # Errors
/// [`NotProtected::NoContext`].
pub fn context_of(extension: Option<&Context>) -> Result<&Context, NotProtected> {
    extension.ok_or(NotProtected::NoContext)
}

/// The transaction of the run; `T` is the store's type for it.
///
/// # Errors
/// [`NotProtected`].
pub fn transaction_of<T: 'static>(extension: Option<&Context>) -> Result<TransactionGuard<T>, NotProtected> {
    Ok(context_of(extension)?.transaction()?)
}

/// The transaction of the run; `None` where the request is unprotected or the contract is not transactional.
///
/// A transaction that is borrowed, or of another type, is still an error: writes made elsewhere would not be part of it.
///
/// # Errors
/// [`NotProtected::NoTransaction`].
pub fn optional_transaction_of<T: 'static>(
    extension: Option<&Context>,
) -> Result<Option<TransactionGuard<T>>, NotProtected> {
    match transaction_of(extension) {
        Ok(transaction) => Ok(Some(transaction)),
        Err(NotProtected::NoContext | NotProtected::NoTransaction(TransactionError::NotTransactional)) => Ok(None),
        Err(error) => Err(error),
    }
}
