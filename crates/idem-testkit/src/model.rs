//! A second state machine to compare stores with, written from the machine's table and not from its code.
//!
//! The memory store *is* the machine of `idem-core`, so the machine cannot be its own oracle. This model shares only the
//! types of the port with it. Records are flat rows with optional columns, and decisions are a list of ifs.

use std::collections::HashMap;
use std::time::Duration;

use idem_core::{
    Acquire, AcquireOutcome, Acquisition, Checkpoint, Failure, Fingerprint, Lease, OnMismatch, OwnerOutcome,
    OwnerToken, Record, RecordId, Replay, ReplayKind, Settlement, State, StoredResponse, Takeover, Term, Timestamp,
};

/// Header fields of different names may change places.
fn is_the_same_to_clients(one: &StoredResponse, other: &StoredResponse) -> bool {
    let values = |response: &StoredResponse| {
        let mut values = HashMap::<_, Vec<_>>::new();
        for field in response.headers.iter() {
            values.entry(field.name.clone()).or_default().push(field.value.clone());
        }
        values
    };
    one.status == other.status && one.body == other.body && values(one) == values(other)
}

/// A verb of the port with its arguments.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Operation {
    /// `acquire`.
    Acquire(Acquire),
    /// `renew`.
    Renew(Lease, Term),
    /// `checkpoint`.
    Checkpoint(Lease, Checkpoint),
    /// `settle`.
    Settle(Lease, Settlement, Duration),
    /// `peek`.
    Peek(RecordId),
}

/// The answer of a verb.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Answer {
    /// To `acquire`.
    Acquire(AcquireOutcome),
    /// To `renew`, `checkpoint` and `settle`.
    Owner(OwnerOutcome),
    /// To `peek`.
    Peek(Option<Record>),
}

/// The naive model: what a store must answer.
#[derive(Debug, Clone, Default)]
pub struct Model {
    rows: HashMap<RecordId, Row>,
}

#[derive(Debug, Clone)]
struct Row {
    fingerprint: Fingerprint,
    owner: OwnerToken,
    attempt: u32,
    note: Option<Checkpoint>,
    born: i64,
    changed: i64,
    gone: i64,
    /// Set while an owner runs it.
    lease_end: Option<i64>,
    how: Acquisition,
    after_crash: Takeover,
    /// Set once it was settled.
    ending: Option<Ending>,
    answer: Option<StoredResponse>,
    /// Set when the ending is `Later`.
    again_at: i64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Ending {
    Well,
    Badly,
    Later,
    Unknown,
}

impl Model {
    /// What a store must answer to `operation` at `now`. The model then holds what the store must hold.
    pub fn apply(&mut self, operation: &Operation, now: Timestamp) -> Answer {
        let now = now.unix_micros();
        match operation {
            Operation::Acquire(request) => {
                self.forget(&request.id, now);
                Answer::Acquire(self.acquire(request, now))
            }
            Operation::Renew(lease, term) => self.owners(lease, now, |row| {
                row.lease_end = Some(plus(now, term.lease));
                row.gone = plus(plus(now, term.lease), term.retention);
                row.changed = now;
            }),
            Operation::Checkpoint(lease, checkpoint) => {
                let known = self.rows.get(&lease.id).and_then(|row| row.note.clone());
                match known {
                    // The same note again.
                    Some(known) if known == *checkpoint => self.owners(lease, now, |_| {}),
                    // An earlier note stays out, however late it arrives.
                    Some(known) if known.sequence >= checkpoint.sequence => {
                        self.forget(&lease.id, now);
                        Answer::Owner(OwnerOutcome::LeaseLost)
                    }
                    _ => self.owners(lease, now, |row| {
                        row.note = Some(checkpoint.clone());
                        row.changed = now;
                    }),
                }
            }
            Operation::Settle(lease, settlement, retention) => self.settle(lease, settlement, *retention, now),
            Operation::Peek(id) => {
                self.forget(id, now);
                Answer::Peek(self.rows.get(id).map(Row::to_record))
            }
        }
    }

    /// Removes a row whose time is over.
    fn forget(&mut self, id: &RecordId, now: i64) {
        if self.rows.get(id).is_some_and(|row| row.gone <= now) {
            self.rows.remove(id);
        }
    }

