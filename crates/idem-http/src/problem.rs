//! The problem documents (RFC 9457) that the layer answers with.
//!
//! Their `type` leads to this page, so that a client can tell them from the application's own 409 or 422. The headings below
//! are the fragments of those URIs.
//!
//! # key-missing
//! Status 400. The route needs an `Idempotency-Key` header. Send one that is new for every operation, for example a UUID, and
//! send the same one when you repeat the request. Some routes take the key from a member of the JSON body; `detail` then says
//! from which.
//!
//! # key-invalid
//! Status 400. The header is present, but its value is not a single key of 1 to 255 visible ASCII characters, quoted or bare.
//!
//! # host-ambiguous
//! Status 400. The request names two hosts: one in its target or in `:authority`, and another one in `Host`. Nothing ran.
//! Send one host.
//!
//! # principal-missing
//! Status 401. Keys belong to a principal, and the request names none: authenticate.
//!
//! # body-too-large
//! Status 413. The request body is over the route's limit for protected requests. Nothing ran.
//!
//! # grpc-unsupported
//! Status 415. The request is gRPC. Its responses end in trailers and have a second status, so they cannot be replayed.
//! Nothing ran. Send it to a route without an idempotency layer.
//!
//! # body-incomplete
//! Status 400. The request body broke off before its end. Nothing ran.
//!
//! # body-too-slow
//! Status 408. The request body took too long to arrive. Nothing ran.
//!
//! # overloaded
//! Status 503. The server has reached a limit: of request bodies, of running operations, or of transactions. Nothing ran;
//! repeat after `Retry-After`.
//!
//! # shutting-down
//! Status 503. The server ends, and takes no new operations. Nothing ran; repeat after `Retry-After`, with the same key.
//!
//! # share-exceeded
//! Status 429. The principal's concurrent uploads fill its share. Nothing ran; repeat after `Retry-After`.
//!
//! # in-progress
//! Status 409. The same operation runs now. Repeat after `Retry-After`, with the same key; `Prefer: wait=N` waits for the
//! answer.
//!
//! # backoff
//! Status 409. The operation failed and waits before its next attempt. Repeat after `Retry-After`, with the same key.
//!
//! # mismatch
//! Status 422. The key was used for a different request. Use a new key for a new operation; do not retry this one.
//!
//! # store-unavailable
//! Status 503. The server cannot say whether this operation ran before, so it did not run it now. Repeat after `Retry-After`,
//! with the same key.
//!
//! # commit-unclear
//! Status 503. The operation ran, and the server does not know yet how its record ended. Repeat after `Retry-After`, with the
//! same key: you get the answer, or it runs again if everything was rolled back.
//!
//! # outcome-unknown
//! Status 504. The server that ran the operation disappeared. Whether the operation took effect is unknown, and it is never
//! run again. Find out from the resource itself before you use a new key.
//!
//! # body-not-retained
//! Status 410. The operation completed before, with the status in `original_status`. The server did not keep the body of its
//! answer: fetch the resource itself.
//!
//! # record-unreadable
//! Status 500. The record of this operation cannot be read, so its outcome is unknown and it is not run again. An operator
//! must look at it.
//!
//! # handler-failed
//! Status 500. The handler panicked, or its answer broke off or took too long.
//!
//! # misconfigured
//! Status 500. The server's layers are combined in a way that cannot work: a route has two idempotency layers, or something
//! outside of the layer has consumed the request body. Nothing ran.

use std::time::Duration;

use serde::Serialize;

use crate::directives::ResponseDirectives;

/// Where the documentation of problem types stands.
pub(crate) const TYPE_BASE: &str = "https://docs.rs/idem-http/latest/idem_http/problem/index.html#";

