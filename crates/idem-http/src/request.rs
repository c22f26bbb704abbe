//! Collects a request body: counts it, fingerprints it, keeps it.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use idem_core::engine::Operation;
use idem_core::{Fingerprint, FingerprintBuilder, IdempotencyKey, Scope, TraceParent};

use crate::budget::{ByteBudget, Reservation};
use crate::head::{KeyedHead, long_enough};
use crate::headers::{HeaderFields, declared_bytes, trace_parent};
use crate::key_member::key_of_body;
use crate::policy::HttpPolicy;
use crate::principal_limit::PrincipalPlace;
use crate::problem::{Problem, ProblemKind};

/// Chunks shorter than this are copied together. Each chunk has an overhead, and keeps alive the buffer that it was cut from.
/// A body sent byte by byte would take many times what the budget counts.
const COPIED_BELOW: usize = 4096;

/// Short chunks are joined up to this length, because a growing vector may hold twice its length.
const JOINED_UP_TO: usize = 64 * 1024;

/// A request whose body is still to come: give it to [`Protection::receive`](crate::Protection::receive).
pub struct IncomingRequest {
    scope: Scope,
    /// `None` when it is in the body.
    key: Option<IdempotencyKey>,
    /// How long the client prefers to wait for another request's run.
    wait: Option<Duration>,
    trace: Option<TraceParent>,
    /// The least length that the body must have, if that is known.
    expected_bytes: Option<u64>,
    body: BodyBuffer,
    place: Option<PrincipalPlace>,
}

/// A request that is ready to run.
#[non_exhaustive]
pub struct ReceivedRequest {
    /// The operation, to be given to [`Protection::execute`](crate::Protection::execute).
    pub operation: Operation,
    /// The body, in one or more chunks, none of them empty.
    pub chunks: Vec<Bytes>,
    /// Its share of the budget, and its place among the requests of its principal; drop it when the handler has answered.
    pub reservation: Reservation,
}

/// Why a request body ended early.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[expect(clippy::exhaustive_enums, reason = "adapters must say which it is")]
pub enum BodyError {
    /// It broke off.
    #[error("the body broke off")]
    Incomplete,
    /// It is over a limit that the framework sets.
    #[error("the body is over a limit of the framework")]
    TooLarge,
}

impl IncomingRequest {
    /// Refuses a body by its declared length, before anything of it is read.
    pub(crate) fn new(
        scope: Scope,
        head: KeyedHead,
        headers: &impl HeaderFields,
        policy: &HttpPolicy,
    ) -> Result<Self, Problem> {
        let KeyedHead { key, wait, fingerprint } = head;
        let place = place_of(scope.principal(), policy)?;
        let trace = trace_parent(headers);
        let body = BodyBuffer::new(fingerprint, policy.request_body_limit, &policy.budget, scope.principal());
        let declared = declared_bytes(headers);
        body.expect(declared.unwrap_or(0))?;
        // An encoded body changes its length if an outer layer decodes it.
        let expected_bytes = declared.filter(|_| headers.values("content-encoding").next().is_none());
        Ok(Self { scope, key, wait, trace, expected_bytes, body, place })
    }

    /// The name of the operation.
    pub(crate) fn operation(&self) -> &str {
        self.scope.operation()
    }

    /// Takes the next chunk of the body.
    pub(crate) fn push(&mut self, chunk: Bytes) -> Result<(), Problem> {
        self.body.push(chunk)
    }

    /// Refuses a body that is shorter than its head declares.
    ///
    /// A body that breaks off is an error before this check. One that ends normally and is too short was consumed in part by
    /// an outer layer. One that is longer was replaced by an outer layer on purpose.
    pub(crate) fn expect_whole(&self) -> Result<(), Problem> {
        if self.expected_bytes.is_none_or(|expected| self.body.length as u64 >= expected) {
            return Ok(());
        }
        Err(Problem::misconfigured(
            "the request body was consumed before it came to the idempotency layer, or a part of it; what reads it has to put \
             all of it back for the layers inside, or to stand inside of this one",
        ))
    }

    /// Ends the body; returns the request, ready to run.
    pub(crate) fn finish(self, policy: &HttpPolicy) -> Result<ReceivedRequest, Problem> {
        let Self { scope, key, wait, trace, body, place, .. } = self;
        let (fingerprint, chunks, reservation) = body.finish();
        let reservation = reservation.with_place(place);
        let key = match (key, &policy.key_member) {
            (Some(key), _) => key,
            (None, Some(member)) => long_enough(key_of_body(member, &chunks)?, policy)?,
            (None, None) => return Err(Problem::new(ProblemKind::KeyMissing)),
        };
        let operation = Operation::new(scope, key, fingerprint).trace(trace);
        let operation = match wait {
            Some(wait) => operation.wait(wait),
            None => operation,
        };
        Ok(ReceivedRequest { operation, chunks, reservation })
    }
}

