//! Captures a handler's response: what is stored of it, and how its record settles.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use idem_core::engine::{Conclusion, Disposition};
use idem_core::{HeaderField, StoredBody, StoredResponse, Writes};

use crate::directives::ResponseDirectives;
use crate::headers::{HeaderFields, declared_bytes, storable};
use crate::meaning::{AnsweredWith, Classifier, Meaning};
use crate::policy::HttpPolicy;
use crate::problem::whole_seconds;
use crate::retention::RETENTION_HEADER;

/// Whether more of a response body is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "there is no third answer")]
pub enum Captured {
    /// Push the next chunk.
    More,
    /// The body is over the limit, or not to be kept: settle now, and send the rest as it comes.
    Enough,
}

/// A response whose body broke off, is not as long as declared, or took too long. It counts as a failure of its handler.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the body of a response with the status {status} cannot be used: {reason}")]
pub struct BrokenResponse {
    status: u16,
    reason: String,
}

impl BrokenResponse {
    /// For adapters that read bodies themselves.
    pub fn new(status: u16, reason: impl fmt::Display) -> Self {
        Self { status, reason: reason.to_string() }
    }
}

/// Collects a response until its record can be settled.
pub struct ResponseCapture {
    classifier: Option<Classifier>,
    status: u16,
    headers: Vec<HeaderField>,
    directives: ResponseDirectives,
    limit: usize,
    timeout: Duration,
    length: usize,
    chunks: Vec<Bytes>,
    /// The length that the response declares.
    expected: Option<u64>,
    /// The headers of a replay, if those are not all.
    replayed: Option<Vec<HeaderField>>,
    /// Whether a replay has no body.
    key_only: bool,
    body_retained: bool,
}

impl HttpPolicy {
    /// Begins to collect a response of the handler.
    #[must_use]
    pub fn capture(
        &self,
        status: u16,
        headers: &(impl HeaderFields + ?Sized),
        directives: Option<&ResponseDirectives>,
    ) -> ResponseCapture {
        // A 304 declares the length of a body that it does not have.
        let expected = declared_bytes(headers).filter(|_| !matches!(status, 204 | 304));
        let mut headers = storable(headers, &self.allowed_headers);
        // Only this policy marks replays, and states a retention. What the handler passed on belongs to an upstream server.
        headers.retain(|field| field.name != self.replay_header && field.name != RETENTION_HEADER);
        let replayed = (self.key_only || self.named_headers_only)
            .then(|| headers.iter().filter(|field| self.is_replayed(&field.name)).cloned().collect());
        let directives = directives.cloned().unwrap_or_default();
        let is_stream = |field: &HeaderField| {
            field.name == "content-type" && field.value.to_ascii_lowercase().starts_with(b"text/event-stream")
        };
        let body_retained = !directives.body_not_retained && !headers.iter().any(is_stream);
        ResponseCapture {
            classifier: self.classifier.clone(),
            status,
            headers,
            directives,
            limit: self.stored_response_limit,
            timeout: self.response_body_timeout,
            length: 0,
            chunks: Vec::new(),
            expected,
            replayed,
            key_only: self.key_only,
            body_retained,
        }
    }
}

impl ResponseCapture {
    /// Sets the length that the body must have, for frameworks that do not send what the header `Content-Length` says; `None`
    /// if any will do.
    #[must_use]
    pub fn expect_bytes(mut self, bytes: Option<u64>) -> Self {
        self.expected = bytes;
        self
    }

    /// Whether the body is wanted at all.
    #[must_use]
    pub fn begin(&self) -> Captured {
        // With `key_only`, the record needs no body, but a classifier does.
        let is_needed = !self.key_only || self.classifier.is_some();
        if self.body_retained && is_needed { Captured::More } else { Captured::Enough }
    }

    /// The `Retry-After` for the client, in seconds, unless the handler has sent one. It is the time of
    /// [`retryable_after`](ResponseDirectives::retryable_after), and it is not stored, because a replay need not be repeated.
    #[must_use]
    pub fn retry_after_s(&self) -> Option<u64> {
        let wait = self.directives.retryable.flatten().filter(|_| !self.directives.do_not_store);
        wait.map(whole_seconds)
    }

    /// Takes the next chunk of the body; it is kept in any case, to be sent to the client.
    pub fn push(&mut self, chunk: Bytes) -> Captured {
        self.length = self.length.saturating_add(chunk.len());
        self.body_retained &= self.length <= self.limit;
        if !chunk.is_empty() {
            self.chunks.push(chunk);
        }
        self.begin()
    }

