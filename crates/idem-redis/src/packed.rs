//! The binary format of a record: one Redis string.
//!
//! The key expires with its record, by the server's clock. The string stores the last change as a duration before that end,
//! and the lease as a duration after that change. So a store can write a new record without knowing the server's time.
//!
//! Numbers are big-endian, times are microseconds:
//!
//! | bytes | what |
//! |---|---|
//! | 0–1 | the format: 1 |
//! | 2 | the state, as in [`codec::state`] |
//! | 3–18 | the owner token of its current or last run |
//! | 19–22 | the attempt: the number of that run |
//! | 23 | 1: a caller found it in progress, and may wait for its settlement |
//! | 24–31 | the time from its last change to its end |
//! | 32–39 | the time from its last change to the end of its lease (in progress) or to its next attempt (backoff); else 0 |
//! | 40–41 | the time from its end to the expiry of its key, which the server counts in milliseconds |
//! | 42–49 | when it was created, since 1970; 0: at its last change |
//! | 50–51, 52–83 | the fingerprint's algorithm and digest |
//! | 84, 85 | in progress: how it was acquired, what a crash means; else 0 |
//! | 86–87 | the status of the response; 0 while in progress |
//! | 88–91 | how often the record has been replaced in place, as long as it is in progress or may be retried |
//! | 92– | parts: a byte with the number, 4 bytes with the length, the part |
//!
//! Parts 1 and 2 are the checkpoint's name and data, 3 and 4 the response's header fields and body. They come in this order.
//! Later versions may add parts. This version skips those from 128 on, and drops them when it replaces the record. It
//! refuses the others.

use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes};
use idem_core::codec::{CodecError, FlatRecord, state};
use idem_core::{
    Acquisition, Algorithm, Checkpoint, Failure, Fingerprint, Lease, OwnerAction, Record, Settlement, State,
    StoreError, Takeover, Timestamp, machine,
};

use crate::error::damaged;

/// Where the parts begin.
const HEAD: usize = 92;

/// The length of what a run knows of its record: format, state, owner and attempt.
const OWNED: usize = 23;

/// Where the count of changes is.
const CHANGES: usize = 88;

/// The byte that says whether a caller may wait.
const AWAITED: usize = 23;

/// The range that a run does not know of its record: its creation time and the fingerprint.
const UNKNOWN: usize = 42;
const UNKNOWN_END: usize = 84;

/// The parts that this version knows.
mod part {
    pub(super) const CHECKPOINT_NAME: u8 = 1;
    pub(super) const CHECKPOINT_DATA: u8 = 2;
    pub(super) const HEADERS: u8 = 3;
    pub(super) const BODY: u8 = 4;
    /// Unknown parts from this number on are skipped.
    pub(super) const OPTIONAL: u8 = 128;
}

/// The longest time, some 70,000 years. Longer ones are clamped, so that sums do not overflow, in Lua either.
const LONGEST_MICROS: i64 = 1 << 61;

/// The tolerance for expiries: a server may count one from a time that it read a moment before.
const ROUNDING_MS: i64 = 2;

/// A new record, which needs no time from the server.
pub(crate) struct Fresh {
    pub(crate) bytes: Vec<u8>,
    /// The TTL of its key.
    pub(crate) life_ms: i64,
}

impl Fresh {
    /// Packs a new record, and computes the TTL of its key.
    ///
    /// The server counts a TTL in whole milliseconds. So the record's times count from up to a millisecond after the write,
    /// and none of them is too early.
    pub(crate) fn new(record: &Record) -> Self {
        let life = micros_from(record.updated_at, record.expires_at);
        let life_ms = in_ms(life) + 1;
        Self { bytes: pack(record, (life_ms - 1) * 1_000 - life, false, 0), life_ms }
    }
}

/// A record that replaces another.
pub(crate) struct Next {
    pub(crate) bytes: Vec<u8>,
    /// When its key expires.
    pub(crate) expires_ms: i64,
}

