//! From an engine's answer to the response that a client gets.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use idem_core::engine::{Answer, Conclusion, Disposition, ExecuteError};
use idem_core::{HeaderField, RecordId, Replay, ReplayKind, StoreError, StoreErrorKind, StoredBody, StoredResponse};

use crate::headers::{HeaderFields, is_framing};
use crate::policy::HttpPolicy;
use crate::problem::{Problem, ProblemKind};
use crate::response::{Captured, joined};

/// `Retry-After` of a 503: a restart or a failover of the store takes a moment.
const STORE_RETRY_AFTER: Duration = Duration::from_secs(1);

/// A response that the layer makes itself: a replay or a problem.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reply {
    /// The status.
    pub status: u16,
    /// Header fields in their order, names in lower case. There is no `Content-Length`; the server adds it.
    pub headers: Vec<(Bytes, Bytes)>,
    /// The body.
    pub body: Bytes,
    /// Which problem it is, if it is one.
    pub problem: Option<ProblemKind>,
}

impl Reply {
    fn field(&mut self, name: impl Into<Bytes>, value: impl Into<Bytes>) {
        self.headers.push((name.into(), value.into()));
    }
}

/// Shows neither header values nor the body.
impl fmt::Debug for Reply {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.headers.iter().map(|(name, _)| name).collect();
        formatter
            .debug_struct("Reply")
            .field("status", &self.status)
            .field("headers", &names)
            .field("body_bytes", &self.body.len())
            .field("problem", &self.problem)
            .finish()
    }
}

/// Stored fields that a tombstone's problem must not carry. They describe the body that was not kept, or let a cache keep the
/// problem.
const REPRESENTATION: &[&str] =
    &["etag", "last-modified", "accept-ranges", "digest", "repr-digest", "cache-control", "expires"];

impl HttpPolicy {
    /// The handler's answer, or the reply that takes its place.
    pub(crate) fn reply<T>(&self, answer: Result<Answer<Result<T, Reply>>, ExecuteError>) -> Result<T, Reply> {
        let problem = match answer {
            Ok(Answer::Ran { value, .. }) => return value,
            Ok(Answer::Replay(replay)) => return Err(self.replay(&replay)),
            Err(error) => return Err(self.failure(&error)),
            Ok(Answer::InProgress { retry_after }) => Problem::new(ProblemKind::InProgress).retry_after(retry_after),
            Ok(Answer::Backoff { retry_after }) => Problem::new(ProblemKind::Backoff).retry_after(retry_after),
            Ok(Answer::Mismatch) => Problem::new(ProblemKind::Mismatch),
        };
        Err(self.problem(&problem))
    }

    /// The reply to a repeat whose first answer may have a continuation.
    pub(crate) async fn final_reply(&self, request: &RecordId, first: &Replay) -> Reply {
        let Some(continuation) = self.continuation.as_ref().filter(|_| first.kind == ReplayKind::Completed) else {
            return self.replay(first);
        };
        match continuation.final_answer(request, &first.response).await {
            Ok(Some(last)) => self.replay(&last),
            Ok(None) => self.replay(first),
            Err(error) => self.failure(&error),
        }
    }

    /// The answer to a repeat of a settled operation: the stored response, byte for byte, and the field that marks replays. Stored fields
    /// that would frame the message, such as `Content-Length`, are left out.
    /// The stored fields decide whether caches may keep it.
    #[must_use]
    pub fn replay(&self, replay: &Replay) -> Reply {
        let StoredResponse { status, headers, body, .. } = &replay.response;
        // No handler ends with such a status, so something else wrote or damaged the record.
        if !(200..1000).contains(status) {
            return self.problem(&Problem::new(ProblemKind::RecordUnreadable));
        }
        let mut reply = match (replay.kind, body) {
            (ReplayKind::OutcomeUnknown, _) => self.problem(&Problem::new(ProblemKind::OutcomeUnknown)),
            (_, StoredBody::Retained(body)) => {
                // No integration stores such a field. A record that something else wrote may have one.
                let is_sent = |field: &&HeaderField| !std::str::from_utf8(&field.name).is_ok_and(is_framing);
                let headers = headers.iter().filter(is_sent);
                let headers = headers.map(|field| (field.name.clone(), field.value.clone())).collect();
                Reply { status: *status, headers, body: body.clone(), problem: None }
            }
            (_, StoredBody::NotRetained) => {
                let mut reply = self.problem(&Problem::new(ProblemKind::BodyNotRetained).original_status(*status));
                let describes_body = |name: &[u8]| {
                    name.starts_with(b"content-") || REPRESENTATION.iter().any(|field| field.as_bytes() == name)
                };
                let kept = headers.iter().filter(|field| !describes_body(&field.name));
                reply.headers.extend(kept.map(|field| (field.name.clone(), field.value.clone())));
                reply
            }
        };
        reply.field(self.replay_header.clone(), "true");
        reply
    }

    /// The status of problems of this kind.
    #[must_use]
    pub fn problem_status(&self, kind: ProblemKind) -> u16 {
        if kind == ProblemKind::Mismatch { self.mismatch_status } else { kind.status() }
    }