    fn acquire(&mut self, request: &Acquire, now: i64) -> AcquireOutcome {
        let Some(row) = self.rows.get_mut(&request.id) else {
            let row = Row::new(request, now);
            let lease = row.lease(request.id);
            self.rows.insert(request.id, row);
            return AcquireOutcome::Acquired(lease);
        };
        let over_for_good = row.ending.is_some() && row.ending != Some(Ending::Later);
        if row.fingerprint != request.fingerprint {
            if over_for_good && request.on_mismatch == OnMismatch::ReplayOriginal {
                return row.replay();
            }
            return AcquireOutcome::Mismatch { stored_algorithm: row.fingerprint.algorithm() };
        }
        if over_for_good {
            return row.replay();
        }
        if let Some(lease_end) = row.lease_end {
            if row.owner == request.owner {
                return AcquireOutcome::Acquired(row.lease(request.id));
            }
            if lease_end > now && row.owner != OwnerToken::NOBODY {
                return AcquireOutcome::InProgress { lease_left: micros(lease_end - now), age: micros(now - row.born) };
            }
            // A retry that was released is still to be retried.
            if row.owner == OwnerToken::NOBODY && row.how == Acquisition::Retry && row.attempt < u32::MAX {
                return row.run_again(request, Acquisition::Retry, now);
            }
            let rerun = row.after_crash == Takeover::Rerun && request.takeover == Takeover::Rerun;
            if rerun && row.attempt < u32::MAX {
                return row.run_again(request, Acquisition::Takeover, now);
            }
            if request.takeover == Takeover::Probe && row.attempt < u32::MAX {
                return row.run_again(request, Acquisition::Probe, now);
            }
            row.answer = Some(StoredResponse::new(504, ""));
            return row.give_up(Ending::Unknown, request.term.retention, now);
        }
        if row.again_at > now {
            return AcquireOutcome::Backoff { retry_after: micros(row.again_at - now) };
        }
        if row.attempt < request.max_attempts.get() && row.attempt < u32::MAX {
            return row.run_again(request, Acquisition::Retry, now);
        }
        row.give_up(Ending::Badly, request.term.retention, now)
    }

    /// Changes the row if the caller owns it and runs it.
    fn owners(&mut self, lease: &Lease, now: i64, change: impl FnOnce(&mut Row)) -> Answer {
        self.forget(&lease.id, now);
        match self.rows.get_mut(&lease.id) {
            Some(row) if row.owner == lease.owner && row.ending.is_none() => {
                change(row);
                Answer::Owner(OwnerOutcome::Applied)
            }
            _ => Answer::Owner(OwnerOutcome::LeaseLost),
        }
    }

    fn settle(&mut self, lease: &Lease, settlement: &Settlement, retention: Duration, now: i64) -> Answer {
        self.forget(&lease.id, now);
        let unknown = StoredResponse::new(504, "");
        let (ending, answer, again_at) = match settlement {
            Settlement::OutcomeUnknown => (Ending::Unknown, &unknown, 0),
            Settlement::Completed(answer) => (Ending::Well, answer, 0),
            Settlement::FailedTerminal(answer) => (Ending::Badly, answer, 0),
            Settlement::FailedRetryable { response, retry_after } => (Ending::Later, response, plus(now, *retry_after)),
            Settlement::Released => return self.release(lease, now),
        };
        if let Some(row) = self.rows.get(&lease.id)
            && row.owner == lease.owner
            && row.ending == Some(ending)
            && row.answer.as_ref().is_some_and(|stored| is_the_same_to_clients(stored, answer))
        {
            return Answer::Owner(OwnerOutcome::Applied);
        }
        self.owners(lease, now, |row| {
            row.lease_end = None;
            row.ending = Some(ending);
            row.answer = Some(answer.clone());
            row.again_at = again_at;
            row.gone = plus(now.max(again_at), retention);
            row.changed = now;
            if ending == Ending::Well {
                row.note = None;
            }
        })
    }

