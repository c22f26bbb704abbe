//! From what SQLite says to what a store says.

use std::error::Error;

use idem_core::{StoreError, StoreErrorKind};

// Primary result codes, https://www.sqlite.org/rescode.html.
const ERROR: i32 = 1;
const CORRUPT: i32 = 11;
const FULL: i32 = 13;
const READ_ONLY: i32 = 8;
const NOT_A_DATABASE: i32 = 26;

const BUSY: i32 = 5;

/// A read transaction cannot be upgraded, because somebody wrote since it began (extended code).
const BUSY_SNAPSHOT: i32 = 517;

/// The store's error for `error`, which came while the store tried to `what`.
pub(crate) fn store_error(what: &str, error: sqlx::Error) -> StoreError {
    let (kind, hint) = match extended_code(&error).map(|code| code & 0xFF) {
        Some(FULL) => (StoreErrorKind::Capacity, "the disk is full"),
        Some(CORRUPT | NOT_A_DATABASE) => (StoreErrorKind::Corrupt, "the database file is damaged"),
        Some(READ_ONLY) => (StoreErrorKind::Misconfigured, "the database file cannot be written"),
        Some(ERROR) => (StoreErrorKind::Misconfigured, "the tables are not what they should be"),
        _ => (StoreErrorKind::Unavailable, "SQLite could not answer"),
    };
    StoreError::new(kind, format!("could not {what}: {hint}")).with_source(error)
}

/// Whether a transaction was refused its first write because its snapshot is old. It has written nothing then.
pub(crate) fn is_old_snapshot(error: &sqlx::Error) -> bool {
    extended_code(error) == Some(BUSY_SNAPSHOT)
}

/// Whether another connection is in the way.
pub(crate) fn is_busy(error: &sqlx::Error) -> bool {
    extended_code(error).is_some_and(|code| code & 0xFF == BUSY)
}

/// The error of a record that is there and cannot be understood.
pub(crate) fn unreadable(error: impl Into<Box<dyn Error + Send + Sync>>) -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, "could not read a record").with_source(error)
}

fn extended_code(error: &sqlx::Error) -> Option<i32> {
    error.as_database_error()?.code()?.parse().ok()
}
