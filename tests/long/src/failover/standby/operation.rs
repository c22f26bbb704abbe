//! The acknowledgements for one operation, and what the new primary holds of it.

use idem_core::{Lease, OwnerToken, Record, RecordId, State, StoredResponse};
use tokio::time::Instant;

use super::wal::Cut;
use crate::failover::request::response;

/// The contract of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Contract {
    AtMostOnce,
    Transactional,
}

/// An acknowledgement, which was decided at some time between request and answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fact {
    pub(super) asked: Instant,
    pub(super) told: Instant,
}

/// What a fact acknowledges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum What {
    Lease,
    Settlement,
    Commit,
}

/// What the new primary holds of an operation.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Found {
    Nothing,
    /// It runs, for the acknowledged owner (`ours`) or for another one.
    Running {
        ours: bool,
    },
    /// It is settled with its owner's answer.
    Settled,
    /// Its answer is one that no owner gave.
    OtherAnswer,
}

/// One operation. Leases outlast the check and are never released, and only the owner settles.
#[derive(Debug, Clone)]
pub(super) struct Operation {
    pub(super) id: RecordId,
    pub(super) contract: Contract,
    /// The owner; under Transactional, that of the last try.
    pub(super) owner: OwnerToken,
    pub(super) lease: Option<Lease>,
    pub(super) leased: Option<Fact>,
    /// Its settlement, or its COMMIT.
    pub(super) settled: Option<Fact>,
    /// Another client was allowed to run it, although it has an owner or is settled.
    pub(super) has_second_owner: bool,
    /// A client got another answer than the owner's.
    pub(super) has_other_answer: bool,
}

impl Operation {
    pub(super) fn new(id: RecordId, contract: Contract) -> Self {
        let owner = OwnerToken::random();
        let (lease, leased, settled) = (None, None, None);
        Self { id, contract, owner, lease, leased, settled, has_second_owner: false, has_other_answer: false }
    }

    /// The response with which its owner settles it, unique to this owner.
    pub(super) fn answer(&self) -> StoredResponse {
        response(&self.id, Some(self.owner))
    }

    /// Whether any fact must last.
    pub(super) fn is_acknowledged(&self) -> bool {
        self.leased.is_some() || self.settled.is_some()
    }

    /// Classifies the record of the operation.
    pub(super) fn found(&self, record: Option<&Record>) -> Found {
        match record.map(|record| (&record.state, record.owner == self.owner)) {
            None => Found::Nothing,
            Some((State::InProgress { .. }, ours)) => Found::Running { ours },
            Some((State::Completed { response }, _)) if *response == self.answer() => Found::Settled,
            Some(_) => Found::OtherAnswer,
        }
    }

    /// Its facts, each with whether it has lasted.
    pub(super) fn facts<'a>(&'a self, found: &'a Found) -> impl Iterator<Item = (What, Fact, bool)> + 'a {
        let leased = matches!(found, Found::Running { ours: true } | Found::Settled | Found::OtherAnswer);
        let settled = matches!(found, Found::Settled | Found::OtherAnswer);
        let settlement = match self.contract {
            Contract::AtMostOnce => What::Settlement,
            Contract::Transactional => What::Commit,
        };
        let leased = self.leased.map(|fact| (What::Lease, fact, leased));
        leased.into_iter().chain(self.settled.map(|fact| (settlement, fact, settled)))
    }
}

/// Whether the fate of a fact agrees with the position of the cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    AsItMust,
    /// It is lost, but was answered before replication stopped.
    LostTooEarly,
    /// It has lasted, although it was never replicated.
    KeptTooLate,
}

impl Cut {
    pub(super) fn judge(&self, fact: Fact, has_lasted: bool) -> Verdict {
        let arrived = self.arrived_until.is_some_and(|until| fact.told <= until);
        let came_too_late = self.is_alone(fact);
        match has_lasted {
            false if arrived => Verdict::LostTooEarly,
            true if came_too_late => Verdict::KeptTooLate,
            _ => Verdict::AsItMust,
        }
    }

    /// Whether a fact falls into the time when the old primary still answered but did not replicate any more.
    pub(super) fn is_alone(&self, fact: Fact) -> bool {
        fact.told < self.failed_at && self.lost_from.is_some_and(|from| fact.asked >= from)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::failover::standby::wal::Sample;

    fn sample(base: Instant, millis: u64, position: i64) -> Sample {
        let asked = base + Duration::from_millis(millis);
        let told = asked + Duration::from_millis(1);
        Sample { asked, told, flushed: position, inserted: position, waiting: 0 }
    }

    #[test]
    fn what_is_lost_has_to_be_the_end_of_what_was_told() {
        let base = Instant::now();
        let samples = [(0, 100), (10, 200), (20, 300), (30, 400)];
        let samples = samples.map(|(millis, position)| sample(base, millis, position));
        let at = |millis| base + Duration::from_millis(millis);
        let cut = Cut::new(&samples, 250, at(50));
        let fact = |asked, told| Fact { asked: at(asked), told: at(told) };
        for (fact, has_lasted, verdict) in [
            (fact(2, 9), true, Verdict::AsItMust),
            (fact(2, 9), false, Verdict::LostTooEarly),
            // Between the two samples either is possible.
            (fact(9, 15), true, Verdict::AsItMust),
            (fact(9, 15), false, Verdict::AsItMust),
            (fact(22, 25), false, Verdict::AsItMust),
            (fact(22, 25), true, Verdict::KeptTooLate),
            // The answer may come from the new primary.
            (fact(22, 60), true, Verdict::AsItMust),
        ] {
            assert_eq!(cut.judge(fact, has_lasted), verdict, "{fact:?} {has_lasted}");
        }
    }

    #[test]
    fn a_settlement_can_be_lost_without_its_lease_and_no_lease_without_its_settlement() {
        let now = Instant::now();
        let mut operation = Operation::new(crate::failover::request::fresh_id(1), Contract::AtMostOnce);
        let fact = Fact { asked: now, told: now };
        (operation.leased, operation.settled) = (Some(fact), Some(fact));
        for (found, lasted) in [
            (Found::Nothing, [false, false]),
            (Found::Running { ours: false }, [false, false]),
            (Found::Running { ours: true }, [true, false]),
            (Found::Settled, [true, true]),
        ] {
            let facts: Vec<bool> = operation.facts(&found).map(|(_, _, lasted)| lasted).collect();
            assert_eq!(facts, lasted, "{found:?}");
        }
    }
}
