//! The errors of a journal.

use std::error::Error as StdError;
use std::fmt;

/// Why a journal cannot do what it was asked for.
#[derive(Debug)]
pub struct JournalError {
    kind: JournalErrorKind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// The kinds of errors of a journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum JournalErrorKind {
    /// The file cannot be read or written now.
    Unavailable,
    /// The disk is full.
    Full,
    /// The file or an operation in it is damaged. A damaged operation is not sent.
    Corrupt,
    /// The file is another program's, or was written by a newer version.
    NotAJournal,
    /// Another process, or another task of this one, sends the operation now.
    Running,
    /// An operation with the same key, method, URL and label has no final answer yet. It has to be resumed, not begun again.
    Pending,
    /// The journal has no such operation, or it has its final answer.
    NotPending,
    /// The machine's clock was found behind the journal, so that nothing says how long ago the operation was sent. An operator
    /// has to say what was wrong: see [`Journal::trust_clock`](crate::Journal::trust_clock).
    ClockSetBack,
    /// The machine's clock was ahead when the operation was stored, so that nothing says how long ago it was sent.
    AgeUnknown,
}

impl JournalError {
    pub(super) fn new(kind: JournalErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    pub(super) fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// What kind of error it is.
    #[must_use]
    pub fn kind(&self) -> JournalErrorKind {
        self.kind
    }
}

/// The error of a statement. The codes are primary result codes, <https://www.sqlite.org/rescode.html>.
pub(super) fn of_sqlite(what: &str, error: sqlx::Error) -> JournalError {
    let code = error.as_database_error().and_then(|error| error.code()?.parse::<i32>().ok()).map(|code| code & 0xFF);
    let (kind, hint) = match code {
        Some(13) => (JournalErrorKind::Full, "the disk is full; free some space"),
        Some(11 | 26) => {
            (JournalErrorKind::Corrupt, "the file is damaged; move it away, and find out what became of its operations")
        }
        Some(5 | 6) => (JournalErrorKind::Unavailable, "another process keeps the journal locked"),
        Some(3 | 8 | 14 | 23) => (
            JournalErrorKind::Unavailable,
            "the file cannot be opened or written; check its path and the modes of its folder",
        ),
        _ => (JournalErrorKind::Unavailable, "SQLite could not answer; see the source"),
    };
    JournalError::new(kind, format!("the journal could not {what}: {hint}")).with_source(error)
}

impl fmt::Display for JournalError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl StdError for JournalError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref().map(|source| &**source as &(dyn StdError + 'static))
    }
}
