//! Records as a version of a store wrote them, which every later version must read.
//!
//! A store keeps a file of them in its tests. It [writes](write()) these records, compares the contents of its database with
//! the [file](expect()), and [checks](check()) a store on the contents of the file. When a format changes, the old file
//! stays, and later versions must read its records as well.

use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use idem_core::{
    Acquire, AcquireOutcome, Acquisition, IdempotencyStore, Lease, OwnerOutcome, OwnerToken, RecordId, ReplayKind,
    Settlement, State, StoredBody, StoredResponse, Takeover,
};

use crate::fixture::{KEPT, LEASE, checkpoint, completed, failed, mismatch_of, request, response, retryable};
use crate::subject::TimeControl;

/// When the records in a file were created: the year 2020, in microseconds since 1970.
pub const PAST_MICROS: i64 = 1_577_836_800_000_000;
/// When leases, backoffs and retentions in a file end: the year 2100, in microseconds since 1970.
pub const FUTURE_MICROS: i64 = 4_102_444_800_000_000;

const IN_PROGRESS: u8 = 1;
const COMPLETED: u8 = 2;
const FAILED: u8 = 3;
const RETRYABLE: u8 = 4;
const TOMBSTONE: u8 = 5;
const OUTCOME_UNKNOWN: u8 = 6;
const RELEASED: u8 = 7;

/// The numbers of all records.
pub const ALL: [u8; 7] = [IN_PROGRESS, COMPLETED, FAILED, RETRYABLE, TOMBSTONE, OUTCOME_UNKNOWN, RELEASED];

/// The id of a record by its number.
#[must_use]
pub fn id(number: u8) -> RecordId {
    RecordId::from_bytes([number; 32])
}

fn request_by(number: u8, owner: u8) -> Acquire {
    let takeover = if number == OUTCOME_UNKNOWN { Takeover::Unknown } else { Takeover::Rerun };
    Acquire { id: id(number), owner: OwnerToken::from_bytes([owner; 16]), takeover, ..request() }
}

fn tombstone() -> Settlement {
    Settlement::Completed(StoredResponse { body: StoredBody::NotRetained, ..response() })
}

/// Writes all records by the verbs of a store, which must not have any of them.
///
/// # Panics
/// When the store does not answer as its contract says.
pub async fn write(store: &dyn IdempotencyStore, time: &dyn TimeControl) {
    for number in [OUTCOME_UNKNOWN, RELEASED] {
        leased(store, &request_by(number, number)).await;
    }
    time.advance(LEASE + Duration::from_secs(1));
    let unknown = store.acquire(&request_by(OUTCOME_UNKNOWN, 0xF0)).await;
    assert!(matches!(unknown, Ok(AcquireOutcome::Replay(_))), "{unknown:?}");
    let taken_over = leased(store, &request_by(RELEASED, 0xF1)).await;
    record(store, &taken_over).await;
    settle(store, &taken_over, &Settlement::Released).await;
    let running = leased(store, &request_by(IN_PROGRESS, IN_PROGRESS)).await;
    record(store, &running).await;
    for (number, settlement) in
        [(COMPLETED, completed()), (FAILED, failed()), (RETRYABLE, retryable()), (TOMBSTONE, tombstone())]
    {
        let lease = leased(store, &request_by(number, number)).await;
        settle(store, &lease, &settlement).await;
    }
}

async fn leased(store: &dyn IdempotencyStore, request: &Acquire) -> Lease {
    match store.acquire(request).await {
        Ok(AcquireOutcome::Acquired(lease)) => lease,
        other => panic!("record {:?}: expected a lease, got {other:?}", request.id),
    }
}

async fn record(store: &dyn IdempotencyStore, lease: &Lease) {
    let recorded = store.checkpoint(lease, &checkpoint("charged")).await;
    assert_eq!(recorded.expect("the store answers"), OwnerOutcome::Applied);
}

async fn settle(store: &dyn IdempotencyStore, lease: &Lease, settlement: &Settlement) {
    let settled = store.settle(lease, settlement, KEPT).await;
    assert_eq!(settled.expect("the store answers"), OwnerOutcome::Applied);
}

/// Checks that a store reads all records and answers accordingly.
///
/// # Panics
/// When it does not.
pub async fn check(store: &dyn IdempotencyStore) {
    let repeated = async |number| {
        let repeat = Acquire { max_attempts: NonZeroU32::MAX, ..request_by(number, 0xAA) };
        store.acquire(&repeat).await.expect("the store answers")
    };
    for number in ALL {
        let kept = store.peek(&id(number)).await.expect("the store answers").expect("there is a record");
        assert_eq!(kept.fingerprint, request().fingerprint, "record {number}");
        let other = Acquire { id: id(number), ..mismatch_of(&request()) };
        let mismatch = store.acquire(&other).await.expect("the store answers");
        assert!(matches!(mismatch, AcquireOutcome::Mismatch { .. }), "record {number}: {mismatch:?}");
    }
    let running = store.peek(&id(IN_PROGRESS)).await.expect("the store answers").expect("there is a record");
    assert_eq!((running.owner, running.attempt), (OwnerToken::from_bytes([IN_PROGRESS; 16]), 1));
    assert_eq!(running.checkpoint, Some(checkpoint("charged")));
    let State::InProgress { acquisition, takeover, .. } = running.state else { panic!("{running:?}") };
    assert_eq!((acquisition, takeover), (Acquisition::Fresh, Takeover::Rerun));
    assert!(matches!(repeated(IN_PROGRESS).await, AcquireOutcome::InProgress { .. }));
    assert!(matches!(repeated(RETRYABLE).await, AcquireOutcome::Backoff { .. }));
    let unknown = StoredResponse::outcome_unknown();
    for (number, kind, settlement) in [
        (COMPLETED, ReplayKind::Completed, completed()),
        (FAILED, ReplayKind::Failed, failed()),
        (TOMBSTONE, ReplayKind::Completed, tombstone()),
        (OUTCOME_UNKNOWN, ReplayKind::OutcomeUnknown, Settlement::Completed(unknown)),
    ] {
        let AcquireOutcome::Replay(replay) = repeated(number).await else { panic!("record {number} is not replayed") };
        let (Settlement::Completed(expected) | Settlement::FailedTerminal(expected)) = settlement else { continue };
        assert_eq!((replay.kind, replay.response, replay.attempt), (kind, expected, 1), "record {number}");
    }
    let AcquireOutcome::Acquired(lease) = repeated(RELEASED).await else { panic!("what was released runs again") };
    let Lease { attempt, acquisition, checkpoint: point, .. } = lease;
    assert_eq!((attempt, acquisition, point), (3, Acquisition::Takeover, Some(checkpoint("charged"))));
}

/// Compares what a store wrote with its file, byte for byte. With `IDEM_GOLDEN=write` in the environment, writes the file
/// instead.
///
/// # Panics
/// When they differ, or the file cannot be read or written.
pub fn expect(file: &Path, written: &str) {
    if std::env::var_os("IDEM_GOLDEN").is_some_and(|asked| asked == "write") {
        std::fs::write(file, written).expect("the file can be written");
    }
    let expected = std::fs::read_to_string(file).expect("the file can be read");
    assert!(
        expected == written,
        "this version writes other records than {}. Later versions have to read both: keep that file, and add another one.\n{written}",
        file.display()
    );
}
