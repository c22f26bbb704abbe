//! A handler's response on its way out: what of it is kept, and what its record becomes.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use idem_core::engine::{Conclusion, Disposition};
use idem_core::{HeaderField, StoredBody, StoredResponse, Writes};

use crate::directives::ResponseDirectives;
use crate::headers::{HeaderFields, storable};
use crate::policy::HttpPolicy;

/// What a status says about the operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    /// It took effect.
    Done,
    /// It was refused for what was asked; asking again would be refused again.
    Rejected,
    /// It was refused for who asked, when, or how often; asking again may succeed.
    Refused,
    /// It failed.
    Fault,
}

impl Class {
    fn of(status: u16) -> Self {
        match status {
            200..400 => Self::Done,
            // Authentication, timing, routing and rate limits say nothing about the operation: storing them would poison
            // the key. A protocol upgrade cannot be replayed either.
            101 | 401 | 403 | 407 | 408 | 421 | 425 | 429 => Self::Refused,
            400..500 => Self::Rejected,
            _ => Self::Fault,
        }
    }
}

/// Whether more of a response body is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "there is no third answer")]
pub enum Captured {
    /// Push the next chunk.
    More,
    /// The body is over the limit, or not to be kept: settle now, and send the rest as it comes.
    Enough,
}

/// Collects a response until its record can be settled.
pub struct ResponseCapture {
    class: Class,
    status: u16,
    headers: Vec<HeaderField>,
    directives: ResponseDirectives,
    limit: usize,
    timeout: Duration,
    length: usize,
    chunks: Vec<Bytes>,
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
        let mut headers = storable(headers, &self.allowed_headers);
        // A replay is marked by this policy alone; a mark that the handler passed on belongs to somebody else's replay.
        headers.retain(|field| field.name != self.replay_header);
        let directives = directives.cloned().unwrap_or_default();
        ResponseCapture::new(status, headers, directives, self.stored_response_limit, self.response_body_timeout)
    }
}

impl ResponseCapture {
    fn new(
        status: u16,
        headers: Vec<HeaderField>,
        directives: ResponseDirectives,
        limit: usize,
        timeout: Duration,
    ) -> Self {
        let is_stream = |field: &HeaderField| {
            field.name == "content-type" && field.value.to_ascii_lowercase().starts_with(b"text/event-stream")
        };
        let body_retained = !directives.body_not_retained && !headers.iter().any(is_stream);
        let class = Class::of(status);
        Self { class, status, headers, directives, limit, timeout, length: 0, chunks: Vec::new(), body_retained }
    }

    /// Whether the body is wanted at all.
    #[must_use]
    pub fn begin(&self) -> Captured {
        if self.body_retained { Captured::More } else { Captured::Enough }
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

    /// Reads the body until the response can be settled; `None` when it breaks off before, or takes longer than the
    /// [policy](crate::HttpPolicy::response_body_timeout) allows. Otherwise, after [`Captured::Enough`], the client has to be sent
    /// the rest of the body after the chunks.
    pub async fn read<E>(
        mut self,
        body: impl Stream<Item = Result<Bytes, E>>,
    ) -> Option<(Conclusion<Vec<Bytes>>, Captured)> {
        let (mut body, timeout) = (pin!(body), self.timeout);
        let reading = async {
            let mut wanted = self.begin();
            while wanted == Captured::More {
                match body.next().await {
                    None => break,
                    Some(chunk) => wanted = self.push(chunk.ok()?),
                }
                // A body that is always ready, with chunks that are empty, would keep the thread and outlast every timeout.
                tokio::task::coop::consume_budget().await;
            }
            Some(wanted)
        };
        let wanted = tokio::time::timeout(timeout, reading).await.ok()??;
        Some((self.conclude(), wanted))
    }

    /// What the record becomes, and the chunks that the client has still to be sent.
    #[must_use]
    pub fn conclude(self) -> Conclusion<Vec<Bytes>> {
        let Self { class, status, headers, directives, chunks, body_retained, .. } = self;
        let body = if body_retained { StoredBody::Retained(joined(&chunks)) } else { StoredBody::NotRetained };
        let response = StoredResponse { status, headers: Arc::from(headers), body };
        let disposition = disposition(class, &directives, response);
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

fn disposition(class: Class, directives: &ResponseDirectives, response: StoredResponse) -> Disposition {
    let keep = class == Class::Done || directives.keep_writes;
    let writes = if keep { Writes::Keep } else { Writes::Discard };
    if directives.do_not_store {
        return Disposition::Release { writes };
    }
    if let Some(after) = directives.retryable {
        return Disposition::Retry { response, after };
    }
    match class {
        Class::Done | Class::Rejected => Disposition::Complete { response, writes },
        Class::Refused => Disposition::Release { writes },
        Class::Fault => Disposition::Fault { response },
    }
}

/// One run of bytes; a body of one chunk is not copied.
pub(crate) fn joined(chunks: &[Bytes]) -> Bytes {
    match chunks {
        [] => Bytes::new(),
        [chunk] => chunk.clone(),
        chunks => chunks.concat().into(),
    }
}

/// The conclusion of a run whose handler never began, as when what was to run it has ended before: the key is free.
#[must_use]
pub fn never_began<T>(value: T) -> Conclusion<T> {
    Conclusion { value, disposition: Disposition::Release { writes: Writes::Discard }, retention: None }
}

#[cfg(test)]
mod tests;
