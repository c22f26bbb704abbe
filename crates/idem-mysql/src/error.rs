//! Maps the errors of MariaDB and MySQL to those of a store.

use std::error::Error;

use idem_core::{StoreError, StoreErrorKind};
use sqlx::mysql::MySqlDatabaseError;

// Numbers of errors, https://mariadb.com/docs/server/reference/error-codes.
const CHECK_READ: u16 = 1020;
const NO_DISK: u16 = 1021;
const OUT_OF_MEMORY: u16 = 1037;
const OUT_OF_RESOURCES: u16 = 1041;
const TOO_MANY_CONNECTIONS: u16 = 1040;
const NO_ACCESS_TO_DATABASE: u16 = 1044;
const ACCESS_DENIED: u16 = 1045;
const NO_DATABASE: u16 = 1046;
const NOT_READY: u16 = 1047;
const UNKNOWN_DATABASE: u16 = 1049;
const SERVER_SHUTDOWN: u16 = 1053;
const UNKNOWN_COLUMN: u16 = 1054;
const DUPLICATE_ENTRY: u16 = 1062;
const TABLE_FULL: u16 = 1114;
const NO_ACCESS_TO_TABLE: u16 = 1142;
const NO_ACCESS_TO_COLUMN: u16 = 1143;
const NO_SUCH_TABLE: u16 = 1146;
const PACKET_TOO_LARGE: u16 = 1153;
const USER_CONNECTIONS: u16 = 1203;
const LOCK_WAIT_TIMEOUT: u16 = 1205;
const DEADLOCK: u16 = 1213;
const USER_LIMIT: u16 = 1226;
const ACCESS_TO_FEATURE: u16 = 1227;
const READ_ONLY_SERVER: u16 = 1290;
const NO_SAVEPOINT: u16 = 1305;
const INTERRUPTED: u16 = 1317;
const LOGGED_BY_STATEMENT: u16 = 1665;
const NO_PASSWORD: u16 = 1698;
const READ_ONLY_TRANSACTION: u16 = 1792;
const READ_ONLY_MODE: u16 = 1836;
const PASSWORD_EXPIRED: u16 = 1862;
const KILLED: u16 = 1927;
const STATEMENT_TIMEOUT: u16 = 1969;
const CHECK_OF_MYSQL: u16 = 3819;
const CHECK_OF_MARIADB: u16 = 4025;

/// The error of an open store that could not `what`. The store has worked before, and an operator may restore a privilege or a
/// server. So the errors that are [`Misconfigured`](StoreErrorKind::Misconfigured) at opening are
/// [`Unavailable`](StoreErrorKind::Unavailable) here.
pub(crate) fn store_error(what: &str, error: sqlx::Error) -> StoreError {
    let (kind, hint) = reason(&error);
    let kind = if kind == StoreErrorKind::Misconfigured { StoreErrorKind::Unavailable } else { kind };
    StoreError::new(kind, format!("could not {what}: {hint}")).with_source(error)
}

/// Whether the user lacks a privilege on a table or a column.
pub(crate) fn is_denied(error: &sqlx::Error) -> bool {
    matches!(number(error), Some(NO_ACCESS_TO_TABLE | NO_ACCESS_TO_COLUMN))
}

/// Like [`store_error`], while the store is opened.
pub(crate) fn opening_error(what: &str, error: sqlx::Error) -> StoreError {
    let (kind, hint) = reason(&error);
    StoreError::new(kind, format!("could not {what}: {hint}")).with_source(error)
}

fn reason(error: &sqlx::Error) -> (StoreErrorKind, &'static str) {
    let unavailable = |hint| (StoreErrorKind::Unavailable, hint);
    let misconfigured = |hint| (StoreErrorKind::Misconfigured, hint);
    let Some(number) = number(error) else {
        return match error {
            sqlx::Error::PoolTimedOut => unavailable("no connection was free or could be made in time"),
            sqlx::Error::PoolClosed => unavailable("the connection pool was closed"),
            sqlx::Error::Configuration(_) => misconfigured("the URL or the options are wrong"),
            sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) | sqlx::Error::ColumnIndexOutOfBounds { .. } => {
                (StoreErrorKind::Corrupt, "the server answered something else than it was asked")
            }
            _ => unavailable("the connection to the server ended before the answer, or none could be made"),
        };
    };
    match number {
        NO_DISK | OUT_OF_MEMORY | OUT_OF_RESOURCES | TABLE_FULL => {
            (StoreErrorKind::Capacity, "the server has no disk space or no memory left")
        }
        PACKET_TOO_LARGE => (StoreErrorKind::Capacity, TOO_LARGE),
        TOO_MANY_CONNECTIONS | USER_CONNECTIONS | USER_LIMIT => {
            unavailable("the server has no connection left for this user; raise max_connections or the user's limit")
        }
        NO_ACCESS_TO_DATABASE | ACCESS_DENIED | UNKNOWN_DATABASE | NO_PASSWORD | PASSWORD_EXPIRED => {
            misconfigured("the server refused the login, or the database does not exist")
        }
        NO_DATABASE => misconfigured("the URL names no database; write mysql://user:password@host/database"),
        NO_ACCESS_TO_TABLE | NO_ACCESS_TO_COLUMN | ACCESS_TO_FEATURE => {
            misconfigured("the user lacks a privilege; the README lists those that the store needs")
        }
        NO_SUCH_TABLE | UNKNOWN_COLUMN => {
            misconfigured("the tables of idem-mysql are missing, or of another version; apply its migrations")
        }
        READ_ONLY_SERVER | READ_ONLY_MODE | READ_ONLY_TRANSACTION => {
            misconfigured("the server takes no writes; it is a replica, or read_only is set")
        }
        LOGGED_BY_STATEMENT => misconfigured("binlog_format is STATEMENT; set it to MIXED or ROW"),
        CHECK_OF_MYSQL | CHECK_OF_MARIADB => misconfigured("a constraint of the tables refused it"),
        LOCK_WAIT_TIMEOUT => unavailable("another session kept the record locked"),
        DEADLOCK | CHECK_READ | DUPLICATE_ENTRY => unavailable("other sessions changed the record at the same time"),
        NOT_READY => unavailable("the node is not ready: it is not in sync with its cluster"),
        SERVER_SHUTDOWN | KILLED => unavailable("the server or an operator ended the session"),
        INTERRUPTED | STATEMENT_TIMEOUT => unavailable("an operator or a time limit of the server ended the statement"),
        _ => unavailable("the server could not answer"),
    }
}

