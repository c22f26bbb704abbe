//! Maps the errors of Postgres to those of a store.

use std::error::Error;
use std::io;

use idem_core::{StoreError, StoreErrorKind};

/// The store's own SQLSTATEs, which `migrations/0002_verbs.sql` raises. `CHANGED`: the record has changed since the
/// decision on it. `SHADOWED`: a handler has made a savepoint with the name of the store's.
const CHANGED: &str = "IDM01";
const SHADOWED: &str = "IDM02";

/// The answers on a connection are those to earlier statements.
const OUT_OF_STEP: &str = "the answer was not the statement's own, as after a COPY that was neither finished nor aborted, or behind a pooler with a bug";

const LOCK_NOT_AVAILABLE: &str = "55P03";

/// The error of a store that could not `what` while it was opened. A missing privilege, user, database or table is
/// [`Misconfigured`](StoreErrorKind::Misconfigured).
pub(crate) fn store_error(what: &str, error: sqlx::Error) -> StoreError {
    told(what, error, |kind| kind)
}

/// The error of an open store that could not `what`. The store has worked before, and an operator may restore a password, a
/// privilege or a server. So the errors that are `Misconfigured` at opening are [`Unavailable`](StoreErrorKind::Unavailable)
/// here.
pub(crate) fn outage(what: &str, error: sqlx::Error) -> StoreError {
    told(what, error, |kind| match kind {
        StoreErrorKind::Misconfigured => StoreErrorKind::Unavailable,
        kind => kind,
    })
}

fn told(what: &str, error: sqlx::Error, judge: fn(StoreErrorKind) -> StoreErrorKind) -> StoreError {
    let Some(state) = state(&error) else {
        // Without the server's answer it is unknown whether the statement took effect.
        let hint = match &error {
            sqlx::Error::Protocol(_) => OUT_OF_STEP,
            sqlx::Error::Io(error) if error.kind() == io::ErrorKind::TimedOut => "Postgres did not answer in time",
            sqlx::Error::Io(_) | sqlx::Error::Tls(_) => "the connection to Postgres ended before the answer",
            _ => "the driver has no answer of Postgres",
        };
        return StoreError::new(StoreErrorKind::Unavailable, format!("could not {what}: {hint}"))
            .with_source(error)
            .indeterminate();
    };
    let (kind, hint) = meaning(&state);
    let words = match kind {
        // The server's message may quote a value that was to be stored.
        StoreErrorKind::Corrupt => String::new(),
        _ => error.as_database_error().map(|error| format!(": {}", error.message())).unwrap_or_default(),
    };
    let may_be_done = may_be_done(&error);
    let message = format!("could not {what}: {hint} (SQLSTATE {state}{words})");
    let error = StoreError::new(judge(kind), message).with_source(error);
    if may_be_done { error.indeterminate() } else { error }
}

/// The kind and a hint for an SQLSTATE of <https://www.postgresql.org/docs/current/errcodes-appendix.html>.
fn meaning(state: &str) -> (StoreErrorKind, &'static str) {
    match (state, state.get(..2).unwrap_or_default()) {
        ("57014", _) => (StoreErrorKind::Timeout, "statement_timeout ended the statement, or an operator cancelled it"),
        (LOCK_NOT_AVAILABLE, _) => (StoreErrorKind::Timeout, "another session holds the lock of the record"),
        ("53300", _) => (StoreErrorKind::Unavailable, "the server has no connection left; raise max_connections"),
        ("25006", _) => (
            StoreErrorKind::Unavailable,
            "the server takes no writes: it is a replica, or default_transaction_read_only is on",
        ),
        ("42P01" | "42883" | "3F000", _) => {
            (StoreErrorKind::Misconfigured, "the schema of idem-postgres is not there, or not of this version")
        }
        ("42501", _) => (StoreErrorKind::Misconfigured, "the user lacks a privilege"),
        (_, "28" | "3D") => {
            (StoreErrorKind::Misconfigured, "Postgres refused the login, or the database does not exist")
        }
        (_, "53" | "54") => (StoreErrorKind::Capacity, "the server has no room"),
        // Poolers use it for any failure of theirs, and a server for an internal error. A retry may succeed.
        ("XX000", _) => (StoreErrorKind::Unavailable, "Postgres, or a pooler, had an internal error"),
        (_, "XX" | "22" | "23") => (StoreErrorKind::Corrupt, "Postgres refused what was to be written or read"),
        (_, "42") => (StoreErrorKind::Misconfigured, "the schema is not what it should be"),
        _ => (StoreErrorKind::Unavailable, "Postgres could not answer"),
    }
}

