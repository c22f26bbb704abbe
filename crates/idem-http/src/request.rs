//! A request body on its way in: counted, fingerprinted, kept.

use bytes::Bytes;
use idem_core::{Fingerprint, FingerprintBuilder};

use crate::budget::{ByteBudget, Reservation};
use crate::problem::{Problem, ProblemKind};

/// Collects a request body. The key is acquired only after the last chunk, so that a slow upload holds no lease.
#[derive(Debug)]
pub struct RequestBuffer {
    fingerprint: FingerprintBuilder,
    chunks: Vec<Bytes>,
    limit: usize,
    length: usize,
    reservation: Reservation,
}

/// A request body that has arrived.
#[derive(Debug)]
pub struct BufferedRequest {
    /// The digest of the request.
    pub fingerprint: Fingerprint,
    /// The body, as it was cut on the way.
    pub chunks: Vec<Bytes>,
    /// Its share of the budget; hold it for as long as the body is held.
    pub reservation: Reservation,
}

impl RequestBuffer {
    pub(crate) fn new(fingerprint: FingerprintBuilder, limit: usize, budget: &ByteBudget) -> Self {
        Self { fingerprint, chunks: Vec::new(), limit, length: 0, reservation: budget.reserve_none() }
    }

    /// Refuses a body by its declared length, before anything of it is read.
    ///
    /// # Errors
    /// [`ProblemKind::BodyTooLarge`] when `length` is over the limit.
    pub fn expect(&self, length: u64) -> Result<(), Problem> {
        if length > self.limit as u64 { Err(self.too_large()) } else { Ok(()) }
    }

    /// Takes the next chunk.
    ///
    /// # Errors
    /// [`ProblemKind::BodyTooLarge`] over the limit of one request, [`ProblemKind::Overloaded`] over that of all.
    pub fn push(&mut self, chunk: Bytes) -> Result<(), Problem> {
        self.length = self.length.saturating_add(chunk.len());
        if self.length > self.limit {
            return Err(self.too_large());
        }
        if !self.reservation.grow(chunk.len()) {
            return Err(Problem::new(ProblemKind::Overloaded).retry_after(std::time::Duration::from_secs(1)));
        }
        self.fingerprint.body(&chunk);
        if !chunk.is_empty() {
            self.chunks.push(chunk);
        }
        Ok(())
    }

    /// The body has ended.
    #[must_use]
    pub fn finish(self) -> BufferedRequest {
        let Self { fingerprint, chunks, reservation, .. } = self;
        BufferedRequest { fingerprint: fingerprint.finish(), chunks, reservation }
    }

    fn too_large(&self) -> Problem {
        let detail = format!("The request body is over the limit of {} bytes; nothing ran.", self.limit);
        Problem::new(ProblemKind::BodyTooLarge).detail(detail)
    }
}

#[cfg(test)]
mod tests {
    use idem_core::BodyFormat;

    use super::*;

    fn buffer(limit: usize, budget: usize) -> RequestBuffer {
        RequestBuffer::new(FingerprintBuilder::new(BodyFormat::Raw), limit, &ByteBudget::new(budget))
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
        let mut large = buffer(10, 3);
        assert_eq!(kind(large.push("abc".into())), None);
        assert_eq!(kind(large.push("d".into())), Some(ProblemKind::Overloaded));
    }

    #[test]
    fn chunks_are_kept_as_they_came_and_do_not_change_the_fingerprint() {
        let (mut one, mut two) = (buffer(10, 10), buffer(10, 10));
        one.push("abcd".into()).unwrap();
        two.push("ab".into()).unwrap();
        two.push(Bytes::new()).unwrap();
        two.push("cd".into()).unwrap();
        let (one, two) = (one.finish(), two.finish());
        assert_eq!(one.fingerprint, two.fingerprint);
        assert_eq!(two.chunks, ["ab", "cd"]);
    }
}
