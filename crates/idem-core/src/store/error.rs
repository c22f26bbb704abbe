//! The error of a store that could not answer.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

/// The store could not answer.
///
/// Opaque: match on [`kind`](Self::kind), follow [`source`](Error::source), and ask
/// [`is_retryable`](Self::is_retryable) and [`is_indeterminate`](Self::is_indeterminate). Clones share the source, so
/// that every caller of a failed batch gets the whole error.
#[derive(Clone)]
pub struct StoreError {
    kind: StoreErrorKind,
    message: String,
    indeterminate: bool,
    has_existing_record: bool,
    source: Option<Arc<dyn Error + Send + Sync>>,
}

/// The kinds of [`StoreError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// The store cannot be reached, or refused to serve just now.
    Unavailable,
    /// It did not answer in time.
    Timeout,
    /// It has no room.
    Capacity,
    /// The store was not asked: this process has reached a concurrency limit. The message names the limit.
    Busy,
    /// It answered something that cannot be decoded, such as a record of an unknown format. The outcome of the
    /// operation is unknown, so it must not run again because of this error.
    Corrupt,
    /// A handler's transaction cannot be committed because of what the handler did in it: it overlooked an error, ended the
    /// transaction itself, or wrote what the database refuses. There is no record of it; a repeat runs, and may fail in the same
    /// way.
    TransactionFailed,
    /// It is set up in a way that cannot work, such as a missing table or a read-only replica.
    Misconfigured,
}

impl StoreError {
    /// An error of `kind`; `message` says what happened and, where possible, what to do.
    #[must_use]
    pub fn new(kind: StoreErrorKind, message: impl Into<String>) -> Self {
        let indeterminate = kind == StoreErrorKind::Timeout;
        Self { kind, message: message.into(), indeterminate, has_existing_record: false, source: None }
    }

    /// With the error that caused it.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        self.source = Some(Arc::from(source.into()));
        self
    }

    /// Marks the step as possibly done, although no answer came. A [`Timeout`](StoreErrorKind::Timeout) always is.
    #[must_use]
    pub fn indeterminate(mut self) -> Self {
        self.indeterminate = true;
        self
    }

    /// Marks that a record exists which the store cannot return for now. Its operation has run, or may have.
    #[must_use]
    pub fn with_existing_record(mut self) -> Self {
        self.has_existing_record = true;
        self
    }

    /// The kind of the error.
    #[must_use]
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// Whether the same verb may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self.kind {
            StoreErrorKind::Unavailable | StoreErrorKind::Timeout | StoreErrorKind::Capacity | StoreErrorKind::Busy => {
                true
            }
            StoreErrorKind::Corrupt | StoreErrorKind::TransactionFailed | StoreErrorKind::Misconfigured => false,
        }
    }

    /// Whether a record exists that the store cannot return for now. Then the operation must not run, not even without
    /// protection.
    #[must_use]
    pub fn has_existing_record(&self) -> bool {
        self.has_existing_record
    }

    /// Whether the step may have taken effect although no answer came.
    #[must_use]
    pub fn is_indeterminate(&self) -> bool {
        self.indeterminate
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl fmt::Debug for StoreError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("StoreError")
            .field("kind", &self.kind)
            .field("message", &self.message)
            .field("indeterminate", &self.indeterminate)
            .field("has_existing_record", &self.has_existing_record)
            .field("source", &self.source)
            .finish()
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn Error + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_advise_about_retry_and_uncertainty() {
        let unavailable = StoreError::new(StoreErrorKind::Unavailable, "down");
        assert!(unavailable.is_retryable() && !unavailable.is_indeterminate());
        assert!(StoreError::new(StoreErrorKind::Timeout, "slow").is_indeterminate());
        assert!(!StoreError::new(StoreErrorKind::Corrupt, "format 9").is_retryable());
        assert!(!unavailable.has_existing_record());
        assert!(
            StoreError::new(StoreErrorKind::Unavailable, "too few replicas")
                .with_existing_record()
                .has_existing_record()
        );
        assert!(unavailable.indeterminate().is_indeterminate());
    }

    #[test]
    fn a_clone_is_the_whole_error() {
        let error = StoreError::new(StoreErrorKind::Unavailable, "too few replicas");
        let error = error.indeterminate().with_existing_record().with_source("NOREPLICAS");
        assert_eq!(format!("{:?}", error.clone()), format!("{error:?}"));
        assert_eq!(error.clone().source().unwrap().to_string(), "NOREPLICAS");
    }

    #[test]
    fn the_source_is_kept() {
        let error = StoreError::new(StoreErrorKind::Unavailable, "no answer").with_source("connection reset");
        assert_eq!(error.source().unwrap().to_string(), "connection reset");
        assert_eq!(error.to_string(), "no answer");
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    }
}
