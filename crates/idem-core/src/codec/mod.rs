//! The flat form of a record: stores write it into columns or hash fields, and check it when they read it back.
//!
//! Every store uses the same numbers and the same encoding of header fields, so that one reader, one set of golden
//! files and one fuzzer serve all of them. Reading never panics and never guesses: whatever does not fit is a
//! [`CodecError`], which a store reports as [`StoreErrorKind::Corrupt`](crate::StoreErrorKind::Corrupt).

mod error;
mod headers;

use bytes::{Buf as _, Bytes};

pub use error::CodecError;
pub use headers::{decode_headers, encode_headers};

use crate::fingerprint::{Algorithm, Fingerprint};
use crate::record::{
    Acquisition, Checkpoint, Failure, OwnerToken, RECORD_FORMAT, Record, State, StoredBody, StoredResponse, Takeover,
};
use crate::timestamp::Timestamp;

/// The numbers of the `state` column.
pub mod state {
    /// An owner runs it, or crashed while running it.
    pub const IN_PROGRESS: i64 = 1;
    /// It took effect.
    pub const COMPLETED: i64 = 2;
    /// It failed, and never runs again.
    pub const FAILED_TERMINAL: i64 = 3;
    /// It is not known whether it took effect.
    pub const FAILED_OUTCOME_UNKNOWN: i64 = 4;
    /// It failed and may run again.
    pub const FAILED_RETRYABLE: i64 = 5;
}

/// A record as columns. Times are microseconds since the Unix epoch.
///
/// With the feature `serde`, a document store can serialise it. Read it back with [`Record::try_from`], which checks
/// it.
#[derive(Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[expect(missing_debug_implementations, reason = "it holds headers and bodies in the open")]
pub struct FlatRecord {
    /// [`RECORD_FORMAT`].
    pub format: i64,
    /// The fingerprint's algorithm.
    pub fingerprint_algorithm: i64,
    /// 32 bytes.
    pub fingerprint: Vec<u8>,
    /// 16 bytes.
    pub owner: Vec<u8>,
    /// From 1.
    pub attempt: i64,
    /// One of [`state`].
    pub state: i64,
    /// While in progress: 1 fresh, 2 takeover, 3 retry, 4 probe.
    pub acquisition: Option<i64>,
    /// While in progress: 1 rerun, 2 unknown, 3 probe.
    pub takeover: Option<i64>,
    /// While in progress.
    pub lease_until: Option<i64>,
    /// While it may be retried.
    pub not_before: Option<i64>,
    /// The name of the checkpoint, if there is one.
    pub checkpoint_name: Option<String>,
    /// Its sequence in 4 bytes, big endian, and its data: [`encode_checkpoint`].
    pub checkpoint_data: Option<Vec<u8>>,
    /// Once it ended.
    pub status: Option<i64>,
    /// Once it ended: [`encode_headers`], the trace among them.
    pub headers: Option<Vec<u8>>,
    /// Once it ended, unless the record is a tombstone.
    pub body: Option<Bytes>,
    /// When the record was created.
    pub created_at: i64,
    /// When it last changed.
    pub updated_at: i64,
    /// When it may be purged.
    pub expires_at: i64,
}

