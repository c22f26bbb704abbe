//! The input of the checker: what clients asked, what they were answered, and what really happened.

use std::time::Duration;

/// The key of a request. Tenants share key numbers.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Key {
    /// The tenant that pays.
    pub tenant: u32,
    /// The number of the key, within the tenant.
    pub key: u64,
}

/// One request and its outcome. Times count from the start of the run, by a monotonic clock.
#[derive(Debug, Clone)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Operation {
    /// The key of the request.
    pub key: Key,
    /// The amount that it asked for, which distinguishes altered bodies.
    pub amount: i64,
    /// When it was sent.
    pub began: Duration,
    /// When it was answered or given up.
    pub ended: Duration,
    /// The answer; `None` if no complete answer arrived.
    pub answer: Option<Answer>,
}

/// The answer that a client received.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// Whether it is marked as a replay.
    pub is_replay: bool,
    /// The problem type of the idempotency layer, if it is a problem.
    pub problem: Option<String>,
    /// A digest of everything that a replay has to repeat.
    pub digest: u64,
    /// The payment, if it is one.
    pub payment: Option<Payment>,
}

/// A payment, as an answer shows it or as the ledger holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Payment {
    /// Its name.
    pub id: String,
    /// The key for which it was made.
    pub key: Key,
    /// How much money moved.
    pub amount: i64,
    /// The attempt of the operation that made it.
    pub attempt: u32,
}

/// What one answer says about its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Word {
    /// It is done, and this is its final answer.
    Settled,
    /// Its outcome stays unknown.
    Unknown,
    /// It belongs to another request.
    Mismatch,
    /// It runs.
    InProgress,
    /// Nothing final: the client must retry.
    Later,
}

impl Operation {
    /// Whether it says what finally became of the key.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        self.answer.as_ref().is_some_and(|answer| matches!(answer.word(), Word::Settled | Word::Unknown))
    }

    /// Whether its answer comes from its own run.
    pub(crate) fn is_run(&self) -> bool {
        self.answer.as_ref().is_some_and(|answer| answer.status == 201 && !answer.is_replay)
    }
}

impl Answer {
    pub(crate) fn word(&self) -> Word {
        match (self.status, self.problem.as_deref()) {
            (_, Some("outcome-unknown")) => Word::Unknown,
            (_, Some("mismatch")) => Word::Mismatch,
            (_, Some("in-progress")) => Word::InProgress,
            (_, Some("handler-failed")) if self.is_replay => Word::Settled,
            (410, Some("body-not-retained")) => Word::Settled,
            (_, Some(_)) => Word::Later,
            (201, None) => Word::Settled,
            // An answer of the application is final once it is replayed.
            (_, None) if self.is_replay => Word::Settled,
            (_, None) => Word::Later,
        }
    }

    /// Whether the client need not retry.
    #[must_use]
    pub fn is_definite(&self) -> bool {
        matches!(self.word(), Word::Settled | Word::Unknown | Word::Mismatch)
    }
}
