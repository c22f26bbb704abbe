//! From what Redis says to what a store says.

use std::error::Error;
use std::time::Duration;

use idem_core::{StoreError, StoreErrorKind};
use redis::{ErrorKind, RedisError, ServerErrorKind};

/// Why a call has no answer.
pub(crate) enum Failure {
    /// No connection could be made. An earlier connection may have carried the call.
    NotConnected { error: RedisError, was_sent: bool },
    /// No connection was made in the time that a verb has.
    NotConnectedInTime { timeout: Duration, was_sent: bool },
    /// No answer came in the time that a verb has.
    Timeout { timeout: Duration },
    /// The server refused, or the connection ended.
    Failed { error: RedisError, may_have_run: bool },
}

impl Failure {
    /// The store's error for it, which came while the store tried to `what`.
    pub(crate) fn of(self, what: &str) -> StoreError {
        let error = |kind, hint: &str| StoreError::new(kind, format!("could not {what}: {hint}"));
        let (error, is_indeterminate) = match self {
            Self::NotConnected { error: source, was_sent } => {
                let (kind, hint) = match source.kind() {
                    ErrorKind::MasterNameNotFoundBySentinel => {
                        (StoreErrorKind::Unavailable, "no Sentinel names a primary of this service that is up")
                    }
                    ErrorKind::Io | ErrorKind::Client | ErrorKind::ClusterConnectionNotFound => {
                        (StoreErrorKind::Unavailable, "could not connect to Redis")
                    }
                    _ => reason(&source),
                };
                (error(kind, hint).with_source(source), was_sent)
            }
            Self::NotConnectedInTime { timeout, was_sent } => {
                let hint = format!("could not connect to Redis within {timeout:?}");
                (error(StoreErrorKind::Unavailable, &hint), was_sent)
            }
            Self::Timeout { timeout } => {
                let hint = format!("Redis did not answer within {timeout:?}");
                (error(StoreErrorKind::Timeout, &hint), true)
            }
            Self::Failed { error: source, may_have_run } => {
                let (kind, hint) = reason(&source);
                (error(kind, hint).with_source(source), may_have_run)
            }
        };
        if is_indeterminate { error.indeterminate() } else { error }
    }
}

/// What an error of the server means. The first word of it is a code.
fn reason(error: &RedisError) -> (StoreErrorKind, &'static str) {
    let unavailable = |hint| (StoreErrorKind::Unavailable, hint);
    let misconfigured = |hint| (StoreErrorKind::Misconfigured, hint);
    let corrupt = |hint| (StoreErrorKind::Corrupt, hint);
    match (error.kind(), error.code().unwrap_or_default()) {
        (ErrorKind::Io, _) if error.is_timeout() => (StoreErrorKind::Timeout, "Redis did not answer in time"),
        (ErrorKind::Io | ErrorKind::Parse, _) => unavailable("the connection to Redis ended"),
        (ErrorKind::Server(ServerErrorKind::BusyLoading), _) => unavailable("Redis is loading its data"),
        (ErrorKind::Server(ServerErrorKind::ReadOnly), _) => {
            unavailable("the server takes no writes: it is a replica; name the primary, or its Sentinels")
        }
        (
            ErrorKind::Server(
                ServerErrorKind::ClusterDown
                | ServerErrorKind::MasterDown
                | ServerErrorKind::Moved
                | ServerErrorKind::Ask
                | ServerErrorKind::TryAgain,
            )
            | ErrorKind::ClusterConnectionNotFound,
            _,
        ) => unavailable("nobody in the Cluster serves this record just now"),
        (ErrorKind::Server(ServerErrorKind::NoPerm), _) => misconfigured("the user lacks a permission"),
        (ErrorKind::AuthenticationFailed, _) => misconfigured("Redis does not let this user in"),
        (_, "READONLY") => unavailable("the server is a replica; name the primary, or its Sentinels"),
        (_, "NOAUTH" | "WRONGPASS") => misconfigured("Redis does not let this user in"),
        (_, "OOM") => (StoreErrorKind::Capacity, "Redis has no memory left; raise maxmemory"),
        (_, "MISCONF") => unavailable("Redis takes no writes, as it cannot save its data; see its log"),
        (_, "NOREPLICAS") => unavailable("Redis takes no writes, as it has too few replicas"),
        (_, "BUSY") => unavailable("Redis is busy with somebody's script"),
        (_, "IDEMFORMAT") => corrupt("another version wrote the record, in a format that this one does not read"),
        (_, "IDEMDAMAGED") => corrupt("the record is damaged"),
        (_, "WRONGTYPE") => corrupt("something that is not a record stands under its key"),
        (ErrorKind::Server(_), _) => misconfigured("Redis refused a script of the store, or a part of it"),
        _ => unavailable("Redis could not answer"),
    }
}

/// The error of a record or an answer that is there and cannot be understood.
pub(crate) fn unreadable(error: impl Into<Box<dyn Error + Send + Sync>>) -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, "could not read what Redis answered").with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(code: &str) -> StoreError {
        let error = redis::make_extension_error(code.to_owned(), Some("details".to_owned()));
        Failure::Failed { error, may_have_run: false }.of("acquire")
    }

    #[test]
    fn the_code_says_what_to_do() {
        for (code, kind) in [
            ("OOM", StoreErrorKind::Capacity),
            ("NOAUTH", StoreErrorKind::Misconfigured),
            ("NOREPLICAS", StoreErrorKind::Unavailable),
            ("WRONGTYPE", StoreErrorKind::Corrupt),
            ("IDEMDAMAGED", StoreErrorKind::Corrupt),
            ("IDEMFORMAT", StoreErrorKind::Corrupt),
            ("NEW", StoreErrorKind::Unavailable),
        ] {
            let error = said(code);
            assert_eq!(error.kind(), kind, "{code}");
            assert!(error.source().is_some() && !error.is_indeterminate(), "{error:?}");
        }
    }

    #[test]
    fn what_may_have_run_is_indeterminate() {
        let timeout = Duration::from_secs(1);
        assert!(Failure::Timeout { timeout }.of("settle").is_indeterminate());
        for was_sent in [false, true] {
            assert_eq!(Failure::NotConnectedInTime { timeout, was_sent }.of("settle").is_indeterminate(), was_sent);
        }
    }
}