impl From<&Record> for FlatRecord {
    fn from(record: &Record) -> Self {
        let (state, response) = match &record.state {
            State::InProgress { .. } => (state::IN_PROGRESS, None),
            State::Completed { response } => (state::COMPLETED, Some(response)),
            State::Failed { failure, response } => {
                let state = match failure {
                    Failure::Terminal => state::FAILED_TERMINAL,
                    Failure::OutcomeUnknown => state::FAILED_OUTCOME_UNKNOWN,
                    Failure::Retryable { .. } => state::FAILED_RETRYABLE,
                };
                (state, Some(response))
            }
        };
        let running = match record.state {
            State::InProgress { lease_until, acquisition, takeover } => Some((lease_until, acquisition, takeover)),
            _ => None,
        };
        let not_before = match record.state {
            State::Failed { failure: Failure::Retryable { not_before }, .. } => Some(not_before.unix_micros()),
            _ => None,
        };
        Self {
            format: i64::from(RECORD_FORMAT),
            fingerprint_algorithm: i64::from(record.fingerprint.algorithm().number()),
            fingerprint: record.fingerprint.digest().to_vec(),
            owner: record.owner.as_bytes().to_vec(),
            attempt: i64::from(record.attempt),
            state,
            acquisition: running.map(|(_, acquisition, _)| acquisition_number(acquisition)),
            takeover: running.map(|(_, _, takeover)| takeover_number(takeover)),
            lease_until: running.map(|(lease_until, _, _)| lease_until.unix_micros()),
            not_before,
            checkpoint_name: record.checkpoint.as_ref().map(|checkpoint| checkpoint.name.as_ref().to_owned()),
            checkpoint_data: record.checkpoint.as_ref().map(encode_checkpoint),
            status: response.map(|response| i64::from(response.status)),
            headers: response.map(|response| encode_headers(&response.headers, response.trace.as_ref())),
            body: response.and_then(|response| match &response.body {
                StoredBody::Retained(body) => Some(body.clone()),
                StoredBody::NotRetained => None,
            }),
            created_at: record.created_at.unix_micros(),
            updated_at: record.updated_at.unix_micros(),
            expires_at: record.expires_at.unix_micros(),
        }
    }
}

impl TryFrom<FlatRecord> for Record {
    type Error = CodecError;

    fn try_from(flat: FlatRecord) -> Result<Self, CodecError> {
        if flat.format != i64::from(RECORD_FORMAT) {
            return Err(CodecError::UnknownFormat(flat.format));
        }
        let digest = flat.fingerprint.as_slice().try_into().map_err(|_| CodecError::Damaged("fingerprint"))?;
        let algorithm = u16::try_from(flat.fingerprint_algorithm).map_err(|_| CodecError::Damaged("algorithm"))?;
        let owner = flat.owner.as_slice().try_into().map_err(|_| CodecError::Damaged("owner"))?;
        let checkpoint = decode_checkpoint(flat.checkpoint_name.clone(), flat.checkpoint_data.clone())?;
        Ok(Self {
            fingerprint: Fingerprint::from_parts(Algorithm::from_number(algorithm), digest),
            owner: OwnerToken::from_bytes(owner),
            attempt: decode_attempt(flat.attempt)?,
            checkpoint,
            created_at: Timestamp::from_unix_micros(flat.created_at),
            updated_at: Timestamp::from_unix_micros(flat.updated_at),
            expires_at: Timestamp::from_unix_micros(flat.expires_at),
            state: decode_state(flat)?,
        })
    }
}

/// Encodes the sequence and the data of a checkpoint as bytes that sort by the sequence.
#[must_use]
pub fn encode_checkpoint(checkpoint: &Checkpoint) -> Vec<u8> {
    let mut encoded = Vec::with_capacity(4 + checkpoint.data.len());
    encoded.extend(checkpoint.sequence.to_be_bytes());
    encoded.extend_from_slice(&checkpoint.data);
    encoded
}

/// Reads a checkpoint from its name and from what [`encode_checkpoint`] wrote; `None` when there is neither.
///
/// # Errors
/// [`CodecError::Damaged`] when one of them is missing, or is too short.
pub fn decode_checkpoint(name: Option<String>, encoded: Option<Vec<u8>>) -> Result<Option<Checkpoint>, CodecError> {
    let damaged = CodecError::Damaged("checkpoint");
    match (name, encoded) {
        (Some(name), Some(encoded)) => {
            let mut data = Bytes::from(encoded);
            let sequence = data.try_get_u32().map_err(|_| damaged)?;
            Ok(Some(Checkpoint { sequence, name: name.into(), data }))
        }
        (None, None) => Ok(None),
        _ => Err(damaged),
    }
}

