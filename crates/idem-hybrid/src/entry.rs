//! What is put into the fast store: a lock, or a copy of a settled record.

use std::time::Duration;

use bytes::Bytes;
use hmac::{Hmac, KeyInit, Mac};
use idem_core::codec::FlatRecord;
use idem_core::{
    Acquire, AcquireOutcome, FastEntry, Lease, LiveRecord, OwnerToken, Record, RecordId, State, Takeover, Timestamp,
    machine,
};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

/// What every entry begins with: who wrote it, and in which form; another form is another number here. Then comes the
/// [tag](authenticator), then what it says.
const MAGIC: &[u8] = b"idem\x01";
const TAG: usize = 32;

/// A record, and from when until when it may be believed, by the fast store's clock: one that was set back since is not.
///
/// A lock is a record in progress whose times are those of the fast store. A settled one is a copy of what the durable
/// store had, whose times it keeps.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    since: Timestamp,
    until: Timestamp,
    record: Record,
}

impl Entry {
    /// The lock of a run. `seen_at` is a time of the fast store from before the durable one was asked, so that the lock ends
    /// no later than the lease.
    pub(crate) fn lock(request: &Acquire, lease: &Lease, seen_at: Timestamp, life: Duration) -> Self {
        let until = seen_at.saturating_add(life);
        let running = State::InProgress {
            lease_until: until,
            acquisition: lease.acquisition,
            // Nobody takes over from a lock.
            takeover: Takeover::Unknown,
        };
        let record = Record {
            fingerprint: request.fingerprint,
            owner: lease.owner,
            attempt: lease.attempt,
            checkpoint: None,
            created_at: seen_at,
            updated_at: seen_at,
            expires_at: until,
            state: running,
        };
        Self { since: seen_at, until, record }
    }

    /// A copy of a record, if it is settled for good. `seen_at` is a time of the fast store from before the look.
    pub(crate) fn settled(look: LiveRecord, seen_at: Timestamp) -> Option<Self> {
        let until = seen_at.saturating_add(look.remaining);
        look.record.replay().map(|_| Self { since: seen_at, until, record: look.record })
    }

    /// The same lock for longer, unless it is over: its key may belong to another request by then.
    pub(crate) fn renewed(self, lease: &Lease, seen_at: Timestamp, life: Duration) -> Option<Self> {
        if !self.holds_for(&lease.owner, seen_at) {
            return None;
        }
        let until = seen_at.saturating_add(life);
        let Self { record, .. } = self;
        let State::InProgress { acquisition, takeover, .. } = record.state else { return None };
        let state = State::InProgress { lease_until: until, acquisition, takeover };
        let record = Record { expires_at: until, state, ..record };
        (record.attempt == lease.attempt).then_some(Self { since: seen_at, until, record })
    }

    pub(crate) fn is_lock(&self) -> bool {
        matches!(self.record.state, State::InProgress { .. })
    }

    /// Whether it is the lock of this owner and not over.
    pub(crate) fn holds_for(&self, owner: &OwnerToken, now: Timestamp) -> bool {
        self.is_lock() && self.record.owner == *owner && self.holds(now)
    }

    fn holds(&self, now: Timestamp) -> bool {
        self.since <= now && now < self.until
    }

    /// What the state machine answers, as far as this is enough to go by: somebody else runs it, or it is settled.
    /// Everything else is for the durable store to say. So is a mismatch with a lock, since it ends a client's repeats: the
    /// run may have been rolled back. And so is what became of a run whose lease is over before its lock.
    pub(crate) fn answer(&self, request: &Acquire, now: Timestamp) -> Option<AcquireOutcome> {
        if !self.holds(now) {
            return None;
        }
        let decided_at = if self.is_lock() { now } else { self.record.updated_at };
        let (_, outcome) = machine::acquire(Some(&self.record), request, decided_at);
        match outcome {
            AcquireOutcome::InProgress { .. } => Some(outcome),
            AcquireOutcome::Replay(_) | AcquireOutcome::Mismatch { .. } if !self.is_lock() => Some(outcome),
            _ => None,
        }
    }

