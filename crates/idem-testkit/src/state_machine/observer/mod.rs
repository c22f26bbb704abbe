//! Checks the laws without the model, from what was asked, answered and then stored.

use std::collections::HashMap;
use std::time::Duration;

use idem_core::{
    AcquireOutcome, Failure, OnMismatch, OwnerOutcome, OwnerToken, Record, RecordId, Settlement, State, Timestamp,
};

use crate::model::{Answer, Operation};

/// One verb on one record, and the record after it.
pub(super) struct Sight<'a> {
    pub(super) id: RecordId,
    pub(super) now: Timestamp,
    pub(super) operation: &'a Operation,
    pub(super) answer: &'a Answer,
    pub(super) after: Option<&'a Record>,
}

/// An observer, with what it saw last of each record.
#[derive(Debug, Clone)]
pub(super) struct Observer {
    precision: Duration,
    records: HashMap<RecordId, Record>,
}

type Verdict = Result<(), String>;

impl Observer {
    pub(super) fn new(precision: Duration) -> Self {
        Self { precision, records: HashMap::new() }
    }

    /// Judges one step by the laws.
    pub(super) fn see(&mut self, sight: &Sight<'_>) -> Verdict {
        let before = self.standing(&sight.id, sight.now).cloned();
        let before = before.as_ref();
        self.times_are_the_stores(sight)?;
        settled_stays_settled(sight, before)?;
        match (sight.operation, sight.answer) {
            (Operation::Acquire(request), Answer::Acquire(outcome)) => {
                fingerprints_are_kept_apart(request, outcome, sight, before)?;
                self.leases_do_not_overlap(outcome, sight, before)?;
                attempts_grow(outcome, sight, before)?;
            }
            (Operation::Renew(lease, _) | Operation::Checkpoint(lease, _), Answer::Owner(outcome)) => {
                let reachable = before.is_some_and(|before| lease_until(before).is_some());
                stale_owners_change_nothing(lease.owner, *outcome, reachable, sight, before)?;
            }
            (Operation::Settle(_, Settlement::Released, _), Answer::Owner(_)) if belongs_to_nobody(before) => {
                law("L3", sight.after == before, || format!("a repeated release changed {before:?}"))?;
            }
            (Operation::Settle(lease, ..), Answer::Owner(outcome)) => {
                stale_owners_change_nothing(lease.owner, *outcome, true, sight, before)?;
            }
            (Operation::Peek(_), Answer::Peek(record)) => {
                law("L8", record.as_ref() == before, || format!("peek showed {record:?} after {before:?}"))?;
            }
            (operation, answer) => return Err(format!("{answer:?} is no answer to {operation:?}")),
        }
        match sight.after {
            Some(record) => self.records.insert(sight.id, record.clone()),
            None => self.records.remove(&sight.id),
        };
        Ok(())
    }

    /// Law L6, and L10 for purged records: at the end every record is as its own last verb left it.
    pub(super) fn finish(&self, id: RecordId, now: Timestamp, record: Option<&Record>) -> Verdict {
        let last = self.standing(&id, now);
        law("L6 or L10", record == last, || format!("at the end there is {record:?}, last seen as {last:?}"))
    }

    /// The record as it was last seen, if it has not expired.
    fn standing(&self, id: &RecordId, now: Timestamp) -> Option<&Record> {
        self.records.get(id).filter(|record| now < record.expires_at)
    }

    fn times_are_the_stores(&self, sight: &Sight<'_>) -> Verdict {
        let Some(record) = sight.after else { return Ok(()) };
        let latest = sight.now.saturating_add(self.precision);
        let ordered = record.created_at <= record.updated_at && record.updated_at <= latest;
        law("L9", ordered, || format!("at {} the record has the times {record:?}", sight.now))?;
        let outlived = lease_until(record).is_none_or(|until| until <= record.expires_at);
        law("L10", outlived, || format!("the record ends before its lease: {record:?}"))
    }

