//! Maps errors of Redis to errors of a store.

use std::error::Error;
use std::time::Duration;

use idem_core::{StoreError, StoreErrorKind};
use redis::{ErrorKind, RedisError, ServerErrorKind};

/// Why a call has no answer.
pub(crate) enum Failure {
    /// No connection could be made. An earlier connection may have carried the call.
    NotConnected { error: RedisError, was_sent: bool },
    /// No connection was made within the timeout of the verb.
    NotConnectedInTime { timeout: Duration, was_sent: bool },
    /// The application's pool gave no connection. Without an error, none came within the timeout of the verb.
    #[cfg(feature = "deadpool")]
    NotFromPool { why: &'static str, error: Option<deadpool_redis::PoolError>, was_sent: bool },
    /// No answer came within the timeout of the verb.
    Timeout { timeout: Duration },
    /// The server refused, or the connection ended.
    Failed { error: RedisError, may_have_run: bool },
}

/// Why there is no connection.
pub(crate) enum Unconnected {
    Server(RedisError),
    /// The application's pool gave none; the text says why.
    #[cfg(feature = "deadpool")]
    Pool(&'static str, deadpool_redis::PoolError),
}

impl From<RedisError> for Unconnected {
    fn from(error: RedisError) -> Self {
        Self::Server(error)
    }
}

/// When a call failed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// While the store was opened: a refusal then means that the server or the store is configured wrongly.
    Opening,
    /// Later: the configuration has worked before, so a login or a permission that fails is an outage. It ends when the
    /// operator, or a rotation of credentials, is done.
    Serving,
}

impl Failure {
    /// Whether the server may have executed the call.
    pub(crate) fn may_have_run(&self) -> bool {
        match self {
            Self::NotConnected { was_sent, .. } | Self::NotConnectedInTime { was_sent, .. } => *was_sent,
            #[cfg(feature = "deadpool")]
            Self::NotFromPool { was_sent, .. } => *was_sent,
            Self::Timeout { .. } => true,
            Self::Failed { may_have_run, .. } => *may_have_run,
        }
    }

    /// Whether the server refuses writes, but still answers reads.
    pub(crate) fn is_refused_write(&self) -> bool {
        matches!(self, Self::Failed { error, .. } if matches!(error.code(), Some("OOM" | "MISCONF" | "NOREPLICAS")))
    }

    /// Converts it to the store's error; `what` is what the store tried to do.
    pub(crate) fn of(self, what: &str, phase: Phase) -> StoreError {
        let error = |kind, hint: &str| StoreError::new(kind, format!("could not {what}: {hint}"));
        let (error, is_indeterminate) = match self {
            Self::NotConnected { error: source, was_sent } => {
                let (kind, hint) = not_connected(&source, phase);
                (error(kind, hint).with_source(source), was_sent)
            }
            Self::NotConnectedInTime { timeout, was_sent } => {
                let hint = format!("could not connect to Redis within {timeout:?}");
                (error(StoreErrorKind::Unavailable, &hint), was_sent)
            }
            #[cfg(feature = "deadpool")]
            Self::NotFromPool { why, error: source, was_sent } => {
                let told =
                    error(StoreErrorKind::Unavailable, &format!("the application's pool gave no connection: {why}"));
                (source.map_or(told.clone(), |source| told.with_source(source)), was_sent)
            }
            Self::Timeout { timeout } => {
                let hint = format!("Redis did not answer within {timeout:?}");
                (error(StoreErrorKind::Timeout, &hint), true)
            }
            Self::Failed { error: source, may_have_run } => {
                let (kind, hint) = reason(&source, phase);
                (error(kind, hint).with_source(source), may_have_run)
            }
        };
        if is_indeterminate { error.indeterminate() } else { error }
    }
}

/// Classifies an error that came before there was a connection.
fn not_connected(error: &RedisError, phase: Phase) -> (StoreErrorKind, &'static str) {
    match error.kind() {
        ErrorKind::MasterNameNotFoundBySentinel => {
            (StoreErrorKind::Unavailable, "no Sentinel names a primary of this service that is up")
        }
        ErrorKind::Io | ErrorKind::Client | ErrorKind::ClusterConnectionNotFound => {
            (StoreErrorKind::Unavailable, "could not connect to Redis")
        }
        // Redis has no error code for this.
        ErrorKind::Server(_) if error.detail().is_some_and(|detail| detail.contains("max number of clients")) => (
            StoreErrorKind::Unavailable,
            "Redis takes no further connection; raise maxclients, or lower the clients' number",
        ),
        _ => reason(error, phase),
    }
}

/// Classifies an error of the server by its code, the first word of the message.
fn reason(error: &RedisError, phase: Phase) -> (StoreErrorKind, &'static str) {
    let unavailable = |hint| (StoreErrorKind::Unavailable, hint);
    let corrupt = |hint| (StoreErrorKind::Corrupt, hint);
    let set_up = |hint| match phase {
        Phase::Opening => (StoreErrorKind::Misconfigured, hint),
        Phase::Serving => (StoreErrorKind::Unavailable, hint),
    };
    match (error.kind(), error.code().unwrap_or_default()) {
        (ErrorKind::Io, _) if error.is_timeout() => (StoreErrorKind::Timeout, "Redis did not answer in time"),
        (ErrorKind::Io | ErrorKind::Parse, _) => unavailable("the connection to Redis ended"),
        (ErrorKind::Server(ServerErrorKind::BusyLoading), _) => unavailable("Redis is loading its data"),
        (ErrorKind::Server(ServerErrorKind::ReadOnly), _) | (_, "READONLY") => {
            unavailable("the server takes no writes: it is a replica; name the primary, or its Sentinels")
        }
        (ErrorKind::Server(ServerErrorKind::MasterDown), _) => {
            unavailable("the server is a replica that has lost its primary; name the primary, or its Sentinels")
        }
        (
            ErrorKind::Server(
                ServerErrorKind::ClusterDown
                | ServerErrorKind::Moved
                | ServerErrorKind::Ask
                | ServerErrorKind::TryAgain,
            )
            | ErrorKind::ClusterConnectionNotFound,
            _,
        ) => unavailable("no server of the Cluster serves this record just now"),
        (ErrorKind::Server(ServerErrorKind::NoPerm), _) => {
            set_up("the user lacks a permission; grant it what the documentation of idem-redis lists")
        }
        (ErrorKind::AuthenticationFailed, _) | (_, "NOAUTH" | "WRONGPASS") => {
            set_up("Redis refused the login; check the user, its password, and whether maxclients is reached")
        }
        (_, "DENIED") => set_up("Redis is in protected mode; set a password or protected-mode no"),
        (_, "OOM") => (StoreErrorKind::Capacity, "Redis has no memory left; raise maxmemory"),
        (_, "MISCONF") => unavailable("Redis takes no writes, as it cannot save its data; see its log"),
        (_, "NOREPLICAS") => unavailable("Redis takes no writes, as it has too few replicas"),
        (_, "BUSY" | "UNKILLABLE") => unavailable("Redis is busy with another script"),
        (_, "WRONGTYPE") => corrupt(
            "the key of a record holds a value of another type; if another program uses this prefix, set another key_prefix",
        ),
        (ErrorKind::Server(_), _) => set_up("Redis refused a command or a script of the store; the source says why"),
        _ => unavailable("Redis could not answer"),
    }
}

/// The error for a record that exists and cannot be parsed; `error` says why.
pub(crate) fn damaged(error: impl Into<Box<dyn Error + Send + Sync>>) -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, "the value under the key of a record cannot be read").with_source(error)
}