/// Reads the sequence of a checkpoint from the start of what [`encode_checkpoint`] wrote.
///
/// # Errors
/// [`CodecError::Damaged`] when it is too short.
pub fn decode_sequence(mut encoded: &[u8]) -> Result<u32, CodecError> {
    encoded.try_get_u32().map_err(|_| CodecError::Damaged("checkpoint"))
}

/// Decodes an attempt. The first one is 1: a smaller number would not fence any owner off.
fn decode_attempt(number: i64) -> Result<u32, CodecError> {
    u32::try_from(number).ok().filter(|attempt| *attempt > 0).ok_or(CodecError::Damaged("attempt"))
}

fn decode_state(flat: FlatRecord) -> Result<State, CodecError> {
    let failed = |failure, flat| Ok(State::Failed { failure, response: decode_response(flat)? });
    match flat.state {
        state::IN_PROGRESS => {
            let lease_until = flat.lease_until.ok_or(CodecError::Damaged("lease"))?;
            let acquisition = flat.acquisition.and_then(acquisition).ok_or(CodecError::Damaged("acquisition"))?;
            let takeover = flat.takeover.and_then(takeover).ok_or(CodecError::Damaged("takeover"))?;
            // A settled record that an edit has turned into one in progress would run again.
            if flat.status.is_some() || flat.headers.is_some() || flat.body.is_some() {
                return Err(CodecError::Damaged("answer of a record in progress"));
            }
            if flat.not_before.is_some() {
                return Err(CodecError::Damaged("time of the next attempt"));
            }
            Ok(State::InProgress { lease_until: Timestamp::from_unix_micros(lease_until), acquisition, takeover })
        }
        state::COMPLETED => Ok(State::Completed { response: decode_response(flat)? }),
        state::FAILED_TERMINAL => failed(Failure::Terminal, flat),
        state::FAILED_OUTCOME_UNKNOWN => failed(Failure::OutcomeUnknown, flat),
        state::FAILED_RETRYABLE => {
            let not_before = flat.not_before.ok_or(CodecError::Damaged("time of the next attempt"))?;
            failed(Failure::Retryable { not_before: Timestamp::from_unix_micros(not_before) }, flat)
        }
        _ => Err(CodecError::Damaged("state")),
    }
}

fn decode_response(flat: FlatRecord) -> Result<StoredResponse, CodecError> {
    let status = flat.status.and_then(|status| u16::try_from(status).ok()).ok_or(CodecError::Damaged("status"))?;
    let headers = flat.headers.ok_or(CodecError::Damaged("header fields"))?;
    let body = flat.body.map_or(StoredBody::NotRetained, StoredBody::Retained);
    let (headers, trace) = decode_headers(headers.into())?;
    Ok(StoredResponse { status, headers, body, trace })
}

fn acquisition_number(acquisition: Acquisition) -> i64 {
    match acquisition {
        Acquisition::Fresh => 1,
        Acquisition::Takeover => 2,
        Acquisition::Retry => 3,
        Acquisition::Probe => 4,
    }
}

fn acquisition(number: i64) -> Option<Acquisition> {
    [Acquisition::Fresh, Acquisition::Takeover, Acquisition::Retry, Acquisition::Probe]
        .into_iter()
        .find(|acquisition| acquisition_number(*acquisition) == number)
}

/// The number of a takeover policy, for stores that write a record without building a [`Record`].
#[must_use]
pub fn takeover_number(takeover: Takeover) -> i64 {
    match takeover {
        Takeover::Rerun => 1,
        Takeover::Unknown => 2,
        Takeover::Probe => 3,
    }
}

fn takeover(number: i64) -> Option<Takeover> {
    [Takeover::Rerun, Takeover::Unknown, Takeover::Probe]
        .into_iter()
        .find(|takeover| takeover_number(*takeover) == number)
}

#[cfg(test)]
mod tests;
