//! The error that ends a run before its report.

use std::iter::successors;

/// It is only shown.
pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// The message of an error and those of its causes.
pub(crate) fn with_causes(error: &Error) -> String {
    let causes = successors(error.source(), |error| error.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