impl Next {
    /// Rounds the expiry up, so that the server does not drop the record too early. `offset` is how far a test moved the time.
    pub(crate) fn new(record: &Record, is_awaited: bool, changes: u32, offset: i64) -> Self {
        let life = micros_from(record.updated_at, record.expires_at);
        let ends = record.updated_at.unix_micros().saturating_sub(offset).saturating_add(life);
        let expires_ms = in_ms(ends);
        let slack = expires_ms.saturating_mul(1_000).saturating_sub(ends);
        Self { bytes: pack(record, slack, is_awaited, changes), expires_ms }
    }
}

/// Milliseconds, rounded up.
fn in_ms(micros: i64) -> i64 {
    micros / 1_000 + i64::from(micros % 1_000 > 0)
}

/// The time from its last change to the end of its lease, or to its next attempt; else 0.
fn hold(record: &Record) -> i64 {
    match record.state {
        State::InProgress { lease_until: till, .. }
        | State::Failed { failure: Failure::Retryable { not_before: till }, .. } => {
            micros_from(record.updated_at, till)
        }
        State::Completed { .. } | State::Failed { .. } => 0,
    }
}

fn micros_from(earlier: Timestamp, later: Timestamp) -> i64 {
    later.unix_micros().saturating_sub(earlier.unix_micros()).clamp(-LONGEST_MICROS, LONGEST_MICROS)
}

/// `slack` is how many microseconds after its end its key expires.
fn pack(record: &Record, slack: i64, is_awaited: bool, changes: u32) -> Vec<u8> {
    let flat = FlatRecord::from(record);
    let parts = [
        (part::CHECKPOINT_NAME, flat.checkpoint_name.as_deref().map(str::as_bytes)),
        (part::CHECKPOINT_DATA, flat.checkpoint_data.as_deref()),
        (part::HEADERS, flat.headers.as_deref()),
        (part::BODY, flat.body.as_deref()),
    ];
    let length = parts.iter().filter_map(|(_, part)| part.map(|part| 5 + part.len())).sum::<usize>();
    let mut bytes = Vec::with_capacity(HEAD + length);
    bytes.put_int(flat.format, 2);
    bytes.put_int(flat.state, 1);
    bytes.put_slice(&flat.owner);
    bytes.put_int(flat.attempt, 4);
    bytes.put_u8(is_awaited.into());
    bytes.put_i64(micros_from(record.updated_at, record.expires_at));
    bytes.put_i64(hold(record));
    bytes.put_int(slack, 2);
    let came_to_be = Some(record.created_at).filter(|created_at| *created_at != record.updated_at);
    bytes.put_i64(came_to_be.map_or(0, |created_at| created_at.unix_micros()));
    bytes.put_int(flat.fingerprint_algorithm, 2);
    bytes.put_slice(&flat.fingerprint);
    bytes.put_int(flat.acquisition.unwrap_or(0), 1);
    bytes.put_int(flat.takeover.unwrap_or(0), 1);
    bytes.put_int(flat.status.unwrap_or(0), 2);
    bytes.put_u32(changes);
    for (number, part) in parts {
        let Some(part) = part else { continue };
        bytes.put_u8(number);
        // 4 GiB are more than Redis stores under a key.
        bytes.put_u32(u32::try_from(part.len()).unwrap_or(u32::MAX));
        bytes.put_slice(part);
    }
    bytes
}

/// A settlement that does not depend on the record, so that a store can send it without reading the record first.
pub(crate) struct Ending {
    bytes: Vec<u8>,
    /// The first bytes of a record that is in progress and belongs to this run.
    owned: Vec<u8>,
    /// The TTL of its key.
    pub(crate) life_ms: i64,
}