    /// As the fast store takes it.
    pub(crate) fn encode(&self, store: &[u8; 16], id: &RecordId) -> Option<FastEntry> {
        let flat = FlatRecord::from(&self.record);
        let form = postcard::to_allocvec(&Form::of(&flat, self)).ok()?;
        let tag = authenticator(store, id, &form)?.finalize().into_bytes();
        let mut bytes = Vec::with_capacity(MAGIC.len() + tag.len() + form.len());
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&tag);
        bytes.extend_from_slice(&form);
        let rank = if self.is_lock() { lock_rank(self.record.attempt) } else { SETTLED };
        Some(FastEntry { rank, bytes: bytes.into(), until: self.until })
    }

    /// As it was put there for this record of this store; `None` for everything else.
    pub(crate) fn decode(store: &[u8; 16], id: &RecordId, bytes: &Bytes) -> Option<Self> {
        let (tag, form) = bytes.strip_prefix(MAGIC)?.split_at_checked(TAG)?;
        // In constant time.
        authenticator(store, id, form)?.verify_slice(tag).ok()?;
        let (form, rest) = postcard::take_from_bytes::<Form<'_>>(form).ok()?;
        if !rest.is_empty() {
            return None;
        }
        let [since, until] = [form.since, form.until].map(Timestamp::from_unix_micros);
        let record = Record::try_from(form.into_flat(bytes)).ok()?;
        Some(Self { since, until, record })
    }
}

/// Everything replaces a claim.
pub(crate) const CLAIM_RANK: u64 = 0;

/// A settled record replaces every lock, and no lock replaces it.
const SETTLED: u64 = u64::MAX;

/// A later run's lock replaces an earlier one's.
pub(crate) fn lock_rank(attempt: u32) -> u64 {
    u64::from(attempt)
}

/// HMAC-SHA-256 over everything that is believed of an entry: its form, the record that it is of, and what it says, its times
/// included. The key is the durable store's [identity](idem_core::DurableStore::identity), which the fast store never sees: a
/// client of the fast store can remove an entry, or put an earlier one of the same record back, and can make none.
///
/// Rank and end, as the fast store knows them, are not covered. By them it chooses what to keep, and nothing is believed.
fn authenticator(store: &[u8; 16], id: &RecordId, form: &[u8]) -> Option<Hmac<Sha256>> {
    // A key may have any length.
    let mut authenticator = Hmac::<Sha256>::new_from_slice(store).ok()?;
    // The only part whose length varies comes last.
    authenticator.update(MAGIC);
    authenticator.update(id.as_bytes());
    authenticator.update(form);
    Some(authenticator)
}

/// The form of an entry. A checkpoint and the time of a next attempt are not in it: whoever has one is in no entry.
#[derive(Serialize, Deserialize)]
struct Form<'a> {
    since: i64,
    until: i64,
    format: i64,
    fingerprint_algorithm: i64,
    #[serde(borrow)]
    fingerprint: &'a serde_bytes::Bytes,
    #[serde(borrow)]
    owner: &'a serde_bytes::Bytes,
    attempt: i64,
    state: i64,
    acquisition: Option<i64>,
    takeover: Option<i64>,
    lease_until: Option<i64>,
    status: Option<i64>,
    #[serde(borrow)]
    headers: Option<&'a serde_bytes::Bytes>,
    #[serde(borrow)]
    body: Option<&'a serde_bytes::Bytes>,
    created_at: i64,
    updated_at: i64,
    expires_at: i64,
}

impl<'a> Form<'a> {
    fn of(flat: &'a FlatRecord, entry: &Entry) -> Self {
        Self {
            since: entry.since.unix_micros(),
            until: entry.until.unix_micros(),
            format: flat.format,
            fingerprint_algorithm: flat.fingerprint_algorithm,
            fingerprint: serde_bytes::Bytes::new(&flat.fingerprint),
            owner: serde_bytes::Bytes::new(&flat.owner),
            attempt: flat.attempt,
            state: flat.state,
            acquisition: flat.acquisition,
            takeover: flat.takeover,
            lease_until: flat.lease_until,
            status: flat.status,
            headers: flat.headers.as_deref().map(serde_bytes::Bytes::new),
            body: flat.body.as_deref().map(serde_bytes::Bytes::new),
            created_at: flat.created_at,
            updated_at: flat.updated_at,
            expires_at: flat.expires_at,
        }
    }

    /// `bytes` are those that it was read from: the body stays where it is.
    fn into_flat(self, bytes: &Bytes) -> FlatRecord {
        FlatRecord {
            format: self.format,
            fingerprint_algorithm: self.fingerprint_algorithm,
            fingerprint: self.fingerprint.to_vec(),
            owner: self.owner.to_vec(),
            attempt: self.attempt,
            state: self.state,
            acquisition: self.acquisition,
            takeover: self.takeover,
            lease_until: self.lease_until,
            not_before: None,
            checkpoint_name: None,
            checkpoint_data: None,
            status: self.status,
            headers: self.headers.map(|headers| headers.to_vec()),
            body: self.body.map(|body| bytes.slice_ref(body)),
            created_at: self.created_at,
            updated_at: self.updated_at,
            expires_at: self.expires_at,
        }
    }
}

#[cfg(test)]
mod tests;
