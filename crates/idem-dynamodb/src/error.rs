//! What the service and the client say when a verb fails.

use std::error::Error;

use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};
use idem_core::{StoreError, StoreErrorKind};

/// The store error for an error of the client. `what` is what was tried. `writes` is whether it may have taken effect.
pub(crate) fn failed<E, R>(what: &str, writes: bool, error: SdkError<E, R>) -> StoreError
where
    E: ProvideErrorMetadata + Error + Send + Sync + 'static,
    R: std::fmt::Debug + Send + Sync + 'static,
{
    let (kind, why, may_be_done) = explained(&error);
    let why = why.map(|why| format!(": {why}")).unwrap_or_default();
    let store_error = StoreError::new(kind, format!("could not {what}{why}")).with_source(error);
    if writes && may_be_done { store_error.indeterminate() } else { store_error }
}

/// The kind, what to do, and whether the service may have done it.
fn explained<E: ProvideErrorMetadata, R>(error: &SdkError<E, R>) -> (StoreErrorKind, Option<String>, bool) {
    use StoreErrorKind::{Capacity, Misconfigured, Timeout, Unavailable};
    match error {
        SdkError::ConstructionFailure(_) => {
            (Misconfigured, Some("the client cannot make such a request".into()), false)
        }
        SdkError::TimeoutError(_) => (Timeout, None, true),
        SdkError::DispatchFailure(failure) if failure.is_timeout() => (Timeout, None, true),
        SdkError::DispatchFailure(failure) if failure.is_user() => (Misconfigured, None, false),
        SdkError::DispatchFailure(_) => (Unavailable, Some("the service cannot be reached".into()), true),
        SdkError::ServiceError(service) => {
            let metadata = service.err().meta();
            let message = metadata.message().unwrap_or("the service gives no reason").to_owned();
            match metadata.code() {
                Some("ResourceNotFoundException") => {
                    (Misconfigured, Some("there is no such table; create it, or name another".into()), false)
                }
                Some(
                    "AccessDeniedException"
                    | "UnrecognizedClientException"
                    | "InvalidSignatureException"
                    | "IncompleteSignatureException"
                    | "MissingAuthenticationTokenException"
                    | "InvalidClientTokenId",
                ) => (Misconfigured, Some(message), false),
                // The credentials are renewed meanwhile.
                Some("ExpiredTokenException" | "RequestExpired") => (Unavailable, Some(message), false),
                Some(code) if passes(code) => (Unavailable, Some(message), false),
                Some("ItemCollectionSizeLimitExceededException") => (Capacity, Some(message), false),
                Some("ValidationException") if message.contains("size") => (Capacity, Some(message), false),
                Some("ValidationException" | "SerializationException") => (Misconfigured, Some(message), false),
                _ => (Unavailable, Some(message), true),
            }
        }
        // An answer that cannot be read, and what later versions of the client may add.
        _ => (Unavailable, Some("the answer of the service cannot be read".into()), true),
    }
}

/// Whether the service refuses a request for the moment only.
pub(crate) fn passes(code: &str) -> bool {
    matches!(
        code,
        "ProvisionedThroughputExceededException"
            | "ThrottlingException"
            | "RequestLimitExceeded"
            | "LimitExceededException"
            | "TransactionConflictException"
    )
}

/// An attribute that is missing, or has another type.
pub(crate) fn damaged(name: &'static str) -> StoreError {
    unreadable().with_source(Damaged(name))
}

pub(crate) fn unreadable() -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, "a record cannot be read")
}

#[derive(Debug)]
struct Damaged(&'static str);

impl std::fmt::Display for Damaged {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "its attribute {} is missing or damaged", self.0)
    }
}

impl Error for Damaged {}
