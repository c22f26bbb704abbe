//! What a run's end means under each contract.

use std::time::Duration;

use crate::machine::Settlement;
use crate::record::{StoredResponse, Takeover};
use crate::store::Writes;

/// What is promised across a crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "a contract whose meaning is not decided must not compile")]
pub enum Contract {
    /// Effectively-once inside the transaction that holds both the business writes and the record.
    Transactional,
    /// At most one run; after a crash the outcome is unknown.
    AtMostOnce,
    /// At least one run; after a crash it runs again.
    AtLeastOnce,
}

/// How a run ended: what its caller gets, and what its record becomes.
#[derive(Debug)]
pub struct Conclusion<T> {
    /// For the caller whose request ran.
    pub value: T,
    /// For the record.
    pub disposition: Disposition,
    /// How long the record is kept, when it differs from [`Settings::retention`](super::Settings::retention); at least 1 s.
    pub retention: Option<Duration>,
}

/// What the record of a run becomes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "an end whose settlement is not decided must not compile")]
pub enum Disposition {
    /// It ended as intended; every repeat gets the response.
    Complete {
        /// What repeats get.
        response: StoredResponse,
        /// Whether the business writes of a Transactional run stay.
        writes: Writes,
    },
    /// It failed unexpectedly; the contract decides.
    Fault {
        /// What repeats get if it never runs again.
        response: StoredResponse,
    },
    /// It failed for good; every repeat gets the response. The business writes of a Transactional run are discarded.
    Fail {
        /// What repeats get.
        response: StoredResponse,
    },
    /// It failed, and says itself that running it again is safe.
    Retry {
        /// What repeats get once the attempts are used up.
        response: StoredResponse,
        /// How long the next attempt has to wait; by default the backoff of the settings.
        after: Option<Duration>,
    },
    /// As if it had never been: the next repeat runs.
    Release {
        /// Whether the business writes of a Transactional run stay.
        writes: Writes,
    },
}

impl Contract {
    /// What a crash under this contract means. A crashed transaction was rolled back, so it may run again.
    pub(super) fn takeover(self, has_probe: bool) -> Takeover {
        match self {
            Self::Transactional | Self::AtLeastOnce => Takeover::Rerun,
            Self::AtMostOnce if has_probe => Takeover::Probe,
            Self::AtMostOnce => Takeover::Unknown,
        }
    }

    /// The settlement of a run, and what becomes of its business writes. A retryable failure waits for `backoff`,
    /// unless the run says for how long. Retries and faults discard the writes.
    pub(super) fn settlement(self, disposition: Disposition, backoff: Duration) -> (Settlement, Writes) {
        match disposition {
            Disposition::Complete { response, writes } => (Settlement::Completed(response), writes),
            Disposition::Fail { response } => (Settlement::FailedTerminal(response), Writes::Discard),
            Disposition::Release { writes } => (Settlement::Released, writes),
            Disposition::Retry { response, after } => {
                let retry_after = after.unwrap_or(backoff);
                (Settlement::FailedRetryable { response, retry_after }, Writes::Discard)
            }
            Disposition::Fault { response } => {
                let settlement = match self {
                    Self::Transactional => Settlement::Released,
                    Self::AtMostOnce => Settlement::FailedTerminal(response),
                    Self::AtLeastOnce => Settlement::FailedRetryable { response, retry_after: backoff },
                };
                (settlement, Writes::Discard)
            }
        }
    }
}

/// What an error means for the operation that it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorMeaning {
    /// Unexpected: the contract decides, as for [`Disposition::Fault`].
    Fault,
    /// The answer: the operation never runs again, and repeats get the error. The business writes of a Transactional run are
    /// discarded.
    Final,
    /// The operation may run again, under every contract, but not before `after` is over.
    Retry {
        /// How long to wait.
        after: Duration,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settled(contract: Contract, disposition: Disposition) -> (Settlement, Writes) {
        contract.settlement(disposition, Duration::from_secs(4))
    }

    const ALL: [Contract; 3] = [Contract::Transactional, Contract::AtMostOnce, Contract::AtLeastOnce];

    #[test]
    fn a_fault_is_what_the_contract_says() {
        let response = StoredResponse::new(500, "fault");
        let fault = |contract| settled(contract, Disposition::Fault { response: response.clone() });
        assert_eq!(fault(Contract::Transactional), (Settlement::Released, Writes::Discard));
        assert_eq!(fault(Contract::AtMostOnce), (Settlement::FailedTerminal(response.clone()), Writes::Discard));
        let retry_after = Duration::from_secs(4);
        let retryable = Settlement::FailedRetryable { response: response.clone(), retry_after };
        assert_eq!(fault(Contract::AtLeastOnce), (retryable, Writes::Discard));
    }

    #[test]
    fn intended_ends_are_the_same_under_every_contract() {
        for contract in ALL {
            let response = StoredResponse::new(201, "made");
            for writes in [Writes::Keep, Writes::Discard] {
                let complete = Disposition::Complete { response: response.clone(), writes };
                assert_eq!(settled(contract, complete), (Settlement::Completed(response.clone()), writes));
                assert_eq!(settled(contract, Disposition::Release { writes }), (Settlement::Released, writes));
            }
            let fail = Disposition::Fail { response: response.clone() };
            let terminal = Settlement::FailedTerminal(response.clone());
            assert_eq!(settled(contract, fail), (terminal, Writes::Discard));
            for (after, expected) in [(None, 4), (Some(Duration::from_secs(9)), 9)] {
                let retry = Disposition::Retry { response: response.clone(), after };
                let retry_after = Duration::from_secs(expected);
                let settlement = Settlement::FailedRetryable { response: response.clone(), retry_after };
                assert_eq!(settled(contract, retry), (settlement, Writes::Discard));
            }
        }
    }

    #[test]
    fn only_at_most_once_gives_up_on_a_crash() {
        assert_eq!(ALL.map(|contract| contract.takeover(false)), [Takeover::Rerun, Takeover::Unknown, Takeover::Rerun]);
    }
}
