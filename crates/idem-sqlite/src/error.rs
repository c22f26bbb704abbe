//! Maps the errors of SQLite to those of a store.

use std::error::Error;

use idem_core::{StoreError, StoreErrorKind};

// Primary result codes, https://www.sqlite.org/rescode.html.
const ERROR: i32 = 1;
const PERM: i32 = 3;
const BUSY: i32 = 5;
const LOCKED: i32 = 6;
const NO_MEMORY: i32 = 7;
const READ_ONLY: i32 = 8;
const IO_ERROR: i32 = 10;
const CORRUPT: i32 = 11;
const FULL: i32 = 13;
const CANNOT_OPEN: i32 = 14;
const PROTOCOL: i32 = 15;
const TOO_BIG: i32 = 18;
const CONSTRAINT: i32 = 19;
const AUTHORIZATION: i32 = 23;
const NOT_A_DATABASE: i32 = 26;

/// A read transaction cannot be upgraded, because another connection has written since it began (extended code).
const BUSY_SNAPSHOT: i32 = 517;

/// The store's error for `error`, which came while the store tried to `what`.
///
/// A file that cannot be written is an outage: it was writable when the store was opened. It may be so again, once an
/// operator restores its mode or its mount.
pub(crate) fn store_error(what: &str, error: sqlx::Error) -> StoreError {
    let (kind, hint) = reason(&error);
    StoreError::new(kind, format!("could not {what}: {hint}")).with_source(error)
}

/// Like [`store_error`], while the store is opened: a file that cannot be written is then a configuration error.
pub(crate) fn opening_error(what: &str, error: sqlx::Error) -> StoreError {
    let (kind, hint) = reason(&error);
    let kind = match primary_code(&error) {
        Some(READ_ONLY | PERM | AUTHORIZATION) => StoreErrorKind::Misconfigured,
        _ => kind,
    };
    StoreError::new(kind, format!("could not {what}: {hint}")).with_source(error)
}

fn reason(error: &sqlx::Error) -> (StoreErrorKind, &'static str) {
    let unavailable = |hint| (StoreErrorKind::Unavailable, hint);
    let Some(code) = primary_code(error) else {
        return match error {
            sqlx::Error::PoolTimedOut => unavailable("no connection came free in time"),
            sqlx::Error::PoolClosed => unavailable("the connection pool was closed"),
            sqlx::Error::WorkerCrashed => unavailable("the thread of the connection ended"),
            _ => unavailable("SQLite could not answer"),
        };
    };
    match code {
        FULL => (StoreErrorKind::Capacity, "the disk is full, or max_page_count is reached"),
        NO_MEMORY => (StoreErrorKind::Capacity, "SQLite has no memory left"),
        TOO_BIG => (StoreErrorKind::Capacity, "a value is larger than SQLite stores"),
        CORRUPT | NOT_A_DATABASE => (StoreErrorKind::Corrupt, "the database file is damaged"),
        BUSY | LOCKED | PROTOCOL => {
            unavailable("another connection kept the database locked for longer than busy_timeout")
        }
        READ_ONLY | PERM | AUTHORIZATION => {
            unavailable("the database file cannot be written; check its mode, its folder's, and the mount")
        }
        CANNOT_OPEN => unavailable("the database file cannot be opened; check its path and the modes of its folder"),
        IO_ERROR => unavailable("the disk failed to read or write the database file; see the system's log"),
        ERROR => (
            StoreErrorKind::Misconfigured,
            "SQLite refused a statement of the store; a table may be missing or changed",
        ),
        CONSTRAINT => (StoreErrorKind::Misconfigured, "a constraint or a trigger of the tables refused it"),
        _ => unavailable("SQLite could not answer"),
    }
}

/// Whether a transaction's first write failed because its snapshot is old. It has written nothing into the main database then.
pub(crate) fn is_old_snapshot(error: &sqlx::Error) -> bool {
    extended_code(error) == Some(BUSY_SNAPSHOT)
}

/// The error of a transaction that cannot be committed because of what its handler did. Nothing of it is committed.
pub(crate) fn transaction_failed(why: &str, error: sqlx::Error) -> StoreError {
    let message = format!("could not settle: {why}; nothing of it is committed");
    StoreError::new(StoreErrorKind::TransactionFailed, message).with_source(error)
}

/// Whether a constraint of the tables refused it.
pub(crate) fn is_constraint(error: &sqlx::Error) -> bool {
    primary_code(error) == Some(CONSTRAINT)
}

/// Whether SQLite refuses the statement in this place.
pub(crate) fn is_refused(error: &sqlx::Error) -> bool {
    primary_code(error) == Some(ERROR)
}

/// Whether another connection holds a lock.
pub(crate) fn is_busy(error: &sqlx::Error) -> bool {
    primary_code(error) == Some(BUSY)
}

/// The error of a record that exists and cannot be decoded.
pub(crate) fn unreadable(error: impl Into<Box<dyn Error + Send + Sync>>) -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, "could not read a record").with_source(error)
}

fn primary_code(error: &sqlx::Error) -> Option<i32> {
    extended_code(error).map(|code| code & 0xFF)
}

fn extended_code(error: &sqlx::Error) -> Option<i32> {
    error.as_database_error()?.code()?.parse().ok()
}
