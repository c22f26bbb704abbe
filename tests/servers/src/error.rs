//! Errors of servers.

use std::fmt;
use std::io;
use std::path::Path;

/// Why a server could not be started or controlled.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// This machine has no program that could be the server. Installing one helps.
    Missing {
        /// What was looked for, and where.
        what: String,
        /// What to install.
        advice: String,
    },
    /// The server, or a program that controls it, did not do what was requested.
    Failed {
        /// What was requested, and how it failed.
        what: String,
        /// The last lines of the server's log; empty if it wrote none.
        log: String,
    },
    /// A Redis server answered a command with an error.
    Refused {
        /// The command and the address.
        what: String,
        /// The server's error message. Its first word is its kind: `MOVED`, `OOM`, `ERR`, …
        reply: String,
    },
    /// The operating system refused something.
    Io {
        /// What was requested.
        what: String,
        /// Why it was refused.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn failed(what: impl Into<String>) -> Error {
        Error::Failed { what: what.into(), log: String::new() }
    }

    /// A failure with the last lines of the server's log.
    pub(crate) fn logged(what: impl Into<String>, log: &Path) -> Error {
        const LINES: usize = 40;
        let log = std::fs::read_to_string(log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let last = lines.len().saturating_sub(LINES);
        Error::Failed { what: what.into(), log: lines[last..].join("\n") }
    }

    /// For `map_err`: names the refused operation.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
        let what = what.into();
        move |source| Error::Io { what, source }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Missing { what, advice } => write!(formatter, "{what}; {advice}"),
            Error::Failed { what, log } if log.is_empty() => write!(formatter, "{what}"),
            Error::Failed { what, log } => write!(formatter, "{what}; its log ends with:\n{log}"),
            Error::Refused { what, reply } => write!(formatter, "{what}: {reply}"),
            Error::Io { what, source } => write!(formatter, "{what}: {source}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Io { source, .. } => Some(source),
            Error::Missing { .. } | Error::Failed { .. } | Error::Refused { .. } => None,
        }
    }
}
