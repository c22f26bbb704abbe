//! Seals and opens the parts of records.

use std::sync::{Arc, PoisonError, RwLock};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use bytes::Bytes;
use idem_core::codec::{decode_headers, encode_headers};
use idem_core::{
    Acquire, Checkpoint, Failure, Fingerprint, HeaderField, Lease, Origin, Record, RecordId, Replay, ReplayKind,
    Resolution, Settlement, State, StoreError, StoredBody, StoredResponse,
};

use crate::config::{EncryptionConfig, Options};
use crate::envelope::{Binding, Format, HEAD, Part, key_of, open, seal};
use crate::fault::Fault;
use crate::keys::Keys;
use crate::scope::ScopeSecret;

/// The name of the one header field of a sealed answer, and of a sealed checkpoint.
pub(crate) const SEALED: &str = "idem-sealed";

/// Whether a part of this record is sealed, as a store without keys reads it. For tools that must not write plaintext beside it.
#[must_use]
pub fn is_sealed(record: &Record) -> bool {
    response_of(record).is_some_and(|response| matches!(&*response.headers, [field] if field.name == SEALED))
        || record.checkpoint.as_ref().is_some_and(|checkpoint| &*checkpoint.name == SEALED)
}

fn response_of(record: &Record) -> Option<&StoredResponse> {
    match &record.state {
        State::InProgress { .. } => None,
        State::Completed { response } | State::Failed { response, .. } => Some(response),
    }
}

/// The id of the key that sealed an answer; `None` if it is not sealed, or its form is damaged.
fn response_key(response: &StoredResponse) -> Option<u32> {
    let [HeaderField { name, value }] = &*response.headers else { return None };
    let value = STANDARD_NO_PAD.decode(value).ok().filter(|_| name == SEALED)?;
    value.first_chunk().map(key_of)
}

/// The id of the key that sealed a checkpoint; `None` if it is not sealed, or its form is damaged.
fn checkpoint_key(checkpoint: &Checkpoint) -> Option<u32> {
    checkpoint.data.first_chunk().filter(|_| &*checkpoint.name == SEALED).map(key_of)
}

/// The keys and the options of a store. All clones of the store, and its transactions, share them.
#[derive(Debug)]
pub(crate) struct Sealer {
    keys: RwLock<Arc<Keys>>,
    options: Options,
}

/// The run that a value belongs to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Run<'a> {
    pub(crate) id: &'a RecordId,
    pub(crate) fingerprint: &'a Fingerprint,
    pub(crate) attempt: u32,
}

impl<'a> Run<'a> {
    pub(crate) fn of_lease(lease: &'a Lease) -> Self {
        Self { id: &lease.id, fingerprint: &lease.fingerprint, attempt: lease.attempt }
    }

    pub(crate) fn of_record(id: &'a RecordId, record: &'a Record) -> Self {
        Self { id, fingerprint: &record.fingerprint, attempt: record.attempt }
    }
}

impl Sealer {
    pub(crate) fn new(config: EncryptionConfig) -> Self {
        let EncryptionConfig { keys, options } = config;
        Self { keys: RwLock::new(Arc::new(keys)), options }
    }

    pub(crate) fn rotate(&self, keys: Keys) {
        *self.keys.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(keys);
    }