/// The error of an open store when no connection could be made. No statement was sent, so nothing was done. `pooled` says
/// whether the configuration declares a transaction pooler.
pub(crate) fn connect_error(error: sqlx::Error, pooled: bool) -> StoreError {
    let message = match &error {
        sqlx::Error::PoolTimedOut => "no connection to Postgres was free or could be made in time".to_owned(),
        sqlx::Error::PoolClosed => "the application has closed the pool".to_owned(),
        // A proxy that ignores start-up options now stands in front of the server.
        sqlx::Error::Configuration(why) => format!("could not connect to Postgres: {why}"),
        sqlx::Error::Io(why) if why.kind() == std::io::ErrorKind::TimedOut => {
            format!("could not connect to Postgres: {why}")
        }
        error => match (state(error), error.as_database_error()) {
            (Some(state), Some(said)) => {
                let hint = match (state.as_str(), pooled) {
                    (PROTOCOL_VIOLATION, true) => "the pooler refused the connection",
                    (PROTOCOL_VIOLATION, false) => PROXY,
                    _ => meaning(&state).1,
                };
                format!("could not connect to Postgres: {hint} (SQLSTATE {state}: {})", said.message())
            }
            _ => "could not connect to Postgres".to_owned(),
        },
    };
    StoreError::new(StoreErrorKind::Unavailable, message).with_source(error)
}

/// The error of opening a store when no connection could be made. If the server itself refuses the user or the database, the
/// configuration is wrong. A proxy's [`PROTOCOL_VIOLATION`] proves nothing.
pub(crate) fn open_error(error: sqlx::Error, pooled: bool) -> StoreError {
    match state(&error).map(|state| meaning(&state).0) {
        Some(StoreErrorKind::Misconfigured) => store_error("connect", error),
        _ => connect_error(error, pooled),
    }
}

/// PgBouncer uses this state for everything that it refuses: it is full, a start-up option is unknown, a password is wrong, a
/// database cannot be reached. Only its message differs, and that changes between versions. So no decision depends on the
/// message; it is passed on.
const PROTOCOL_VIOLATION: &str = "08P01";

/// The SQLSTATE of an unknown setting. To fail, [`expect_joined`] reads a setting that does not exist.
///
/// [`expect_joined`]: crate::transaction::statements::TransactionSettings::expect_joined
const NOT_JOINED: &str = "42704";

const PROXY: &str = "the server or a proxy refused the connection; if a proxy ignores start-up options, call through_transaction_pooler()";

/// Whether the connection cannot be used any more: no answer came, the server ends it, or the server takes no writes.
pub(crate) fn is_connection_lost(error: &sqlx::Error) -> bool {
    state(error).is_none_or(|state| {
        // 25P03: the server ended a transaction that was idle for too long, and its connection.
        state.starts_with("08") || matches!(state.as_str(), "57P01" | "57P02" | "57P03" | "57P05" | "25006" | "25P03")
    })
}

/// Whether the statement may have taken effect despite the error. Either no answer came, or a pooler that has lost the server
/// sent an error in its place. Poolers use class 58 and XX000 for that.
pub(crate) fn may_be_done(error: &sqlx::Error) -> bool {
    is_connection_lost(error) || state(error).is_some_and(|state| state.starts_with("58") || state == "XX000")
}

/// Whether the error may be the answer to an earlier statement, which a handler did not await.
///
/// Two kinds cannot be: errors that only the store's own statements meet, and class 40, after which no transaction is open.
pub(crate) fn may_be_the_handlers(error: &sqlx::Error) -> bool {
    let state = state(error).unwrap_or_default();
    !may_be_done(error)
        && !state.starts_with("40")
        && !matches!(state.as_str(), LOCK_NOT_AVAILABLE | CHANGED | SHADOWED)
        && !is_of_other_record(error)
}

/// Whether the server may take a connection soon: it is not up yet, or has too many at the moment.
pub(crate) fn is_not_ready(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(error) => error.kind() == io::ErrorKind::ConnectionRefused,
        error => state(error).is_some_and(|state| matches!(state.as_str(), "57P03" | "53300")),
    }
}

/// Whether the statement waited for a lock for longer than its `lock_timeout`.
pub(crate) fn is_lock_timeout(error: &sqlx::Error) -> bool {
    state(error).is_some_and(|state| state == LOCK_NOT_AVAILABLE)
}

