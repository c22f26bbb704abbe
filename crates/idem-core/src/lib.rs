#![doc = include_str!("../README.md")]

pub mod codec;
mod encoding;
#[cfg(feature = "engine")]
pub mod engine;
pub mod fingerprint;
mod key;
pub mod machine;
pub mod memory;
mod record;
mod record_id;
mod scope;
mod store;
mod timestamp;
mod trace;

pub use fingerprint::{Algorithm, BodyFormat, Fingerprint, FingerprintBuilder, JsonPointer, JsonPointerError};
pub use key::{IdempotencyKey, KeyError, MAX_KEY_BYTES};
pub use machine::{
    Acquire, AcquireOutcome, Command, Erase, EraseOutcome, Lease, OnMismatch, Origin, Outcome, OwnerAction,
    OwnerOutcome, Refusal, Replay, ReplayKind, Resolution, Resolve, ResolveOutcome, Settlement, Term,
};
pub use memory::MemoryStore;
pub use record::{
    Acquisition, Checkpoint, Failure, HeaderField, InvalidRecordVersion, OwnerToken, RECORD_FORMAT, Record,
    RecordVersion, State, StoredBody, StoredResponse, Takeover,
};
pub use record_id::{InvalidRecordId, RecordId, RecordIdentity, SecretTooShort};
pub use scope::Scope;
pub use store::{
    Begin, Capabilities, CountPage, Durability, DurableStore, FINISH_TIMEOUT, FastEntry, FastRead, FastStore,
    IdempotencyStore, Inspect, Inspection, InvalidResolution, InvalidStateName, LeaseRenewer, LiveRecord,
    MissingPrivilege, Operate, PartSize, Purge, RecordCounts, RecordFilter, RecordPage, RecordState, RecordSummary,
    Repair, RepairNote, ScanPosition, SelfTestError, SettlementListener, StateName, StoreError, StoreErrorKind,
    StoreTransaction, TimeOffset, TransactionSlots, TransactionalStore, Writes, erase, repair, self_test,
};
pub use timestamp::Timestamp;
pub use trace::{InvalidTraceId, InvalidTraceParent, TraceId, TraceParent};