    fn keys(&self) -> Arc<Keys> {
        Arc::clone(&self.keys.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn binding<'a>(&'a self, run: Run<'a>, part: Part) -> Binding<'a> {
        Binding { id: run.id, fingerprint: run.fingerprint, part, context: &self.options.context }
    }

    pub(crate) fn seal_response(
        &self,
        run: Run<'_>,
        kind: ReplayKind,
        response: &StoredResponse,
    ) -> Result<StoredResponse, StoreError> {
        if self.options.writes_unencrypted {
            return Ok(response.clone());
        }
        self.sealed_response(run, kind, response).map_err(|fault| fault.of(run.id))
    }

    fn sealed_response(
        &self,
        run: Run<'_>,
        kind: ReplayKind,
        response: &StoredResponse,
    ) -> Result<StoredResponse, Fault> {
        let completed = is_completed(kind)?;
        let mut buffer = encode_headers(&response.headers, None);
        let length = buffer.len();
        let (body, body_is_kept) = match &response.body {
            StoredBody::Retained(body) => (body.clone(), true),
            StoredBody::NotRetained => (Bytes::new(), false),
        };
        let (body, format) = self.compressed(body);
        buffer.extend_from_slice(&body);
        let headers = u32::try_from(length).map_err(|_| Fault::TooLarge)?;
        let attempt = run.attempt;
        let part = Part::Answer { completed, attempt, status: response.status, body_is_kept, headers };
        let head = seal(&self.keys(), &self.binding(run, part), format, &mut buffer)?;
        let value = STANDARD_NO_PAD.encode([&head[..], &attempt.to_be_bytes(), &buffer[..length]].concat());
        let body = Bytes::from(buffer).split_off(length);
        Ok(StoredResponse {
            status: response.status,
            headers: Arc::from([HeaderField { name: SEALED.into(), value: value.into() }]),
            body: if body_is_kept { StoredBody::Retained(body) } else { StoredBody::NotRetained },
            trace: response.trace,
        })
    }

    /// Opens an answer. An unknown outcome is the state machine's own answer, which has nothing to seal. An erased answer has none either.
    ///
    /// The attempt is the one that the answer names. The state machine fences by the owner, who may have a later attempt in the record
    /// by a repeated acquire that arrived late.
    pub(crate) fn open_response(
        &self,
        run: Run<'_>,
        kind: ReplayKind,
        response: &StoredResponse,
    ) -> Result<StoredResponse, Fault> {
        let [HeaderField { name, value }] = &*response.headers else {
            return self.unencrypted_response(kind, response);
        };
        if name != SEALED {
            return self.unencrypted_response(kind, response);
        }
        let completed = is_completed(kind)?;
        let value = STANDARD_NO_PAD.decode(value).map_err(|_| Fault::Damaged("the header field"))?;
        let split = value.split_first_chunk::<HEAD>();
        let split =
            split.and_then(|(head, rest)| rest.split_first_chunk().map(|(attempt, rest)| (head, attempt, rest)));
        let (head, attempt, encoded) = split.ok_or(Fault::Damaged("the header field"))?;
        let attempt = u32::from_be_bytes(*attempt);
        let (body, body_is_kept) = match &response.body {
            StoredBody::Retained(body) => (&body[..], true),
            StoredBody::NotRetained => (&[][..], false),
        };
        let headers = u32::try_from(encoded.len()).map_err(|_| Fault::TooLarge)?;
        let part = Part::Answer { completed, attempt, status: response.status, body_is_kept, headers };
        let mut buffer = [encoded, body].concat();
        let format = open(&self.keys(), &self.binding(run, part), head, &mut buffer)?;
        let mut body = Bytes::from(buffer);
        let (headers, _) = decode_headers(body.split_to(encoded.len()))?;
        let body = decompressed(body, format)?;
        let body = if body_is_kept { StoredBody::Retained(body) } else { StoredBody::NotRetained };
        Ok(StoredResponse { status: response.status, headers, body, trace: response.trace })
    }

    fn unencrypted_response(&self, kind: ReplayKind, response: &StoredResponse) -> Result<StoredResponse, Fault> {
        let is_the_machines_own = kind == ReplayKind::OutcomeUnknown && *response == StoredResponse::outcome_unknown();
        let is_erased =
            response.headers.is_empty() && response.body == StoredBody::NotRetained && response.trace.is_none();
        if is_the_machines_own || is_erased || self.options.reads_unencrypted {
            return Ok(response.clone());
        }
        Err(Fault::Unencrypted)
    }

    pub(crate) fn seal_checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<Checkpoint, StoreError> {
        if self.options.writes_unencrypted {
            return Ok(checkpoint.clone());
        }
        let run = Run::of_lease(lease);
        self.sealed_checkpoint(run, checkpoint).map_err(|fault| fault.of(run.id))
    }

    fn sealed_checkpoint(&self, run: Run<'_>, checkpoint: &Checkpoint) -> Result<Checkpoint, Fault> {
        let name = Bytes::copy_from_slice(checkpoint.name.as_bytes());
        let plaintext = encode_headers(&[HeaderField { name, value: checkpoint.data.clone() }], None);
        let (plaintext, format) = self.compressed(plaintext.into());
        let mut buffer = plaintext.to_vec();
        let part = Part::Checkpoint { sequence: checkpoint.sequence };
        let head = seal(&self.keys(), &self.binding(run, part), format, &mut buffer)?;
        let data = [&head[..], &buffer].concat().into();
        Ok(Checkpoint { sequence: checkpoint.sequence, name: SEALED.into(), data })
    }

    pub(crate) fn open_checkpoint(&self, run: Run<'_>, checkpoint: &Checkpoint) -> Result<Checkpoint, Fault> {
        if &*checkpoint.name != SEALED {
            return if self.options.reads_unencrypted { Ok(checkpoint.clone()) } else { Err(Fault::Unencrypted) };
        }
        let damaged = Fault::Damaged("the checkpoint");
        let (head, sealed) = checkpoint.data.split_first_chunk::<HEAD>().ok_or(damaged)?;
        let mut buffer = sealed.to_vec();
        let part = Part::Checkpoint { sequence: checkpoint.sequence };
        let format = open(&self.keys(), &self.binding(run, part), head, &mut buffer)?;
        let (fields, _) = decode_headers(decompressed(buffer.into(), format)?)?;
        let [HeaderField { name, value }] = &*fields else { return Err(damaged) };
        let name = std::str::from_utf8(name).map_err(|_| damaged)?;
        Ok(Checkpoint { sequence: checkpoint.sequence, name: name.into(), data: value.clone() })
    }

    #[cfg(feature = "compression")]
    fn compressed(&self, plaintext: Bytes) -> (Bytes, Format) {
        let compressed = self.options.compresses.then(|| crate::compression::compress(&plaintext)).flatten();
        compressed.map_or((plaintext, Format::Plain), |compressed| (compressed.into(), Format::Compressed))
    }

    #[cfg(not(feature = "compression"))]
    #[expect(clippy::unused_self, reason = "with the feature `compression` it asks for the options")]
    fn compressed(&self, plaintext: Bytes) -> (Bytes, Format) {
        (plaintext, Format::Plain)
    }

    /// The settlement with its answer sealed.
    pub(crate) fn seal_settlement(&self, run: Run<'_>, settlement: &Settlement) -> Result<Settlement, StoreError> {
        Ok(match settlement {
            Settlement::Completed(response) => {
                Settlement::Completed(self.seal_response(run, ReplayKind::Completed, response)?)
            }
            Settlement::FailedTerminal(response) => {
                Settlement::FailedTerminal(self.seal_response(run, ReplayKind::Failed, response)?)
            }
            Settlement::FailedRetryable { response, retry_after } => Settlement::FailedRetryable {
                response: self.seal_response(run, ReplayKind::Failed, response)?,
                retry_after: *retry_after,
            },
            Settlement::OutcomeUnknown => Settlement::OutcomeUnknown,
            Settlement::Released => Settlement::Released,
        })
    }

    /// The resolution with its answer sealed.
    pub(crate) fn seal_resolution(&self, run: Run<'_>, resolution: &Resolution) -> Result<Resolution, StoreError> {
        Ok(match resolution {
            Resolution::Completed(response) => {
                Resolution::Completed(self.seal_response(run, ReplayKind::Completed, response)?)
            }
            Resolution::FailedTerminal(response) => {
                Resolution::FailedTerminal(self.seal_response(run, ReplayKind::Failed, response)?)
            }
            Resolution::FailedRetryable { response, retry_after } => Resolution::FailedRetryable {
                response: self.seal_response(run, ReplayKind::Failed, response)?,
                retry_after: *retry_after,
            },
            Resolution::OutcomeUnknown => Resolution::OutcomeUnknown,
        })
    }

    /// The request with its scope hashed, if the store hashes scopes.
    pub(crate) fn seal_request(&self, request: &Acquire) -> Acquire {
        let Some(secret) = &self.options.scope_secret else { return request.clone() };
        let scope = secret.scope(&request.origin.scope);
        Acquire { origin: Origin { scope, ..request.origin.clone() }, ..request.clone() }
    }

    pub(crate) fn scope_secret(&self) -> Option<&ScopeSecret> {
        self.options.scope_secret.as_ref()
    }

    pub(crate) fn open_lease(&self, lease: Lease) -> Result<Lease, StoreError> {
        let run = Run::of_lease(&lease);
        let checkpoint = lease.checkpoint.as_ref().map(|checkpoint| self.open_checkpoint(run, checkpoint));
        let checkpoint = checkpoint.transpose().map_err(|fault| fault.of(&lease.id))?;
        Ok(Lease { checkpoint, ..lease })
    }

    pub(crate) fn open_replay(
        &self,
        id: &RecordId,
        fingerprint: &Fingerprint,
        replay: &Replay,
    ) -> Result<Replay, Fault> {
        let run = Run { id, fingerprint, attempt: replay.attempt };
        Ok(Replay { response: self.open_response(run, replay.kind, &replay.response)?, ..replay.clone() })
    }

    pub(crate) fn open_record(&self, id: &RecordId, record: &Record) -> Result<Record, StoreError> {
        self.opened_record(Run::of_record(id, record), record).map_err(|fault| fault.of(id))
    }

    /// Whether the primary key has sealed a part of this record. Each such part has to open.
    pub(crate) fn proves_primary_key(&self, id: &RecordId, record: &Record) -> Result<bool, StoreError> {
        let (primary, run) = (self.keys().primary_id(), Run::of_record(id, record));
        let checkpoint = record.checkpoint.as_ref().filter(|checkpoint| checkpoint_key(checkpoint) == Some(primary));
        if let Some(checkpoint) = checkpoint {
            self.open_checkpoint(run, checkpoint).map_err(|fault| fault.of(id))?;
        }
        let has_answer = response_of(record).and_then(response_key) == Some(primary);
        if has_answer {
            self.open_state(run, &record.state).map_err(|fault| fault.of(id))?;
        }
        Ok(checkpoint.is_some() || has_answer)
    }

    fn opened_record(&self, run: Run<'_>, record: &Record) -> Result<Record, Fault> {
        let checkpoint = record.checkpoint.as_ref().map(|checkpoint| self.open_checkpoint(run, checkpoint));
        let state = self.open_state(run, &record.state)?;
        Ok(Record { checkpoint: checkpoint.transpose()?, state, ..record.clone() })
    }

    pub(crate) fn open_state(&self, run: Run<'_>, state: &State) -> Result<State, Fault> {
        Ok(match state {
            State::InProgress { .. } => state.clone(),
            State::Completed { response } => {
                State::Completed { response: self.open_response(run, ReplayKind::Completed, response)? }
            }
            State::Failed { failure, response } => {
                let kind = match failure {
                    Failure::OutcomeUnknown => ReplayKind::OutcomeUnknown,
                    Failure::Terminal | Failure::Retryable { .. } => ReplayKind::Failed,
                };
                State::Failed { failure: *failure, response: self.open_response(run, kind, response)? }
            }
        })
    }
}

/// Whether an answer is that of a success.
fn is_completed(kind: ReplayKind) -> Result<bool, Fault> {
    match kind {
        ReplayKind::Completed => Ok(true),
        ReplayKind::Failed => Ok(false),
        ReplayKind::OutcomeUnknown => Err(Fault::Unknown),
    }
}

#[cfg(feature = "compression")]
fn decompressed(plaintext: Bytes, format: Format) -> Result<Bytes, Fault> {
    match format {
        Format::Plain => Ok(plaintext),
        Format::Compressed => crate::compression::decompress(&plaintext).map(Bytes::from),
    }
}

#[cfg(not(feature = "compression"))]
fn decompressed(plaintext: Bytes, format: Format) -> Result<Bytes, Fault> {
    match format {
        Format::Plain => Ok(plaintext),
        Format::Compressed => Err(Fault::Compressed),
    }
}