/// The kinds of problems; adapters leave the kind in the extensions of the response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ProblemKind {
    /// No key where one is required.
    KeyMissing,
    /// A header that is not a key.
    KeyInvalid,
    /// Two hosts in one request.
    HostAmbiguous,
    /// The request names no principal to whom the key belongs.
    PrincipalMissing,
    /// A request body over the limit.
    BodyTooLarge,
    /// A request of gRPC.
    GrpcUnsupported,
    /// A request body that broke off.
    BodyIncomplete,
    /// A request body that took too long.
    BodyTooSlow,
    /// Too many request bodies, running operations or transactions at once.
    Overloaded,
    /// The server ends.
    ShuttingDown,
    /// Too many request bodies of one principal at once.
    ShareExceeded,
    /// The operation runs now.
    InProgress,
    /// The operation failed and waits before its next attempt.
    Backoff,
    /// The key belongs to a different request.
    Mismatch,
    /// The store could not answer.
    StoreUnavailable,
    /// The operation ran, and how its record ended is not known yet.
    CommitUnclear,
    /// Whether the operation took effect is unknown.
    OutcomeUnknown,
    /// The operation completed, and its body was not kept.
    BodyNotRetained,
    /// The record cannot be read.
    RecordUnreadable,
    /// The handler panicked, or its answer broke off or took too long.
    HandlerFailed,
    /// The server is misconfigured.
    Misconfigured,
}

impl ProblemKind {
    /// Status, the end of the type URI, title, and the usual detail.
    const fn text(self) -> (u16, &'static str, &'static str, &'static str) {
        match self {
            Self::KeyMissing => (
                400,
                "key-missing",
                "Idempotency key missing",
                "This request needs an idempotency key: new for every operation, and the same on every repeat.",
            ),
            Self::KeyInvalid => (400, "key-invalid", "Idempotency key invalid", "The idempotency key cannot be read."),
            Self::HostAmbiguous => (
                400,
                "host-ambiguous",
                "Host ambiguous",
                "The request names one host in its target and another one in the field Host; nothing ran.",
            ),
            Self::PrincipalMissing => (
                401,
                "principal-missing",
                "Principal missing",
                "Idempotency keys belong to a principal, and this request has none; authenticate and repeat it.",
            ),
            Self::BodyTooLarge => {
                (413, "body-too-large", "Request body too large", "The request body is over the limit; nothing ran.")
            }
            Self::GrpcUnsupported => (
                415,
                "grpc-unsupported",
                "gRPC is not supported",
                "Answers of gRPC cannot be replayed, so this route takes none of its requests; nothing ran.",
            ),
            Self::BodyIncomplete => {
                (400, "body-incomplete", "Request body incomplete", "The request body broke off; nothing ran.")
            }
            Self::BodyTooSlow => (
                408,
                "body-too-slow",
                "Request body too slow",
                "The request body took too long to arrive; nothing ran.",
            ),
            Self::Overloaded => (
                503,
                "overloaded",
                "Too many requests at once",
                "The server has no memory left for further request bodies; nothing ran, so repeat the request later.",
            ),
            Self::ShuttingDown => (
                503,
                "shutting-down",
                "Server shutting down",
                "The server is shutting down; nothing ran, so repeat the request later with the same key.",
            ),
            // Not 503: load balancers and alerts take that for a sick server, and other principals are still served.
            Self::ShareExceeded => (
                429,
                "share-exceeded",
                "Too many requests of one principal",
                "The uploads of this principal fill its share of the server's memory; nothing ran, so repeat the request later.",
            ),
            Self::InProgress => (
                409,
                "in-progress",
                "Operation in progress",
                "The same operation is running now; repeat the request later with the same idempotency key.",
            ),
            Self::Backoff => (
                409,
                "backoff",
                "Operation failed, next attempt later",
                "The operation failed and its next attempt has to wait; repeat the request later with the same key.",
            ),
            Self::Mismatch => (
                422,
                "mismatch",
                "Idempotency key used for another request",
                "This idempotency key belongs to a different request; use a new key for a new operation.",
            ),
            Self::StoreUnavailable => (
                503,
                "store-unavailable",
                "Idempotency store unavailable",
                "The server could not ask its idempotency store, so it did not run this operation; repeat the request later with the \
                 same key.",
            ),
            Self::CommitUnclear => (
                503,
                "commit-unclear",
                "End of the operation not known yet",
                "The server does not know yet how this operation ended; repeat the request later with the same key to get its answer.",
            ),
            Self::OutcomeUnknown => (
                504,
                "outcome-unknown",
                "Outcome unknown",
                "The server that ran this operation disappeared; find out whether it took effect before using a new key.",
            ),
            Self::BodyNotRetained => (
                410,
                "body-not-retained",
                "Completed, body not retained",
                "The operation completed before. The server did not keep the body of its answer; fetch the resource itself.",
            ),
            Self::RecordUnreadable => (
                500,
                "record-unreadable",
                "Record unreadable",
                "The record of this operation cannot be read, so its outcome is unknown and it was not run again.",
            ),
            Self::HandlerFailed => (
                500,
                "handler-failed",
                "Handler failed",
                "The handler panicked, or its answer broke off or took too long.",
            ),
            Self::Misconfigured => (
                500,
                "misconfigured",
                "Idempotency layers misconfigured",
                "The server's idempotency layers cannot work as they are put together; nothing ran. The server's log says why.",
            ),
        }
    }