    /// Laws L1 and L5: no caller gets a record whose lease is live, and no caller waits for one whose lease is over.
    fn leases_do_not_overlap(&self, outcome: &AcquireOutcome, sight: &Sight<'_>, before: Option<&Record>) -> Verdict {
        let Some((before, until)) = before.and_then(|before| Some((before, lease_until(before)?))) else {
            return Ok(());
        };
        match outcome {
            AcquireOutcome::Acquired(lease) if lease.owner != before.owner => {
                let over = until <= sight.now.saturating_add(self.precision);
                law("L1", over, || format!("{lease:?} while another lease lasts until {until}"))
            }
            AcquireOutcome::InProgress { .. } | AcquireOutcome::Backoff { .. } => {
                law("L5", sight.now < until, || format!("{outcome:?} although the lease was over at {until}"))
            }
            _ => Ok(()),
        }
    }
}

fn law(name: &str, holds: bool, detail: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(format!("law {name} is broken: {}", detail())) }
}

/// Whether the record was released, and kept because of an earlier run.
fn belongs_to_nobody(record: Option<&Record>) -> bool {
    record.is_some_and(|record| record.owner == OwnerToken::NOBODY)
}

fn lease_until(record: &Record) -> Option<Timestamp> {
    match record.state {
        State::InProgress { lease_until, .. } => Some(lease_until),
        State::Completed { .. } | State::Failed { .. } => None,
    }
}

/// Law L2.
fn settled_stays_settled(sight: &Sight<'_>, before: Option<&Record>) -> Verdict {
    let Some(before) = before else { return Ok(()) };
    let response = match &before.state {
        State::Completed { response } => response,
        State::Failed { failure: Failure::Terminal | Failure::OutcomeUnknown, response } => response,
        State::InProgress { .. } | State::Failed { failure: Failure::Retryable { .. }, .. } => return Ok(()),
    };
    law("L2", sight.after == Some(before), || format!("{before:?} became {:?}", sight.after))?;
    let Answer::Acquire(AcquireOutcome::Replay(replay)) = sight.answer else { return Ok(()) };
    law("L2", replay.response == *response, || format!("{replay:?} of {response:?}"))
}

/// Law L3. If `reachable` is false, even the owner can change nothing.
fn stale_owners_change_nothing(
    owner: OwnerToken,
    outcome: OwnerOutcome,
    reachable: bool,
    sight: &Sight<'_>,
    before: Option<&Record>,
) -> Verdict {
    let stale = !reachable || before.is_some_and(|before| before.owner != owner);
    let refused = outcome == OwnerOutcome::LeaseLost;
    law("L3", refused || !stale, || format!("{owner:?} was let change {before:?}"))?;
    law("L3", !refused || sight.after == before, || format!("refused, yet {before:?} became {:?}", sight.after))
}

/// Law L4.
fn fingerprints_are_kept_apart(
    request: &idem_core::Acquire,
    outcome: &AcquireOutcome,
    sight: &Sight<'_>,
    before: Option<&Record>,
) -> Verdict {
    let Some(before) = before.filter(|before| before.fingerprint != request.fingerprint) else { return Ok(()) };
    law("L4", sight.after == Some(before), || format!("a mismatch changed {before:?} to {:?}", sight.after))?;
    let answered = match outcome {
        AcquireOutcome::Mismatch { .. } => true,
        AcquireOutcome::Replay(_) => request.on_mismatch == OnMismatch::ReplayOriginal,
        AcquireOutcome::Acquired(_) | AcquireOutcome::InProgress { .. } | AcquireOutcome::Backoff { .. } => false,
    };
    law("L4", answered, || format!("another request got {outcome:?}"))
}

/// Law L7, and L8 for an owner that acquires again.
fn attempts_grow(outcome: &AcquireOutcome, sight: &Sight<'_>, before: Option<&Record>) -> Verdict {
    let AcquireOutcome::Acquired(lease) = outcome else { return Ok(()) };
    let running = |before: &&Record| before.owner == lease.owner && lease_until(before).is_some();
    if before.as_ref().is_some_and(running) {
        law("L8", sight.after == before, || format!("repeated, it changed {before:?} to {:?}", sight.after))?;
    }
    let grown = match before {
        None => lease.attempt == 1,
        Some(before) if running(&before) => lease.attempt == before.attempt,
        Some(before) => lease.attempt > before.attempt,
    };
    law("L7", grown, || format!("{lease:?} after {before:?}"))
}

#[cfg(test)]
mod tests;