impl Ending {
    /// `None` when the settlement depends on the record: it keeps the checkpoint, or removes the record.
    pub(crate) fn new(lease: &Lease, settlement: &Settlement, retention: Duration) -> Option<Self> {
        let start = Timestamp::from_unix_micros(0);
        let running = Record {
            fingerprint: Fingerprint::from_parts(Algorithm::from_number(0), [0; 32]),
            owner: lease.owner,
            attempt: lease.attempt,
            checkpoint: Some(Checkpoint { sequence: 0, name: "".into(), data: Bytes::new() }),
            created_at: start,
            updated_at: start,
            expires_at: start.saturating_add(Duration::MAX),
            state: State::InProgress { lease_until: start, acquisition: Acquisition::Fresh, takeover: Takeover::Rerun },
        };
        let (next, _) = machine::apply(Some(&running), lease.owner, OwnerAction::Settle(settlement, retention), start);
        let next = next.filter(|next| next.checkpoint.is_none())?;
        let mut owned = pack(&running, 0, false, 0);
        owned.truncate(OWNED);
        let Fresh { bytes, life_ms } = Fresh::new(&next);
        Some(Self { bytes, owned, life_ms })
    }

    /// The first bytes of a record that is in progress and belongs to this run.
    pub(crate) fn owned(&self) -> &[u8] {
        &self.owned
    }

    /// The settled record before and after the range that the run does not know: its creation time and the fingerprint.
    pub(crate) fn around(&self) -> (&[u8], &[u8]) {
        (&self.bytes[..UNKNOWN], &self.bytes[UNKNOWN_END..])
    }
}

/// A record as the server has it.
pub(crate) struct Stored {
    pub(crate) record: Record,
    bytes: Bytes,
    /// When its key expires.
    pub(crate) expires_ms: i64,
}

impl Stored {
    /// Parses a record and the expiry of its key. `offset` is how far a test moved the time.
    pub(crate) fn read(bytes: Bytes, expires_ms: i64, offset: i64) -> Result<Self, StoreError> {
        if expires_ms < 0 {
            return Err(damaged("its key does not expire, so nothing says when it was made"));
        }
        let expires = Timestamp::from_unix_micros(expires_ms.saturating_mul(1_000).saturating_add(offset));
        let record = read(bytes.clone(), expires).map_err(damaged)?;
        Ok(Self { record, bytes, expires_ms })
    }

    /// The fixed-length head. Together with the expiry, it identifies this version of the record, as it counts the changes.
    pub(crate) fn head(&self) -> &[u8] {
        &self.bytes[..HEAD]
    }

    /// The next count of changes.
    pub(crate) fn next_change(&self) -> u32 {
        (&self.bytes[CHANGES..]).get_u32().wrapping_add(1)
    }

    pub(crate) fn is_awaited(&self) -> bool {
        self.bytes[AWAITED] != 0
    }

    /// The same record, marked as awaited by a caller.
    pub(crate) fn awaited(&self) -> Next {
        let mut bytes = self.bytes.to_vec();
        bytes[AWAITED] = 1;
        Next { bytes, expires_ms: self.expires_ms }
    }
}

fn read(mut bytes: Bytes, key_expires_at: Timestamp) -> Result<Record, CodecError> {
    let cut_off = |_| CodecError::Damaged("its end is missing");
    let format = bytes.try_get_u16().map_err(cut_off)?;
    if format != idem_core::RECORD_FORMAT {
        return Err(CodecError::UnknownFormat(format.into()));
    }
    if bytes.len() < HEAD - 2 {
        return Err(CodecError::Damaged("its end is missing"));
    }
    let state = bytes.get_u8();
    let owner = bytes.split_to(16);
    let attempt = bytes.get_u32();
    let _is_awaited = bytes.get_u8();
    let (life, hold, slack, created_at) = (bytes.get_i64(), bytes.get_i64(), bytes.get_u16(), bytes.get_i64());
    let fingerprint_algorithm = bytes.get_u16();
    let fingerprint = bytes.split_to(32);
    let (acquisition, takeover, status, _changes) = (bytes.get_u8(), bytes.get_u8(), bytes.get_u16(), bytes.get_u32());
    let mut parts = Parts::default();
    while !bytes.is_empty() {
        let (number, length) = (bytes.get_u8(), bytes.try_get_u32().map_err(cut_off)?);
        if length as usize > bytes.len() {
            return Err(CodecError::Damaged("its end is missing"));
        }
        parts.add(number, bytes.split_to(length as usize))?;
    }
    let expires_at = key_expires_at.unix_micros().saturating_sub(slack.into());
    let updated_at = expires_at.saturating_sub(life);
    let till = updated_at.saturating_add(hold);
    let (runs, waits) = (i64::from(state) == state::IN_PROGRESS, i64::from(state) == state::FAILED_RETRYABLE);
    Record::try_from(FlatRecord {
        format: format.into(),
        fingerprint_algorithm: fingerprint_algorithm.into(),
        fingerprint: fingerprint.to_vec(),
        owner: owner.to_vec(),
        attempt: attempt.into(),
        state: state.into(),
        acquisition: runs.then_some(acquisition.into()),
        takeover: runs.then_some(takeover.into()),
        lease_until: runs.then_some(till),
        not_before: waits.then_some(till),
        checkpoint_name: parts.checkpoint_name,
        checkpoint_data: parts.checkpoint_data,
        status: (!runs).then_some(status.into()),
        headers: parts.headers,
        body: parts.body,
        created_at: if created_at == 0 { updated_at } else { created_at },
        updated_at,
        expires_at,
    })
}