    /// The HTTP status, unless [`HttpPolicy::mismatch_is_conflict`](crate::HttpPolicy::mismatch_is_conflict) says another one.
    #[must_use]
    pub fn status(self) -> u16 {
        self.text().0
    }

    /// The directives of the answer for an outer idempotency layer; put them into the response's extensions with the kind.
    ///
    /// A refusal that may change on a repeat, or after the server is corrected, says nothing about the operation. The outer
    /// layer must not store it. Every other answer settles by its status.
    #[must_use]
    pub fn directives(self) -> ResponseDirectives {
        match self {
            Self::Misconfigured
            | Self::InProgress
            | Self::Backoff
            | Self::StoreUnavailable
            | Self::Overloaded
            | Self::ShuttingDown
            | Self::ShareExceeded
            | Self::BodyIncomplete
            | Self::BodyTooSlow => ResponseDirectives::new().do_not_store(),
            Self::KeyMissing
            | Self::KeyInvalid
            | Self::HostAmbiguous
            | Self::PrincipalMissing
            | Self::BodyTooLarge
            | Self::GrpcUnsupported
            | Self::Mismatch
            | Self::CommitUnclear
            | Self::OutcomeUnknown
            | Self::BodyNotRetained
            | Self::RecordUnreadable
            | Self::HandlerFailed => ResponseDirectives::new(),
        }
    }

    /// The end of the `type` URI, such as `key-missing`: a name for metrics and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.text().1
    }

    /// The title, which is the same for all problems of the kind.
    #[must_use]
    pub fn title(self) -> &'static str {
        self.text().2
    }

    /// The `type` URI, unless [`HttpPolicy::problem_type_base`](crate::HttpPolicy::problem_type_base) says another one.
    #[must_use]
    pub fn type_uri(self) -> String {
        format!("{TYPE_BASE}{}", self.name())
    }
}

/// One problem, ready to be answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    kind: ProblemKind,
    detail: Option<String>,
    /// What the log says, and the client does not learn.
    cause: Option<&'static str>,
    retry_after: Option<Duration>,
    original_status: Option<u16>,
}

/// The wait as `Retry-After` states it: whole seconds, rounded up, at least 1, because 0 means "at once".
pub(crate) fn whole_seconds(wait: Duration) -> u64 {
    wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0)).max(1)
}

impl Problem {
    /// A problem of `kind` with its usual detail.
    #[must_use]
    pub fn new(kind: ProblemKind) -> Self {
        Self { kind, detail: None, cause: None, retry_after: None, original_status: None }
    }

    /// A problem of the server, whose cause is only for its log.
    pub(crate) fn misconfigured(cause: &'static str) -> Self {
        Self { cause: Some(cause), ..Self::new(ProblemKind::Misconfigured) }
    }