    /// Reads the body until the response can be settled. After [`Captured::Enough`], send the client the rest of the body after
    /// the chunks. The length of a body that is not read to its end is checked only so far.
    ///
    /// # Errors
    /// [`BrokenResponse`] if the body breaks off before, is not as long as declared, or takes longer than the
    /// [policy](crate::HttpPolicy::response_body_timeout) allows.
    pub async fn read<E: fmt::Display>(
        mut self,
        body: impl Stream<Item = Result<Bytes, E>>,
    ) -> Result<(Conclusion<Vec<Bytes>>, Captured), BrokenResponse> {
        let (mut body, timeout) = (pin!(body), self.timeout);
        let reading = async {
            let mut wanted = self.begin();
            while wanted == Captured::More {
                match body.next().await {
                    None => return self.expect_whole().map(|()| wanted),
                    Some(Ok(chunk)) => {
                        wanted = self.push(chunk);
                        if self.expected.is_some_and(|expected| self.length as u64 > expected) {
                            return self.expect_whole().map(|()| wanted);
                        }
                    }
                    Some(Err(error)) => return Err(format!("it broke off: {error}")),
                }
                // A body that is always ready, with empty chunks, would block the thread and outlast every timeout.
                tokio::task::coop::consume_budget().await;
            }
            Ok(wanted)
        };
        let read = tokio::time::timeout(timeout, reading).await;
        match read.unwrap_or_else(|_| Err(format!("it took longer than {timeout:?}"))) {
            Ok(wanted) => Ok((self.conclude(), wanted)),
            Err(reason) => Err(BrokenResponse::new(self.status, reason)),
        }
    }

    /// A body that ends early is no answer, and one that is longer than declared would be read as a part of the next answer.
    fn expect_whole(&self) -> Result<(), String> {
        match self.expected {
            Some(expected) if expected != self.length as u64 => {
                Err(format!("it has {} bytes, and {expected} were declared", self.length))
            }
            _ => Ok(()),
        }
    }

    /// Ends the capture: how the record settles, and the chunks that are still to be sent to the client.
    #[must_use]
    pub fn conclude(self) -> Conclusion<Vec<Bytes>> {
        let Self { classifier, status, headers, directives, chunks, replayed, key_only, body_retained, .. } = self;
        let body = if body_retained { StoredBody::Retained(joined(&chunks)) } else { StoredBody::NotRetained };
        let meaning = match &classifier {
            Some(classifier) => {
                let body = match &body {
                    StoredBody::Retained(body) => Some(&body[..]),
                    StoredBody::NotRetained => None,
                };
                classifier.meaning(&AnsweredWith { status, headers: &headers, body })
            }
            None => Meaning::of_status(status),
        };
        let body = if key_only { StoredBody::Retained(Bytes::new()) } else { body };
        let headers = replayed.unwrap_or(headers);
        let response = StoredResponse { status, headers: Arc::from(headers), body, trace: None };
        let disposition = disposition(meaning, &directives, response);
        Conclusion { value: chunks, disposition, retention: directives.retention }
    }
}

/// Shows none of the body.
impl fmt::Debug for ResponseCapture {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ResponseCapture")
            .field("status", &self.status)
            .field("headers", &self.headers)
            .field("directives", &self.directives)
            .field("length", &self.length)
            .field("body_retained", &self.body_retained)
            .finish_non_exhaustive()
    }
}

fn disposition(meaning: Meaning, directives: &ResponseDirectives, response: StoredResponse) -> Disposition {
    let keep = meaning == Meaning::Complete || directives.keep_writes;
    let writes = if keep { Writes::Keep } else { Writes::Discard };
    if directives.do_not_store {
        return Disposition::Release { writes };
    }
    if let Some(after) = directives.retryable {
        return Disposition::Retry { response, after };
    }
    match meaning {
        Meaning::Complete | Meaning::Reject => Disposition::Complete { response, writes },
        Meaning::Release => Disposition::Release { writes },
        Meaning::Fault => Disposition::Fault { response },
    }
}

/// Joins chunks into one buffer; a single chunk is not copied.
pub(crate) fn joined(chunks: &[Bytes]) -> Bytes {
    match chunks {
        [] => Bytes::new(),
        [chunk] => chunk.clone(),
        chunks => chunks.concat().into(),
    }
}

/// The conclusion of a run whose handler never began, for example because its thread had ended. The key is free.
#[must_use]
pub fn never_began<T>(value: T) -> Conclusion<T> {
    Conclusion { value, disposition: Disposition::Release { writes: Writes::Discard }, retention: None }
}

#[cfg(test)]
mod tests;
