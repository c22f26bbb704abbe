//! The length of a run.

use std::time::Duration;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    pub(crate) rounds: usize,
    /// One turn of one contestant.
    pub(crate) turn: Duration,
    pub(crate) quick: bool,
}

impl Pace {
    pub(crate) const FULL: Self = Self { rounds: 5, turn: Duration::from_secs(3), quick: false };
    pub(crate) const QUICK: Self = Self { rounds: 2, turn: Duration::from_millis(700), quick: true };
}
