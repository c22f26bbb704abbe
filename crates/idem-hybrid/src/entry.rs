//! The entries of the fast store: a lock, or a copy of a settled record.

use std::time::Duration;

use bytes::Bytes;
use hmac::{Hmac, KeyInit, Mac};
use idem_core::codec::FlatRecord;
use idem_core::{
    Acquire, AcquireOutcome, FastEntry, Lease, LiveRecord, OwnerToken, Record, RecordId, ReplayKind, State, Takeover,
    Timestamp, machine,
};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

/// The first bytes of every entry: a name, and the number of its form. Another form needs another number here. The
/// [tag](authenticator) follows, then the content.
const MAGIC: &[u8] = b"idem\x01";
const TAG: usize = 32;

/// A record, and the period in which it is valid, by the fast store's clock.
///
/// If that clock is set back to before the period, the entry is not valid. A lock is a record in progress, with times of
/// the fast store. A settled record is a copy from the durable store, and keeps that store's times.
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
            // No owner takes over from a lock.
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

    /// A copy of a record, if its settlement is final. An unknown outcome is not: an operator may resolve it. `seen_at` is a time of the fast store from before the record was read.
    pub(crate) fn settled(look: LiveRecord, seen_at: Timestamp) -> Option<Self> {
        let until = seen_at.saturating_add(look.remaining);
        let replay = look.record.replay().filter(|replay| replay.kind != ReplayKind::OutcomeUnknown);
        replay.map(|_| Self { since: seen_at, until, record: look.record })
    }

    /// Extends the lock, unless it is over: its key may belong to another request by then.
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

    pub(crate) fn is_erased(&self) -> bool {
        self.record.is_erased()
    }

    /// Whether it is the lock of this owner and not over.
    pub(crate) fn holds_for(&self, owner: &OwnerToken, now: Timestamp) -> bool {
        self.is_lock() && self.record.owner == *owner && self.holds(now)
    }

    fn holds(&self, now: Timestamp) -> bool {
        self.since <= now && now < self.until
    }

    /// Answers a request if the entry suffices: another run is in progress, or the record is settled.
    ///
    /// `None` leaves the decision to the durable store. That includes a mismatch with a lock, as it would end the client's
    /// repeats although the run may have been rolled back. It also includes a run whose lease ends before its lock.
    pub(crate) fn answer(&self, request: &Acquire, now: Timestamp) -> Option<AcquireOutcome> {
        if !self.holds(now) {
            return None;
        }
        let decided_at = if self.is_lock() { now } else { self.record.updated_at };
        let (_, outcome) = machine::acquire(Some(&self.record), request, decided_at);
        match outcome {
            AcquireOutcome::InProgress { .. } => Some(outcome),
            // An operator may have resolved it since. An earlier version of this crate kept such entries.
            AcquireOutcome::Replay(replay) if replay.kind == ReplayKind::OutcomeUnknown => None,
            AcquireOutcome::Replay(_) | AcquireOutcome::Mismatch { .. } if !self.is_lock() => Some(outcome),
            _ => None,
        }
    }

    /// Encodes and authenticates the entry for the fast store.
    pub(crate) fn encode(&self, store: &[u8; 16], id: &RecordId) -> Option<FastEntry> {
        let flat = FlatRecord::from(&self.record);
        let form = postcard::to_allocvec(&Form::of(&flat, self)).ok()?;
        let tag = authenticator(store, id, &form)?.finalize().into_bytes();
        let mut bytes = Vec::with_capacity(MAGIC.len() + tag.len() + form.len());
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&tag);
        bytes.extend_from_slice(&form);
        let rank = match self.is_lock() {
            true => lock_rank(self.record.attempt),
            false if self.record.is_erased() => ERASED,
            false => SETTLED,
        };
        Some(FastEntry { rank, bytes: bytes.into(), until: self.until })
    }

    /// Decodes an entry that was made for this record of this store; `None` for any other bytes.
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
///
/// The fast store may compare ranks as floating point numbers, so they lie far apart.
const SETTLED: u64 = 1 << 62;

/// The tombstone of an erasure that the durable store has not confirmed. It replaces every copy, and can be taken back.
pub(crate) const ERASING: u64 = 1 << 63;

/// A tombstone replaces every copy, and no copy that was read before the erasure replaces it.
const ERASED: u64 = u64::MAX;

/// A later run's lock replaces an earlier one's.
pub(crate) fn lock_rank(attempt: u32) -> u64 {
    u64::from(attempt)
}

/// The HMAC-SHA-256 of an entry: of the number of its form, the id of its record, and its content with its times.
///
/// The key is the durable store's [identity](idem_core::DurableStore::identity), which the fast store never sees. A client
/// of the fast store can remove an entry, or put back an earlier one of the same record, but cannot forge one.
///
/// The HMAC does not cover the rank and the end that the fast store knows. They only decide which entry it keeps.
fn authenticator(store: &[u8; 16], id: &RecordId, form: &[u8]) -> Option<Hmac<Sha256>> {
    // An HMAC key may have any length.
    let mut authenticator = Hmac::<Sha256>::new_from_slice(store).ok()?;
    // The only part whose length varies comes last.
    authenticator.update(MAGIC);
    authenticator.update(id.as_bytes());
    authenticator.update(form);
    Some(authenticator)
}

/// The serialized form of an entry. It lacks the checkpoint, which no replay needs, and the time of a next attempt: a record that may
/// run again is never an entry.
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

    /// `bytes` are those that it was read from. The body is a slice of them, not a copy.
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
