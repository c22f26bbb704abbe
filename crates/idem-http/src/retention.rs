//! What an answer states about the retention of its record.

use std::time::Duration;

use idem_core::engine::{Contract, Disposition};

/// The header that states the retention: `Idempotency-Retention`, in whole seconds. Adapters put it into the handler's own
/// answer.
///
/// | answer | header |
/// |---|---|
/// | the handler's own, whose record is kept: settled, or failed and run again later | the retention of this record, from its settlement on |
/// | the handler's own, without a record: released, rolled back, or run without protection | none |
/// | a replay, and a problem of the layer | none: they do not know with which retention the record is settled |
///
/// A client repeats an operation only as long as its record is certainly kept, which is for that long after its first request. A
/// repeat later than that may run again.
pub const RETENTION_HEADER: &str = "idempotency-retention";

/// States the retention of the records of one layer.
#[derive(Debug, Clone, Copy)]
pub struct StatedRetention {
    contract: Contract,
    usual: Duration,
}

impl StatedRetention {
    pub(crate) fn new(contract: Contract, usual: Duration) -> Self {
        Self { contract, usual }
    }

    /// The value of the header for a run that ended so, in whole seconds, rounded down. `None` if no record is kept.
    ///
    /// `is_protected` is [`Context::is_protected`](idem_core::engine::Context::is_protected). `retention` is that of the run's
    /// [`Conclusion`](idem_core::engine::Conclusion).
    #[must_use]
    pub fn seconds(self, is_protected: bool, disposition: &Disposition, retention: Option<Duration>) -> Option<u64> {
        let is_kept = match disposition {
            Disposition::Complete { .. } | Disposition::Fail { .. } | Disposition::Retry { .. } => true,
            Disposition::Fault { .. } => self.contract != Contract::Transactional,
            Disposition::Release { .. } => false,
        };
        (is_protected && is_kept).then(|| retention.unwrap_or(self.usual).as_secs())
    }
}

#[cfg(test)]
mod tests {
    use idem_core::{StoredResponse, Writes};

    use super::*;

    #[test]
    fn only_an_answer_whose_record_is_kept_states_a_retention() {
        let response = || StoredResponse::new(200, "");
        let seconds = |contract, is_protected, disposition| {
            StatedRetention::new(contract, Duration::from_millis(90_900)).seconds(is_protected, &disposition, None)
        };
        for contract in [Contract::Transactional, Contract::AtMostOnce, Contract::AtLeastOnce] {
            let faults_are_kept = contract != Contract::Transactional;
            for (disposition, is_kept) in [
                (Disposition::Complete { response: response(), writes: Writes::Keep }, true),
                (Disposition::Fail { response: response() }, true),
                (Disposition::Retry { response: response(), after: None }, true),
                (Disposition::Fault { response: response() }, faults_are_kept),
                (Disposition::Release { writes: Writes::Keep }, false),
            ] {
                assert_eq!(
                    seconds(contract, true, disposition.clone()),
                    is_kept.then_some(90),
                    "{contract:?} {disposition:?}"
                );
                assert_eq!(seconds(contract, false, disposition), None, "without protection");
            }
        }
        let stated = StatedRetention::new(Contract::AtMostOnce, Duration::from_secs(90));
        let disposition = Disposition::Complete { response: response(), writes: Writes::Keep };
        assert_eq!(stated.seconds(true, &disposition, Some(Duration::from_secs(5))), Some(5), "the answer's own");
    }
}