    fn release(&mut self, lease: &Lease, now: i64) -> Answer {
        let Some(row) = self.rows.get(&lease.id) else {
            return Answer::Owner(OwnerOutcome::Applied);
        };
        if row.owner == OwnerToken::NOBODY {
            return Answer::Owner(OwnerOutcome::Applied);
        }
        if row.owner != lease.owner || row.ending.is_some() {
            return Answer::Owner(OwnerOutcome::LeaseLost);
        }
        let reran = row.after_crash == Takeover::Rerun && (row.attempt > 1 || row.note.is_some());
        let again = matches!(row.how, Acquisition::Probe | Acquisition::Retry);
        if reran || row.after_crash != Takeover::Rerun && again {
            return self.owners(lease, now, |row| {
                row.owner = OwnerToken::NOBODY;
                row.changed = now;
                if row.lease_end.is_some_and(|end| end > now) {
                    row.lease_end = Some(now);
                }
            });
        }
        self.rows.remove(&lease.id);
        Answer::Owner(OwnerOutcome::Applied)
    }
}

impl Row {
    fn new(request: &Acquire, now: i64) -> Self {
        let lease_end = plus(now, request.term.lease);
        Self {
            fingerprint: request.fingerprint,
            owner: request.owner,
            attempt: 1,
            note: None,
            born: now,
            changed: now,
            gone: plus(lease_end, request.term.retention),
            lease_end: Some(lease_end),
            how: Acquisition::Fresh,
            after_crash: request.takeover,
            ending: None,
            answer: None,
            again_at: 0,
        }
    }

    fn lease(&self, id: RecordId) -> Lease {
        Lease {
            id,
            fingerprint: self.fingerprint,
            owner: self.owner,
            attempt: self.attempt,
            acquisition: self.how,
            checkpoint: self.note.clone(),
        }
    }

    fn run_again(&mut self, request: &Acquire, how: Acquisition, now: i64) -> AcquireOutcome {
        let (attempt, note, born) = (self.attempt + 1, self.note.take(), self.born);
        *self = Self { attempt, note, born, how, ..Self::new(request, now) };
        AcquireOutcome::Acquired(self.lease(request.id))
    }

    fn give_up(&mut self, ending: Ending, retention: Duration, now: i64) -> AcquireOutcome {
        self.lease_end = None;
        self.ending = Some(ending);
        self.changed = now;
        self.gone = plus(now, retention);
        self.replay()
    }

    fn response(&self) -> StoredResponse {
        self.answer.clone().expect("a row with an ending has an answer")
    }

    fn replay(&self) -> AcquireOutcome {
        let kind = match self.ending {
            Some(Ending::Well) => ReplayKind::Completed,
            Some(Ending::Unknown) => ReplayKind::OutcomeUnknown,
            _ => ReplayKind::Failed,
        };
        let settled_at = Timestamp::from_unix_micros(self.changed);
        AcquireOutcome::Replay(Replay { response: self.response(), kind, attempt: self.attempt, settled_at })
    }

    fn to_record(&self) -> Record {
        let at = Timestamp::from_unix_micros;
        let failed = |failure| State::Failed { failure, response: self.response() };
        let state = match self.ending {
            None => State::InProgress {
                lease_until: at(self.lease_end.expect("a row without an ending has a lease")),
                acquisition: self.how,
                takeover: self.after_crash,
            },
            Some(Ending::Well) => State::Completed { response: self.response() },
            Some(Ending::Badly) => failed(Failure::Terminal),
            Some(Ending::Unknown) => failed(Failure::OutcomeUnknown),
            Some(Ending::Later) => failed(Failure::Retryable { not_before: at(self.again_at) }),
        };
        Record {
            fingerprint: self.fingerprint,
            owner: self.owner,
            attempt: self.attempt,
            checkpoint: self.note.clone(),
            created_at: at(self.born),
            updated_at: at(self.changed),
            expires_at: at(self.gone),
            state,
        }
    }
}

fn plus(time: i64, duration: Duration) -> i64 {
    let sum = i128::from(time) + i128::try_from(duration.as_micros()).unwrap_or(i128::MAX / 2);
    i64::try_from(sum).unwrap_or(i64::MAX)
}

fn micros(count: i64) -> Duration {
    Duration::from_micros(count.unsigned_abs())
}
