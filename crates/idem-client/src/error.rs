//! Why an operation has no final answer.

use std::error::Error as StdError;
use std::fmt;

use crate::keep::KeepError;
use crate::report::Report;
use crate::table::Stop;

/// Why an operation has no final answer.
///
/// The middleware returns it inside a [`reqwest_middleware::Error`]: see [`Error::of`]. An error of another middleware inside of
/// this one is returned as it is.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    report: Box<Report>,
    source: Option<KeepError>,
}

/// What went wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The request has an `Idempotency-Key` already. Nothing was sent.
    KeyPresent,
    /// The body of the request cannot be sent again. Nothing was sent.
    BodyNotRepeatable,
    /// The journal could not store the operation. Nothing was sent.
    Journal,
    /// The deadline has passed, or the server asks for a longer wait than is left. The outcome is not known.
    DeadlineExceeded,
    /// The server may have forgotten the key, so that a repeat could double the effect. The outcome is not known.
    RetentionOver,
    /// The last answer says that a repeat cannot help.
    Stopped(Stop),
}

impl ErrorKind {
    /// A name for metrics and logs. Names stay the same in later versions.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::KeyPresent => "key-present",
            Self::BodyNotRepeatable => "body-not-repeatable",
            Self::Journal => "journal",
            Self::DeadlineExceeded => "deadline-exceeded",
            Self::RetentionOver => "retention-over",
            Self::Stopped(stop) => stop.name(),
        }
    }
}

impl Error {
    pub(crate) fn new(kind: ErrorKind, report: Report, source: Option<KeepError>) -> Self {
        Self { kind, report: Box::new(report), source }
    }

    /// The error inside an error of the client, if it is one of this crate.
    #[must_use]
    pub fn of(error: &reqwest_middleware::Error) -> Option<&Self> {
        match error {
            reqwest_middleware::Error::Middleware(error) => error.downcast_ref(),
            reqwest_middleware::Error::Reqwest(_) => None,
        }
    }

    /// What went wrong.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// How the operation went.
    #[must_use]
    pub fn report(&self) -> &Report {
        &self.report
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            ErrorKind::KeyPresent => formatter.write_str(
                "the request has an Idempotency-Key already, and nothing was sent; give the key by Operation::with_key",
            ),
            ErrorKind::BodyNotRepeatable => formatter.write_str(
                "the request's body cannot be sent twice, and nothing was sent; give it as bytes, not as a stream",
            ),
            ErrorKind::Journal => {
                formatter.write_str("the journal could not store the operation, and nothing was sent; see the source")
            }
            ErrorKind::DeadlineExceeded => {
                write!(formatter, "the operation has no final answer in time, ")?;
                self.write_state(formatter)?;
                formatter.write_str("; repeat it with the same key, or find out from the resource itself")
            }
            ErrorKind::RetentionOver => {
                write!(formatter, "the server may have forgotten the key of this operation, so it was not sent again, ")?;
                self.write_state(formatter)?;
                formatter.write_str("; find out from the resource itself before you use a new key")
            }
            ErrorKind::Stopped(Stop::OutcomeUnknown) => formatter.write_str(
                "the server does not know whether the operation took effect; find out from the resource itself, or ask its \
                 operator, before you use a new key",
            ),
            ErrorKind::Stopped(Stop::RecordUnreadable) => formatter.write_str(
                "the server cannot read its record of the operation, so the outcome is not known; ask its operator",
            ),
            ErrorKind::Stopped(Stop::Misconfigured) => {
                formatter.write_str("the server is misconfigured, and nothing ran; repeat the operation once it is corrected")
            }
            ErrorKind::Stopped(Stop::NotAnswered) => {
                formatter.write_str("the server did not look at the operation, which may have taken effect before, ")?;
                self.write_state(formatter)?;
                formatter.write_str("; correct the credentials or the route, and repeat it with the same key")
            }
            ErrorKind::Stopped(Stop::CannotSend(failure)) => {
                write!(formatter, "the request cannot be sent ({}); see the source", failure.name())
            }
        }
    }
}

impl Error {
    fn write_state(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { attempts, elapsed, last_status, .. } = &*self.report;
        write!(formatter, "after {attempts} attempts in {elapsed:.1?}")?;
        match last_status {
            Some(status) => write!(formatter, ", the last of which was answered {}", status.as_u16()),
            None => formatter.write_str(" without any answer"),
        }
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_ref().map(|source| &**source as &(dyn StdError + 'static))
    }
}