/// The error for a reply that cannot be parsed.
pub(crate) fn unreadable(error: impl Into<Box<dyn Error + Send + Sync>>) -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, "could not read what Redis answered").with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(code: &str, phase: Phase) -> StoreError {
        // As the driver reads it from the wire.
        let line = format!("-{code} details\r\n");
        let error = redis::parse_redis_value(line.as_bytes()).and_then(redis::Value::extract_error).unwrap_err();
        Failure::Failed { error, may_have_run: false }.of("acquire", phase)
    }

    #[test]
    fn the_code_says_what_to_do() {
        use StoreErrorKind::{Capacity, Corrupt, Misconfigured, Unavailable};
        for (code, opening, serving) in [
            ("OOM", Capacity, Capacity),
            ("NOAUTH", Misconfigured, Unavailable),
            ("WRONGPASS", Misconfigured, Unavailable),
            ("NOPERM", Misconfigured, Unavailable),
            ("DENIED", Misconfigured, Unavailable),
            ("ERR", Misconfigured, Unavailable),
            ("LOADING", Unavailable, Unavailable),
            ("MASTERDOWN", Unavailable, Unavailable),
            ("READONLY", Unavailable, Unavailable),
            ("MISCONF", Unavailable, Unavailable),
            ("NOREPLICAS", Unavailable, Unavailable),
            ("BUSY", Unavailable, Unavailable),
            ("CLUSTERDOWN", Unavailable, Unavailable),
            ("TRYAGAIN", Unavailable, Unavailable),
            ("NEW", Unavailable, Unavailable),
            ("WRONGTYPE", Corrupt, Corrupt),
        ] {
            for (phase, kind) in [(Phase::Opening, opening), (Phase::Serving, serving)] {
                let error = said(code, phase);
                assert_eq!(error.kind(), kind, "{code}");
                assert!(error.source().is_some() && !error.is_indeterminate(), "{error:?}");
            }
        }
    }

    #[test]
    fn a_server_without_room_for_a_connection_is_no_misconfiguration() {
        let error = redis::parse_redis_value(b"-ERR max number of clients reached\r\n");
        let error = error.and_then(redis::Value::extract_error).unwrap_err();
        let error = Failure::NotConnected { error, was_sent: false }.of("acquire", Phase::Opening);
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
        assert!(error.to_string().contains("raise maxclients"), "{error}");
    }

    #[test]
    fn what_may_have_run_is_indeterminate() {
        let timeout = Duration::from_secs(1);
        assert!(Failure::Timeout { timeout }.of("settle", Phase::Serving).is_indeterminate());
        for was_sent in [false, true] {
            let error = Failure::NotConnectedInTime { timeout, was_sent }.of("settle", Phase::Serving);
            assert_eq!(error.is_indeterminate(), was_sent);
        }
    }
}
