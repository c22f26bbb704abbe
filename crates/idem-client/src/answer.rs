//! What came of one attempt, as the decision table sees it.

use std::fmt;
use std::time::SystemTime;

use http::header::CONTENT_TYPE;
use http::{HeaderMap, StatusCode};
use serde::Deserialize;

use crate::retry_after::only;

/// An answer, of which everything arrived that was to be read.
///
/// `Debug` shows neither header values nor the body.
#[derive(Clone, Copy)]
pub struct Answer<'a> {
    /// The status.
    pub status: StatusCode,
    /// The header fields.
    pub headers: &'a HeaderMap,
    /// The body, or its beginning. Read at least [`PROBLEM_BYTES`](Self::PROBLEM_BYTES) of a 4xx or 5xx: the decision is in it.
    pub body: &'a [u8],
    /// Whether `body` is the whole body.
    pub is_whole: bool,
    /// When it arrived, by the client's clock. Counts only for a `Retry-After` with a date, in an answer without `Date`.
    pub received_at: SystemTime,
}

/// Why an attempt has no answer, or no whole one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Failure {
    /// No connection was made, so nothing was sent.
    Connect,
    /// The server's certificate, or its TLS, was refused. Nothing was sent, and a repeat would be refused again.
    Tls,
    /// The attempt took longer than its time limit. The server may have received the request.
    Timeout,
    /// The connection broke before the whole answer had arrived. The server may have received the request.
    Interrupted,
    /// The request cannot be sent at all, for example because its URL has no host.
    Request,
}

impl Failure {
    /// A name for metrics and logs. Names stay the same in later versions.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Tls => "tls",
            Self::Timeout => "timeout",
            Self::Interrupted => "interrupted",
            Self::Request => "request",
        }
    }
}

impl Answer<'_> {
    /// How much of a 4xx or 5xx has to be read. The problem documents of servers with idem are much shorter.
    pub const PROBLEM_BYTES: usize = 64 * 1024;

    /// Whether it says by a media type that it is a problem document (RFC 9457).
    pub(crate) fn is_problem(&self) -> bool {
        self.has_media_type("application/problem+json")
    }

    /// Whether it can be an error of Stripe.
    pub(crate) fn is_json(&self) -> bool {
        self.has_media_type("application/json")
    }

    fn has_media_type(&self, expected: &str) -> bool {
        let content_type = only(self.headers, CONTENT_TYPE).unwrap_or_default();
        let media_type = content_type.split(';').next().unwrap_or_default().trim();
        media_type.eq_ignore_ascii_case(expected)
    }

    /// The `type` of the problem document (RFC 9457) that this answer is.
    pub(crate) fn problem_type(&self) -> Option<String> {
        #[derive(Deserialize)]
        struct Document {
            r#type: String,
        }
        if !self.is_problem() {
            return None;
        }
        serde_json::from_slice::<Document>(self.body).ok().map(|document| document.r#type)
    }

    /// The `error.code` of an error of Stripe.
    pub(crate) fn stripe_code(&self) -> Option<String> {
        #[derive(Deserialize)]
        struct Document {
            error: Inner,
        }
        #[derive(Deserialize)]
        struct Inner {
            code: Option<String>,
        }
        serde_json::from_slice::<Document>(self.body).ok()?.error.code
    }
}

impl fmt::Debug for Answer<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Answer")
            .field("status", &self.status)
            .field("body_bytes", &self.body.len())
            .field("is_whole", &self.is_whole)
            .finish_non_exhaustive()
    }
}