    pub(crate) fn cause(&self) -> Option<&'static str> {
        self.cause
    }

    /// Replaces the usual detail.
    #[must_use]
    pub fn detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// Sets the time after which the client should repeat the request.
    #[must_use]
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    /// Sets the status of the answer that was not kept.
    #[must_use]
    pub fn original_status(mut self, status: u16) -> Self {
        self.original_status = Some(status);
        self
    }

    /// The kind of the problem.
    #[must_use]
    pub fn kind(&self) -> ProblemKind {
        self.kind
    }

    /// The detail: what happened, and what to do.
    #[must_use]
    pub fn detail_text(&self) -> &str {
        self.detail.as_deref().unwrap_or(self.kind.text().3)
    }

    /// The status of the answer that was not kept, if there is one.
    #[must_use]
    pub fn original(&self) -> Option<u16> {
        self.original_status
    }

    /// The value of `Retry-After`: whole seconds, rounded up, at least 1, because 0 means "at once".
    #[must_use]
    pub fn retry_after_s(&self) -> Option<u64> {
        self.retry_after.map(whole_seconds)
    }

    /// The document, as `application/problem+json`.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        self.to_json_with(TYPE_BASE, self.kind.status())
    }

    pub(crate) fn to_json_with(&self, type_base: &str, status: u16) -> Vec<u8> {
        #[derive(Serialize)]
        struct Document<'a> {
            r#type: String,
            title: &'a str,
            status: u16,
            detail: &'a str,
            #[serde(skip_serializing_if = "Option::is_none")]
            original_status: Option<u16>,
        }
        let document = Document {
            r#type: format!("{type_base}{}", self.kind.name()),
            title: self.kind.title(),
            status,
            detail: self.detail_text(),
            original_status: self.original_status,
        };
        // Strings and numbers always serialise; the empty object is the smallest valid problem document.
        serde_json::to_vec(&document).unwrap_or_else(|_| b"{}".to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [ProblemKind; 21] = [
        ProblemKind::GrpcUnsupported,
        ProblemKind::KeyMissing,
        ProblemKind::KeyInvalid,
        ProblemKind::HostAmbiguous,
        ProblemKind::PrincipalMissing,
        ProblemKind::BodyTooLarge,
        ProblemKind::BodyIncomplete,
        ProblemKind::BodyTooSlow,
        ProblemKind::CommitUnclear,
        ProblemKind::Overloaded,
        ProblemKind::ShuttingDown,
        ProblemKind::ShareExceeded,
        ProblemKind::InProgress,
        ProblemKind::Backoff,
        ProblemKind::Mismatch,
        ProblemKind::StoreUnavailable,
        ProblemKind::OutcomeUnknown,
        ProblemKind::BodyNotRetained,
        ProblemKind::RecordUnreadable,
        ProblemKind::HandlerFailed,
        ProblemKind::Misconfigured,
    ];

    #[test]
    fn every_type_leads_to_a_heading_with_its_status() {
        let page = include_str!("problem.rs");
        for kind in ALL {
            let (status, anchor, ..) = kind.text();
            assert!(page.contains(&format!("//! # {anchor}\n//! Status {status}. ")), "{anchor}");
            assert!(kind.type_uri().ends_with(&format!("#{anchor}")));
        }
    }

    /// The kinds for which a repeat may succeed.
    #[test]
    fn what_nothing_ran_for_and_may_change_is_not_stored_by_a_layer_outside() {
        let passing = ALL.iter().filter(|kind| kind.directives() == ResponseDirectives::new().do_not_store());
        let expected = [
            ProblemKind::BodyIncomplete,
            ProblemKind::BodyTooSlow,
            ProblemKind::Overloaded,
            ProblemKind::ShuttingDown,
            ProblemKind::ShareExceeded,
            ProblemKind::InProgress,
            ProblemKind::Backoff,
            ProblemKind::StoreUnavailable,
            ProblemKind::Misconfigured,
        ];
        assert_eq!(passing.copied().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn the_document_has_the_members_of_rfc_9457() {
        let problem = Problem::new(ProblemKind::BodyNotRetained).original_status(201).detail("a \"detail\"");
        let document: serde_json::Value = serde_json::from_slice(&problem.to_json()).unwrap();
        assert_eq!(document["type"], ProblemKind::BodyNotRetained.type_uri());
        assert_eq!((document["status"].as_u64(), document["original_status"].as_u64()), (Some(410), Some(201)));
        assert_eq!(document["detail"], "a \"detail\"");
        assert!(document["title"].is_string());
    }

    #[test]
    fn retry_after_is_rounded_up_and_never_zero() {
        let seconds =
            |millis| Problem::new(ProblemKind::InProgress).retry_after(Duration::from_millis(millis)).retry_after_s();
        assert_eq!([0, 1, 1000, 1001, 30_000].map(seconds), [1, 1, 1, 2, 30].map(Some));
        assert_eq!(Problem::new(ProblemKind::Mismatch).retry_after_s(), None);
    }
}