    /// The answer that states a problem. It forbids caching: some of its statuses are cacheable by default (RFC 9110 section
    /// 15.1), and its statement may be outdated by the next request.
    #[must_use]
    pub fn problem(&self, problem: &Problem) -> Reply {
        let kind = problem.kind();
        let status = self.problem_status(kind);
        let (content_type, body) = self.problems.write(problem, status);
        let mut reply = Reply { status, headers: Vec::new(), body, problem: Some(kind) };
        reply.field("content-type", content_type);
        reply.field("cache-control", "no-store");
        if let Some(seconds) = problem.retry_after_s() {
            reply.field("retry-after", seconds.to_string());
        }
        if kind == ProblemKind::PrincipalMissing {
            reply.field("www-authenticate", self.challenge.clone());
        }
        reply
    }

    /// The answer of a run that left its response elsewhere, for frameworks whose responses cannot leave their thread.
    ///
    /// `outcome` is what [`Protection::execute`] gave, and `left` is the response that the run left. An error in `outcome`
    /// takes its place. If the run left nothing, the reply asks the client to repeat, because the outcome is not known.
    ///
    /// # Errors
    /// The reply that takes the place of the handler's answer.
    ///
    /// [`Protection::execute`]: crate::Protection::execute
    pub fn answer_of<T>(&self, outcome: Result<(), Reply>, left: Option<T>) -> Result<T, Reply> {
        outcome.and_then(|()| left.ok_or_else(|| self.failure(&ExecuteError::Interrupted)))
    }

    /// A copy of a handler's answer, for frameworks that may ask for an answer several times. It has all header lines and the
    /// chunks of the body, without the length, which the server computes.
    ///
    /// An answer whose body was not read to its end can be sent only once. Its copy is the problem that its replays get, or under
    /// [`key_only`](HttpPolicy::key_only) what a replay has.
    #[must_use]
    pub fn copy_of(
        &self,
        status: u16,
        headers: &(impl HeaderFields + ?Sized),
        chunks: &[Bytes],
        captured: Captured,
    ) -> Reply {
        match captured {
            Captured::Enough if !self.key_only => {
                self.problem(&Problem::new(ProblemKind::BodyNotRetained).original_status(status))
            }
            Captured::Enough | Captured::More => {
                let is_whole = captured == Captured::More;
                let chunks = if is_whole { chunks } else { &[] };
                let mut reply = Reply { status, headers: Vec::new(), body: joined(chunks), problem: None };
                let is_sent = |name: &str| !is_framing(name) && (is_whole || self.is_replayed(name.as_bytes()));
                for (name, value) in headers.lines().filter(|(name, _)| is_sent(name)) {
                    reply.field(Bytes::copy_from_slice(name.as_bytes()), Bytes::copy_from_slice(value));
                }
                reply
            }
        }
    }

    /// The conclusion of a handler that panicked, or whose answer broke off or took too long: a 500 problem.
    #[must_use]
    pub fn handler_failed<T>(&self) -> Conclusion<Result<T, Reply>> {
        let reply = self.problem(&Problem::new(ProblemKind::HandlerFailed));
        let field = |(name, value): &(Bytes, Bytes)| HeaderField { name: name.clone(), value: value.clone() };
        let headers = reply.headers.iter().map(field).collect();
        let response = StoredResponse { headers, ..StoredResponse::new(reply.status, reply.body.clone()) };
        Conclusion { value: Err(reply), disposition: Disposition::Fault { response }, retention: None }
    }

    /// The answer to an error of the engine.
    #[must_use]
    pub fn failure(&self, error: &ExecuteError) -> Reply {
        let later = |kind| Problem::new(kind).retry_after(STORE_RETRY_AFTER);
        self.problem(&match error {
            ExecuteError::NotAdmitted(error) if is_unreadable(error) => Problem::new(ProblemKind::RecordUnreadable),
            ExecuteError::TransactionHeld => Problem::new(ProblemKind::HandlerFailed)
                .detail("The handler kept its transaction beyond its end; its writes were rolled back."),
            ExecuteError::Steps(_) => Problem::new(ProblemKind::HandlerFailed)
                .detail("The handler answered with a success although a step of the operation had failed."),
            ExecuteError::TransactionFailed(_) => Problem::new(ProblemKind::HandlerFailed).detail(
                "The handler's transaction was not committed: the database refused it, or the handler had ended it. There is no \
                 record, so a repeat runs.",
            ),
            ExecuteError::CommitUnclear(_) | ExecuteError::Interrupted => later(ProblemKind::CommitUnclear),
            ExecuteError::Overloaded { .. } => later(ProblemKind::Overloaded)
                .detail("The server already runs its maximum of operations; nothing ran, so repeat the request later."),
            ExecuteError::Busy(_) => later(ProblemKind::Overloaded)
                .detail("All transactions of the server are in use; nothing ran, so repeat the request later."),
            ExecuteError::ShuttingDown => later(ProblemKind::ShuttingDown),
            _ => later(ProblemKind::StoreUnavailable),
        })
    }
}

fn is_unreadable(error: &StoreError) -> bool {
    error.kind() == StoreErrorKind::Corrupt
}

#[cfg(test)]
mod tests;
