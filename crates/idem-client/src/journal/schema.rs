//! The tables of a journal.

use sqlx::{Row, Sqlite, Transaction};

use super::error::{JournalError, JournalErrorKind, of_sqlite};

/// "idem" in ASCII: what marks a SQLite file as a journal.
const APPLICATION_ID: i64 = 0x6964_656D;

/// The version of the tables.
const VERSION: i64 = 1;

const TABLES: &str = "
    CREATE TABLE operations (
        id TEXT NOT NULL PRIMARY KEY,
        -- The process that sends it, or has sent it last.
        owner TEXT NOT NULL,
        method TEXT NOT NULL,
        url TEXT NOT NULL,
        headers BLOB NOT NULL,
        body BLOB NOT NULL,
        key TEXT NOT NULL,
        -- Whether the key was sent without quotes.
        bare_key INTEGER NOT NULL,
        -- By which the application finds its credentials.
        label TEXT,
        -- SHA-256 of what is sent, so that a damaged operation is not sent.
        digest BLOB NOT NULL CHECK (length(digest) = 32),
        first_sent_ms INTEGER NOT NULL,
        -- Whether that time may be wrong. 1: the clock was found behind later, and no operator has said why. 2: it was ahead.
        doubt INTEGER NOT NULL DEFAULT 0,
        deadline_ms INTEGER NOT NULL,
        -- The longest retention that the client was set to trust, if it was.
        trusted_retention_ms INTEGER,
        -- What the server has stated.
        retention_s INTEGER,
        -- Why it has no final answer yet, if its last process said so.
        stopped TEXT,
        status INTEGER,
        answer_headers BLOB,
        answer_body BLOB,
        answered_ms INTEGER,
        -- The same by clock.used_ms.
        answered_used_ms INTEGER,
        -- Answers in the order of their arrival.
        answer_number INTEGER,
        -- What an answer takes with its request; 0 if there is none, or if its contents were removed to make room.
        answer_bytes INTEGER NOT NULL DEFAULT 0,
        CHECK ((status IS NULL) = (answered_ms IS NULL)),
        CHECK ((status IS NULL) = (answered_used_ms IS NULL))
    ) STRICT;
    CREATE INDEX answered ON operations (answered_used_ms);
    CREATE INDEX with_contents ON operations (answer_number) WHERE answer_bytes > 0;
    CREATE INDEX by_key ON operations (key);
    -- One row: the number of the last answer, and the sum of answer_bytes.
    CREATE TABLE answers (last_number INTEGER NOT NULL, bytes INTEGER NOT NULL) STRICT;
    INSERT INTO answers VALUES (0, 0);
    CREATE TRIGGER answer_changed AFTER UPDATE OF answer_bytes ON operations BEGIN
        UPDATE answers SET bytes = bytes + new.answer_bytes - old.answer_bytes;
    END;
    CREATE TRIGGER answer_removed AFTER DELETE ON operations BEGIN
        UPDATE answers SET bytes = bytes - old.answer_bytes;
    END;
    -- One row.
    CREATE TABLE clock (
        -- The latest time that any process has seen, which shows that the clock was set back.
        latest_ms INTEGER NOT NULL,
        -- How far the clock was found behind that, until an operator says that it is right.
        behind_ms INTEGER,
        -- A clock that does not jump, for the age of answers.
        used_ms INTEGER NOT NULL
    ) STRICT;
    INSERT INTO clock VALUES (0, NULL, 0);
";

/// Makes the tables of a new file, and refuses files that are no journal.
pub(super) async fn prepare(transaction: &mut Transaction<'_, Sqlite>) -> Result<(), JournalError> {
    let application: i64 = number(transaction, "PRAGMA application_id").await?;
    let version: i64 = number(transaction, "PRAGMA user_version").await?;
    let tables: i64 = number(transaction, "SELECT count(*) FROM sqlite_schema").await?;
    let refused = |message: &str| Err(JournalError::new(JournalErrorKind::NotAJournal, message));
    match (application, version, tables) {
        (APPLICATION_ID, VERSION, _) => Ok(()),
        (APPLICATION_ID, _, _) => refused(
            "the journal was written by another version of idem-client; use that version until it has no operations",
        ),
        (0, 0, 0) => {
            let make = format!("{TABLES} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION};");
            let made = sqlx::raw_sql(sqlx::AssertSqlSafe(make)).execute(&mut **transaction).await;
            made.map(drop).map_err(|error| of_sqlite("make its tables", error))
        }
        _ => refused("the file is a database of another program; name another file for the journal"),
    }
}

async fn number(transaction: &mut Transaction<'_, Sqlite>, query: &'static str) -> Result<i64, JournalError> {
    let row = sqlx::query(query).fetch_one(&mut **transaction).await;
    row.and_then(|row| row.try_get(0)).map_err(|error| of_sqlite("read its version", error))
}
