//! What clients asked and were answered, and what really happened: all that the checker knows.

use std::time::Duration;

/// What a request is about. Tenants share keys.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Key {
    /// Whose payment.
    pub tenant: u32,
    /// Which key of that tenant.
    pub key: u64,
}

/// One request and what came of it. Times are counted from the start of the run, by one clock that never goes back.
#[derive(Debug, Clone)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Operation {
    /// What it was about.
    pub key: Key,
    /// The amount that it asked for, by which altered bodies are told apart.
    pub amount: i64,
    /// When it was sent.
    pub began: Duration,
    /// When it was answered, or given up.
    pub ended: Duration,
    /// What was answered; `None` when nobody knows.
    pub answer: Option<Answer>,
}

/// What a client was answered.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// Whether it is marked as a replay.
    pub is_replay: bool,
    /// The kind of a problem of the idempotency layer.
    pub problem: Option<String>,
    /// A digest of everything that a replay has to repeat.
    pub digest: u64,
    /// The payment, if it is one.
    pub payment: Option<Payment>,
}

/// A payment as an answer shows it, or as the sink has it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "it is nothing but its members")]
pub struct Payment {
    /// Its name.
    pub id: String,
    /// For what it was made.
    pub key: Key,
    /// How much money moved.
    pub amount: i64,
    /// Which attempt of its operation made it.
    pub attempt: u32,
}

/// What came of a key, as far as one answer says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Word {
    /// It is done, and this is its answer for good.
    Settled,
    /// Its outcome is unknown for good.
    Unknown,
    /// It belongs to another request.
    Mismatch,
    /// It runs.
    InProgress,
    /// Nothing for good: come back.
    Later,
}

impl Operation {
    /// Whether it tells what became of the key, for good.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        self.answer.as_ref().is_some_and(|answer| matches!(answer.word(), Word::Settled | Word::Unknown))
    }

    /// Whether its answer is that of its own run.
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
            // What the application answers is for good once it is replayed.
            (_, None) if self.is_replay => Word::Settled,
            (_, None) => Word::Later,
        }
    }

    /// Whether a client needs to ask no more.
    #[must_use]
    pub fn is_definite(&self) -> bool {
        matches!(self.word(), Word::Settled | Word::Unknown | Word::Mismatch)
    }
}