/// The request's place among those of its principal, if their number is limited.
fn place_of(principal: Option<&str>, policy: &HttpPolicy) -> Result<Option<PrincipalPlace>, Problem> {
    let (Some(principal), Some(limit)) = (principal, &policy.principal_limit) else { return Ok(None) };
    limit.enter(principal).map(Some).map_err(|count| {
        let detail = format!(
            "{count} requests of this client are in progress, as many as it may have at once; repeat this one when one of them is \
             answered. Nothing ran."
        );
        Problem::new(ProblemKind::ShareExceeded).detail(detail).retry_after(Duration::from_secs(1))
    })
}

/// Collects a request body. The key is acquired only after the last chunk, so that a slow upload holds no lease.
///
/// While it is open, it takes little more memory than the bytes of the body, which the budget counts. A fingerprint that
/// would hold more is made in [`finish`](Self::finish). That never waits, so each thread of the runtime makes one at a time.
struct BodyBuffer {
    fingerprint: FingerprintBuilder,
    chunks: Vec<Bytes>,
    /// Short chunks that are not yet in `chunks`.
    tail: Vec<u8>,
    limit: usize,
    length: usize,
    reservation: Reservation,
}

impl BodyBuffer {
    fn new(fingerprint: FingerprintBuilder, limit: usize, budget: &ByteBudget, principal: Option<&str>) -> Self {
        Self {
            fingerprint,
            chunks: Vec::new(),
            tail: Vec::new(),
            // A body larger than the whole budget can never be taken.
            limit: limit.min(budget.total()),
            length: 0,
            reservation: budget.reserve_none(principal),
        }
    }

    /// Refuses a body whose declared length is over the limit.
    fn expect(&self, length: u64) -> Result<(), Problem> {
        if length > self.limit as u64 { Err(self.too_large()) } else { Ok(()) }
    }

    /// Takes the next chunk, unless it is over the limit of one request, of the principal, or of all.
    fn push(&mut self, chunk: Bytes) -> Result<(), Problem> {
        self.length = self.length.saturating_add(chunk.len());
        if self.length > self.limit {
            return Err(self.too_large());
        }
        if let Err(kind) = self.reservation.grow(chunk.len()) {
            return Err(Problem::new(kind).retry_after(Duration::from_secs(1)));
        }
        if !self.fingerprint.holds_body() {
            self.fingerprint.body(&chunk);
        }
        if chunk.len() < COPIED_BELOW {
            if self.tail.len() + chunk.len() > JOINED_UP_TO {
                self.close_tail();
            }
            self.tail.extend_from_slice(&chunk);
        } else {
            self.close_tail();
            self.chunks.push(chunk);
        }
        Ok(())
    }

    fn close_tail(&mut self) {
        if !self.tail.is_empty() {
            // A boxed slice has no spare capacity.
            self.chunks.push(Bytes::from(std::mem::take(&mut self.tail).into_boxed_slice()));
        }
    }

    fn finish(mut self) -> (Fingerprint, Vec<Bytes>, Reservation) {
        self.close_tail();
        let Self { mut fingerprint, chunks, reservation, .. } = self;
        if fingerprint.holds_body() {
            chunks.iter().for_each(|chunk| fingerprint.body(chunk));
        }
        (fingerprint.finish(), chunks, reservation)
    }

    fn too_large(&self) -> Problem {
        let detail = format!("The request body is over the limit of {} bytes; nothing ran.", self.limit);
        Problem::new(ProblemKind::BodyTooLarge).detail(detail)
    }
}

impl From<BodyError> for Problem {
    fn from(error: BodyError) -> Self {
        Self::new(match error {
            BodyError::Incomplete => ProblemKind::BodyIncomplete,
            BodyError::TooLarge => ProblemKind::BodyTooLarge,
        })
    }
}

/// Shows neither the key nor the body.
impl fmt::Debug for IncomingRequest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scope, wait, expected_bytes, body, .. } = self;
        formatter
            .debug_struct("IncomingRequest")
            .field("scope", scope)
            .field("wait", wait)
            .field("expected_bytes", expected_bytes)
            .field("length", &body.length)
            .finish_non_exhaustive()
    }
}