/// What a message says that is too large.
pub(crate) const TOO_LARGE: &str =
    "the record is larger than the server accepts; raise max_allowed_packet, or keep smaller answers";

/// Whether other sessions were in the way, and the server has rolled this transaction or its last statement back. After a
/// rollback, the same step may be repeated at once.
pub(crate) fn is_contended(error: &sqlx::Error) -> bool {
    matches!(number(error), Some(DUPLICATE_ENTRY | DEADLOCK | CHECK_READ))
}

/// The same, or a lock was not given in time.
pub(crate) fn is_in_the_way(error: &sqlx::Error) -> bool {
    is_contended(error) || number(error) == Some(LOCK_WAIT_TIMEOUT)
}

/// Whether the transaction has read a row that another one has changed since.
pub(crate) fn is_outdated(error: &sqlx::Error) -> bool {
    number(error) == Some(CHECK_READ)
}

/// Whether a message that ends with COMMIT may have taken effect despite the error: no answer came, or it is not one of the
/// errors by which the server refuses a statement or rolls the transaction back.
pub(crate) fn may_be_done(error: &sqlx::Error) -> bool {
    number(error).is_none_or(|number| {
        !matches!(
            number,
            CHECK_READ
                | DUPLICATE_ENTRY
                | TABLE_FULL
                | NO_ACCESS_TO_TABLE
                | NO_ACCESS_TO_COLUMN
                | NO_SUCH_TABLE
                | UNKNOWN_COLUMN
                | PACKET_TOO_LARGE
                | LOCK_WAIT_TIMEOUT
                | DEADLOCK
                | ACCESS_TO_FEATURE
                | READ_ONLY_SERVER
                | READ_ONLY_TRANSACTION
                | READ_ONLY_MODE
                | LOGGED_BY_STATEMENT
                | CHECK_OF_MYSQL
                | CHECK_OF_MARIADB
        )
    })
}

/// Whether the connection is of no use any more. A server that takes no writes may have been replaced by another one, to which only
/// a new connection leads.
pub(crate) fn is_connection_useless(error: &sqlx::Error) -> bool {
    let is_of_no_use = |number| {
        matches!(number, SERVER_SHUTDOWN | PACKET_TOO_LARGE | KILLED | READ_ONLY_SERVER | READ_ONLY_MODE | NOT_READY)
    };
    number(error).is_none_or(is_of_no_use)
}

/// Whether the caller's transaction was begun READ ONLY.
pub(crate) fn is_read_only_transaction(error: &sqlx::Error) -> bool {
    number(error) == Some(READ_ONLY_TRANSACTION)
}

/// Whether the savepoint of the store is gone, and so its transaction.
pub(crate) fn has_ended(error: &sqlx::Error) -> bool {
    number(error) == Some(NO_SAVEPOINT)
}

/// Whether the table does not exist.
pub(crate) fn is_no_table(error: &sqlx::Error) -> bool {
    number(error) == Some(NO_SUCH_TABLE)
}

/// The error of a transaction that its handler, or its caller, has ended.
pub(crate) fn out_of_transaction(error: sqlx::Error) -> StoreError {
    let message = "the transaction was ended before it was settled: by COMMIT, ROLLBACK, a statement that commits implicitly \
        such as CREATE TABLE, or a deadlock whose error was overlooked";
    StoreError::new(StoreErrorKind::TransactionFailed, message).with_source(error)
}

/// The error of a record that exists and cannot be decoded.
pub(crate) fn unreadable(error: impl Into<Box<dyn Error + Send + Sync>>) -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, "could not read a record").with_source(error)
}

fn number(error: &sqlx::Error) -> Option<u16> {
    error.as_database_error()?.try_downcast_ref::<MySqlDatabaseError>().map(MySqlDatabaseError::number)
}