/// Whether a key lasts for at least `life_ms` from `asked_at` on. A proxy that shortens expiries would shorten leases too.
pub(crate) fn lasts(expires_ms: i64, life_ms: i64, asked_at: Timestamp) -> bool {
    expires_ms.saturating_add(ROUNDING_MS) >= (asked_at.unix_micros() / 1_000).saturating_add(life_ms)
}

/// The parts of a record, each once and in their order.
#[derive(Default)]
struct Parts {
    last: u8,
    checkpoint_name: Option<String>,
    checkpoint_data: Option<Vec<u8>>,
    headers: Option<Vec<u8>>,
    body: Option<Bytes>,
}

impl Parts {
    fn add(&mut self, number: u8, part: Bytes) -> Result<(), CodecError> {
        if number <= self.last {
            return Err(CodecError::Damaged("the order of its parts"));
        }
        self.last = number;
        match number {
            part::CHECKPOINT_NAME => {
                let name = String::from_utf8(part.to_vec()).map_err(|_| CodecError::Damaged("checkpoint"))?;
                self.checkpoint_name = Some(name);
            }
            part::CHECKPOINT_DATA => self.checkpoint_data = Some(part.to_vec()),
            part::HEADERS => self.headers = Some(part.to_vec()),
            part::BODY => self.body = Some(part),
            part::OPTIONAL.. => {}
            _ => return Err(CodecError::Damaged("a part of it is of a later version")),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use idem_core::{OwnerToken, StoredResponse};

    use super::*;

    const NOW: i64 = 1_800_000_000_123_456;

    fn at(micros: i64) -> Timestamp {
        Timestamp::from_unix_micros(NOW + micros)
    }

    fn record(state: State) -> Record {
        Record {
            fingerprint: Fingerprint::from_parts(Algorithm::from_number(7), [9; 32]),
            owner: OwnerToken::from_bytes([3; 16]),
            attempt: 5,
            checkpoint: Some(Checkpoint { sequence: 2, name: "charged".into(), data: "ch_1".into() }),
            created_at: at(-5_000_001),
            updated_at: at(0),
            expires_at: at(90_000_000_001),
            state,
        }
    }

    fn states() -> [State; 5] {
        let response = || StoredResponse::new(201, "made");
        let failed = |failure| State::Failed { failure, response: response() };
        [
            State::InProgress {
                lease_until: at(30_000_002),
                acquisition: Acquisition::Probe,
                takeover: Takeover::Unknown,
            },
            State::Completed { response: response() },
            failed(Failure::Terminal),
            failed(Failure::OutcomeUnknown),
            failed(Failure::Retryable { not_before: at(7) }),
        ]
    }

    #[test]
    fn what_is_put_in_place_comes_back_to_the_microsecond() {
        for state in states() {
            for offset in [0, 1, 86_400_000_000] {
                let record = record(state.clone());
                let next = Next::new(&record, true, 6, offset);
                let stored = Stored::read(next.bytes.into(), next.expires_ms, offset).unwrap();
                assert_eq!((stored.next_change(), stored.bytes[AWAITED]), (7, 1));
                assert_eq!(stored.record, record);
            }
        }
    }

    #[test]
    fn no_time_of_a_fresh_record_is_before_it_was_asked_for() {
        let record = Record { created_at: at(0), checkpoint: None, ..record(states()[0].clone()) };
        let fresh = Fresh::new(&record);
        // The server cuts off less than a millisecond.
        for put_at in [NOW, NOW + 543, NOW + 544] {
            let expires_ms = put_at / 1_000 + fresh.life_ms;
            assert!(lasts(expires_ms, fresh.life_ms, Timestamp::from_unix_micros(put_at)));
            let read = Stored::read(fresh.bytes.clone().into(), expires_ms, 0).unwrap().record;
            let late = read.updated_at.unix_micros() - put_at;
            assert!((1..=1_000).contains(&late), "{late}");
            assert_eq!(read.created_at, read.updated_at);
            let lease = |record: &Record| match record.state {
                State::InProgress { lease_until, .. } => lease_until.saturating_duration_since(record.updated_at),
                _ => panic!("{record:?}"),
            };
            assert_eq!(lease(&read), lease(&record));
            let life = |record: &Record| record.expires_at.saturating_duration_since(record.updated_at);
            assert_eq!(life(&read), life(&record));
        }
    }

    #[test]
    fn a_key_that_expires_too_soon_is_noticed() {
        let now = Timestamp::from_unix_micros(NOW);
        assert!(lasts(NOW / 1_000 + 50, 50, now) && lasts(NOW / 1_000 + 48, 50, now));
        assert!(!lasts(NOW / 1_000 + 47, 50, now) && !lasts(-1, 50, now));
    }

    #[test]
    fn terms_beyond_all_reason_stay_numbers() {
        let long = Timestamp::from_unix_micros(i64::MAX);
        let state = State::InProgress { lease_until: long, acquisition: Acquisition::Fresh, takeover: Takeover::Rerun };
        let record = Record { expires_at: long, ..record(state) };
        let (fresh, next) = (Fresh::new(&record), Next::new(&record, false, 0, 0));
        assert!(fresh.life_ms < 1 << 53 && next.expires_ms < 1 << 53);
        Stored::read(next.bytes.into(), next.expires_ms, 0).unwrap();
    }

    #[test]
    fn a_settlement_that_needs_what_its_run_left_behind_is_not_sent_unseen() {
        let lease = Lease {
            id: idem_core::RecordId::from_bytes([0; 32]),
            fingerprint: Fingerprint::of_bytes("", b""),
            owner: OwnerToken::from_bytes([3; 16]),
            attempt: 5,
            acquisition: Acquisition::Fresh,
            checkpoint: None,
        };
        let ending = |settlement: &Settlement| Ending::new(&lease, settlement, Duration::from_secs(60));
        let response = || StoredResponse::new(201, "made");
        let completed = ending(&Settlement::Completed(response())).unwrap();
        assert_eq!((completed.life_ms, completed.owned.len(), completed.owned[2]), (60_001, OWNED, 1));
        // A failure keeps the checkpoint.
        for settlement in [
            Settlement::FailedTerminal(response()),
            Settlement::OutcomeUnknown,
            Settlement::FailedRetryable { response: response(), retry_after: Duration::from_secs(1) },
            Settlement::Released,
        ] {
            assert!(ending(&settlement).is_none(), "{settlement:?}");
        }
    }

    #[test]
    fn another_format_is_told_as_such() {
        let mut bytes = pack(&record(states()[1].clone()), 0, false, 0);
        bytes[1] = 2;
        let error = Stored::read(bytes.into(), 1, 0).map(|_| ()).unwrap_err();
        assert!(error.source().is_some_and(|source| source.to_string().contains("format 2")), "{error:?}");
    }
}