/// Shows none of the body.
impl fmt::Debug for ReceivedRequest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ReceivedRequest").field("operation", &self.operation).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use idem_core::BodyFormat;

    use super::*;

    fn buffer(limit: usize, budget: usize) -> BodyBuffer {
        buffer_of(BodyFormat::Raw, limit, &ByteBudget::new(budget))
    }

    fn buffer_of(format: BodyFormat, limit: usize, budget: &ByteBudget) -> BodyBuffer {
        BodyBuffer::new(FingerprintBuilder::new(format), limit, budget, Some("a"))
    }

    fn kind(result: Result<(), Problem>) -> Option<ProblemKind> {
        result.err().map(|problem| problem.kind())
    }

    #[test]
    fn the_limit_is_the_last_length_that_is_taken() {
        let mut exact = buffer(4, 100);
        assert_eq!(kind(exact.expect(4)), None);
        assert_eq!(kind(exact.expect(5)), Some(ProblemKind::BodyTooLarge));
        assert_eq!(kind(exact.push("ab".into())), None);
        assert_eq!(kind(exact.push("cd".into())), None);
        assert_eq!(kind(exact.push("e".into())), Some(ProblemKind::BodyTooLarge));
    }

    #[test]
    fn the_budget_of_all_requests_is_kept() {
        let budget = ByteBudget::new(5);
        let new = || buffer_of(BodyFormat::Raw, 10, &budget);
        let (mut one, mut other) = (new(), new());
        assert_eq!(kind(one.push("abc".into())), None);
        assert_eq!(kind(other.push("abc".into())), Some(ProblemKind::Overloaded));
        drop(one);
        assert_eq!(kind(new().push("abcde".into())), None);
        assert_eq!(kind(new().expect(6)), Some(ProblemKind::BodyTooLarge), "it would never be taken");
    }

    #[test]
    fn how_a_body_is_cut_does_not_change_the_fingerprint() {
        let text = "{\"b\": 1, \"a\": 2}";
        for format in [BodyFormat::Raw, BodyFormat::json(), BodyFormat::multipart(*b"b")] {
            let buffer = || buffer_of(format.clone(), 100, &ByteBudget::new(100));
            let (mut one, mut two) = (buffer(), buffer());
            one.push(text.into()).unwrap();
            for chunk in [&text[..2], "", &text[2..]] {
                two.push(chunk.to_owned().into()).unwrap();
            }
            let (one, two) = (one.finish(), two.finish());
            assert_eq!(one.0, two.0);
            let mut whole = FingerprintBuilder::new(format);
            whole.body(text.as_bytes());
            assert_eq!(two.0, whole.finish());
            assert_eq!(two.1.concat(), text.as_bytes());
        }
    }

    #[test]
    fn a_principal_over_its_share_is_told_so_and_when_to_come_back() {
        let budget = ByteBudget::new(100);
        let (mut one, mut two) = (buffer_of(BodyFormat::Raw, 100, &budget), buffer_of(BodyFormat::Raw, 100, &budget));
        one.push(vec![b'x'; 50].into()).unwrap();
        let refused = two.push("x".into()).unwrap_err();
        assert_eq!((refused.kind(), refused.retry_after_s()), (ProblemKind::ShareExceeded, Some(1)));
    }

    #[test]
    fn short_chunks_are_joined_into_pieces_of_bounded_length() {
        let mut buffer = buffer(1 << 20, 1 << 20);
        let body: Vec<u8> = (0..300_000_u32).map(|at| at.to_le_bytes()[0]).collect();
        for chunk in body.chunks(1_000) {
            buffer.push(Bytes::copy_from_slice(chunk)).unwrap();
        }
        let (_, chunks, _) = buffer.finish();
        assert!(chunks.iter().all(|chunk| chunk.len() <= JOINED_UP_TO) && chunks.len() == 5);
        assert_eq!(chunks.concat(), body);
    }

    #[test]
    fn short_chunks_are_joined_in_their_place_and_long_ones_are_not_copied() {
        let long = Bytes::from(vec![b'x'; COPIED_BELOW]);
        let mut buffer = buffer(10_000, 10_000);
        for chunk in ["a".into(), "b".into(), long.clone(), Bytes::new(), long.clone(), "c".into()] {
            buffer.push(chunk).unwrap();
        }
        let (_, chunks, _) = buffer.finish();
        assert_eq!(chunks, [Bytes::from("ab"), long.clone(), long.clone(), Bytes::from("c")]);
        assert_eq!(chunks[1].as_ptr(), long.as_ptr());
    }
}