/// The same of an error that was made from the driver's.
pub(crate) fn is_of_lock_timeout(error: &StoreError) -> bool {
    error.source().and_then(|error| error.downcast_ref()).is_some_and(is_lock_timeout)
}

/// Whether the record has changed since the decision on it, or another run has made it.
pub(crate) fn is_changed(error: &sqlx::Error) -> bool {
    state(error).is_some_and(|state| state == CHANGED) || is_of_other_record(error)
}

/// Whether the unique index of the records, or of one of their partitions, refused one.
fn is_of_other_record(error: &sqlx::Error) -> bool {
    let Some(error) = error.as_database_error().filter(|error| error.is_unique_violation()) else { return false };
    let Some(partition) = error.table().and_then(|table| table.strip_prefix("idem_records")) else { return false };
    let is_start = |start: &str| !start.is_empty() && start.bytes().all(|byte| byte.is_ascii_digit());
    matches!(partition, "" | "_first" | "_rest") || partition.strip_prefix('_').is_some_and(is_start)
}

/// Whether a prepared statement is gone.
pub(crate) fn is_deallocated(error: &sqlx::Error) -> bool {
    state(error).is_some_and(|state| state == "26000")
}

/// Whether the run to settle is no longer part of its transaction.
pub(crate) fn is_not_joined(error: &sqlx::Error) -> bool {
    state(error).is_some_and(|state| state == NOT_JOINED)
}

/// Whether the handler has made a savepoint with the name of the store's.
pub(crate) fn is_shadowed(error: &sqlx::Error) -> bool {
    state(error).is_some_and(|state| state == SHADOWED)
}

/// Whether a server or proxy refused the connection as a [`PROTOCOL_VIOLATION`].
pub(crate) fn is_protocol_violation(error: &sqlx::Error) -> bool {
    state(error).is_some_and(|state| state == PROTOCOL_VIOLATION)
}

/// Whether the server refused to begin a transaction that writes: it has become a replica.
pub(crate) fn is_of_a_replica(error: &sqlx::Error) -> bool {
    state(error).is_some_and(|state| state == "0A000")
}

/// Whether a prepared statement of the session is unusable. Either a handler or a proxy has deallocated it, or a function
/// that it calls was recreated with another result type.
pub(crate) fn is_unprepared(error: &sqlx::Error) -> bool {
    state(error).is_some_and(|state| matches!(state.as_str(), "26000" | "0A000"))
}

/// Whether `ON CONFLICT (id)` found no unique index: records are in partitions.
pub(crate) fn is_of_partitions(error: &sqlx::Error) -> bool {
    state(error).is_some_and(|state| state == "42P10")
}

/// Whether the transaction has ended or failed.
pub(crate) fn is_out_of_transaction(error: &sqlx::Error) -> bool {
    // A failed one.
    has_ended(error) || state(error).is_some_and(|state| state == "25P02")
}

/// Whether the transaction has ended. What its session was told since stays in the session.
pub(crate) fn has_ended(error: &sqlx::Error) -> bool {
    // No savepoint of this name, no transaction.
    state(error).is_some_and(|state| matches!(state.as_str(), "3B001" | "25P01"))
}

/// The error of an answer that is not the statement's own. The connection is of no use then.
pub(crate) fn out_of_step() -> sqlx::Error {
    sqlx::Error::Protocol(OUT_OF_STEP.to_owned())
}

/// Whether a handler has left an answer unread that sqlx does not skip. A dropped COPY does that.
pub(crate) fn is_out_of_step(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Protocol(_))
}

/// The error of a transaction whose handler has left an answer unread. Everything was rolled back.
pub(crate) fn left_unread(error: impl Into<Box<dyn Error + Send + Sync>>) -> StoreError {
    let message =
        "an answer was left unread in the transaction, and everything was rolled back: finish or abort each COPY";
    StoreError::new(StoreErrorKind::TransactionFailed, message).with_source(error)
}

/// The error of a transaction that its handler has ended.
pub(crate) fn out_of_transaction(error: sqlx::Error) -> StoreError {
    let message = "the transaction had ended before its commit: the handler ended it, or overlooked an SQL error in it";
    StoreError::new(StoreErrorKind::TransactionFailed, message).with_source(error)
}

/// The error of a record that cannot be decoded.
pub(crate) fn unreadable(error: impl Into<Box<dyn Error + Send + Sync>>) -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, "could not read a record").with_source(error)
}

pub(crate) fn state(error: &sqlx::Error) -> Option<String> {
    error.as_database_error()?.code().map(|code| code.into_owned())
}
