//! From what Postgres says to what a store says.

use std::error::Error;
use std::io;

use idem_core::{StoreError, StoreErrorKind};

/// The store's own state: a record is not the one that a decision was made on (`migrations/postgres/0002_verbs.sql`).
const CHANGED: &str = "IDM01";

/// The store's error for `error`, which came while the store tried to `what`.
///
/// States are those of <https://www.postgresql.org/docs/current/errcodes-appendix.html>.
pub(crate) fn store_error(what: &str, error: sqlx::Error) -> StoreError {
    let Some(state) = state(&error) else {
        // Without an answer of the server nobody knows whether the statement took effect.
        return StoreError::new(StoreErrorKind::Unavailable, format!("could not {what}: Postgres cannot be reached"))
            .with_source(error)
            .indeterminate();
    };
    let (kind, hint) = match (state.as_str(), state.get(..2).unwrap_or_default()) {
        ("57014", _) => (StoreErrorKind::Timeout, "the statement took longer than it may"),
        ("55P03", _) => (StoreErrorKind::Timeout, "somebody else holds the record"),
        ("53300", _) => (StoreErrorKind::Unavailable, "the server has no connection left; raise max_connections"),
        ("25006", _) => (
            StoreErrorKind::Unavailable,
            "the server takes no writes: it is a replica, or default_transaction_read_only is on",
        ),
        ("42P01" | "42883" | "3F000", _) => {
            (StoreErrorKind::Misconfigured, "the schema of idem-postgres is not there, or not of this version")
        }
        ("42501", _) => (StoreErrorKind::Misconfigured, "the user lacks a privilege"),
        (_, "28" | "3D") => (StoreErrorKind::Misconfigured, "the database does not let this user in"),
        (_, "53" | "54") => (StoreErrorKind::Capacity, "the server has no room"),
        (_, "XX" | "22" | "23") => (StoreErrorKind::Corrupt, "Postgres refused what was to be written or read"),
        (_, "42") => (StoreErrorKind::Misconfigured, "the schema is not what it should be"),
        _ => (StoreErrorKind::Unavailable, "Postgres could not answer"),
    };
    let ended = is_connection_lost(&error);
    let message = format!("could not {what}: {hint} (SQLSTATE {state})");
    let error = StoreError::new(kind, message).with_source(error);
    if ended { error.indeterminate() } else { error }
}

/// The store's error when no connection could be made: nothing was asked, so nothing was done.
pub(crate) fn connect_error(error: sqlx::Error) -> StoreError {
    if matches!(error, sqlx::Error::PoolTimedOut) {
        let message = "no connection to Postgres was free or could be made in time";
        return StoreError::new(StoreErrorKind::Unavailable, message).with_source(error);
    }
    if state(&error).is_some() {
        return store_error("connect", error);
    }
    StoreError::new(StoreErrorKind::Unavailable, "could not connect to Postgres").with_source(error)
}

/// Whether the connection is of no use any more: no answer came, or the server said that it ends.
pub(crate) fn is_connection_lost(error: &sqlx::Error) -> bool {
    state(error).is_none_or(|state| {
        // 25P03: the server ended a transaction that was idle for too long, and its connection.
        state.starts_with("08") || matches!(state.as_str(), "57P01" | "57P02" | "57P03" | "57P05" | "25006" | "25P03")
    })
}

/// Whether the server may take a connection soon: it is not up yet, or has too many at the moment.
pub(crate) fn is_not_ready(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(error) => error.kind() == io::ErrorKind::ConnectionRefused,
        error => state(error).is_some_and(|state| matches!(state.as_str(), "57P03" | "53300")),
    }
}

/// Whether the record is not the one that a decision was made on.
pub(crate) fn is_changed(error: &sqlx::Error) -> bool {
    state(error).is_some_and(|state| state == CHANGED)
}

/// Whether whoever answered could not make sense of what it was sent, such as a start-up option.
pub(crate) fn is_protocol_violation(error: &sqlx::Error) -> bool {
    state(error).is_some_and(|state| state == "08P01")
}

/// Whether the server refused to begin a transaction that writes: it has become a replica.
pub(crate) fn is_of_a_replica(error: &sqlx::Error) -> bool {
    state(error).is_some_and(|state| state == "0A000")
}

/// Whether the session has forgotten what it has prepared, because a handler or a proxy has made it, or has prepared what is
/// not so any more: a function that was made anew with another result.
pub(crate) fn is_unprepared(error: &sqlx::Error) -> bool {
    state(error).is_some_and(|state| matches!(state.as_str(), "26000" | "0A000"))
}

/// Whether there is no transaction any more in which to go on.
pub(crate) fn is_out_of_transaction(error: &sqlx::Error) -> bool {
    // No savepoint of this name, no transaction, a failed one.
    state(error).is_some_and(|state| matches!(state.as_str(), "3B001" | "25P01" | "25P02"))
}

/// The error of a record that is there and cannot be understood.
pub(crate) fn unreadable(error: impl Into<Box<dyn Error + Send + Sync>>) -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, "could not read a record").with_source(error)
}

/// The same error for another caller of the same statement; its source stays with the first, in the log.
pub(crate) fn copy(error: &StoreError) -> StoreError {
    let copy = StoreError::new(error.kind(), error.to_string());
    if error.is_indeterminate() { copy.indeterminate() } else { copy }
}

fn state(error: &sqlx::Error) -> Option<String> {
    error.as_database_error()?.code().map(|code| code.into_owned())
}
