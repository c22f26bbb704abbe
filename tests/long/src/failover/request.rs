//! The requests of clients, and their record ids.

use std::fmt::Write as _;
use std::num::NonZeroU32;
use std::time::Duration;

use idem_core::{
    Acquire, Fingerprint, OnMismatch, Origin, OwnerToken, RecordId, Scope, StoredResponse, Takeover, Term,
};

use crate::records::DAY;

/// Leases outlast every check, so that only a fault can lose one.
pub(super) const TERM: Term = Term { lease: Duration::from_secs(3600), retention: DAY };

/// The number of slots of a cluster.
const SLOTS: u16 = 16_384;

/// How many slots have keys in a round: few enough that each has many keys, and a moving slot has clients.
const HOT_SLOTS: u16 = 32;
const STRIDE: u16 = SLOTS / HOT_SLOTS;

/// The acquire of a key by an owner.
pub(super) fn request(id: RecordId, owner: OwnerToken) -> Acquire {
    Acquire {
        id,
        origin: Origin { namespace: "long".into(), scope: Scope::new("tenant-4711", "POST /v1/payments") },
        trace: None,
        fingerprint: Fingerprint::of_bytes("POST /v1/payments", b"the same for all"),
        owner,
        term: TERM,
        takeover: Takeover::Rerun,
        max_attempts: NonZeroU32::MAX,
        on_mismatch: OnMismatch::Refuse,
    }
}

/// The response with which an owner settles a key, unique to that owner and key.
pub(super) fn response(id: &RecordId, owner: Option<OwnerToken>) -> StoredResponse {
    let mut body = format!("{id} by ");
    for byte in owner.iter().flat_map(|owner| owner.as_bytes()) {
        // Writing to a string does not fail.
        let _ = write!(body, "{byte:02x}");
    }
    StoredResponse::new(201, body)
}

/// The slots that have keys in a round. They differ from those of the round before, so that moving does not become slower.
pub(super) fn hot_slots(round: u64) -> impl Iterator<Item = u16> {
    (first_of(round)..SLOTS).step_by(usize::from(STRIDE))
}

fn first_of(round: u64) -> u16 {
    u16::try_from(round % u64::from(STRIDE)).unwrap_or_default()
}

/// A fresh id whose key is in one of the [`hot_slots`].
pub(super) fn fresh_id(round: u64) -> RecordId {
    let mut bytes = [0; 32];
    loop {
        bytes[..16].copy_from_slice(OwnerToken::random().as_bytes());
        bytes[16..].copy_from_slice(OwnerToken::random().as_bytes());
        let begun = bytes[..31].iter().fold(0, checksum);
        // The slot is the lower bits of the checksum, so the last byte decides.
        let last = (0..=u8::MAX).find(|last| checksum(begun, last) % SLOTS % STRIDE == first_of(round));
        if let Some(last) = last {
            bytes[31] = last;
            return RecordId::from_bytes(bytes);
        }
    }
}

/// The slot of the record's key. The id is its hash tag, the text in braces.
pub(super) fn slot(id: &RecordId) -> u16 {
    id.as_bytes().iter().fold(0, checksum) % SLOTS
}

/// CRC-16/XMODEM, as the specification of Redis Cluster defines it, over the two hexadecimal digits of a byte.
fn checksum(begun: u16, byte: &u8) -> u16 {
    let digit = |nibble: u8| if nibble < 10 { b'0' + nibble } else { b'a' + nibble - 10 };
    [digit(byte >> 4), digit(byte & 15)].iter().fold(begun, |crc, letter| {
        (0..8).fold(crc ^ (u16::from(*letter) << 8), |crc, _| (crc << 1) ^ (if crc >> 15 == 1 { 0x1021 } else { 0 }))
    })
}
