//! The sealed form: AES-256-GCM-SIV over a value, bound to its place in its record.
//!
//! # Format
//! A head of 21 bytes, and the ciphertext, which is as long as the plaintext:
//!
//! | bytes | content |
//! |---|---|
//! | 1 | the format: 1, or 2 if the plaintext is compressed |
//! | 4 | the id of the key, big endian |
//! | 16 | the tag |
//!
//! In an answer, the attempt with which it was sealed is between both: 4 bytes, big endian.
//!
//! The associated data are the first 5 bytes and the [`Binding`].
//!
//! # The nonce
//! It is a digest of the associated data, so that the same value in the same place has the same bytes each time, and a repeated
//! settlement is byte-equal (law L8). An owner that settles twice with different answers uses a nonce twice. In GCM that would
//! reveal the key stream. GCM-SIV (RFC 8452) makes its initial counter from the plaintext too, so that only equality shows.

use aes_gcm_siv::{AeadInOut as _, Nonce, Tag};
use idem_core::{Fingerprint, RecordId};
use sha2::{Digest as _, Sha256};

use crate::fault::Fault;
use crate::keys::Keys;

/// The length of the head.
pub(crate) const HEAD: usize = PREFIX + TAG;
const PREFIX: usize = 5;
const TAG: usize = 16;

/// Names how nonces are made.
const NONCE: &[u8] = b"idem-encryption nonce v1";

/// The form of the plaintext.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Plain = 1,
    Compressed = 2,
}

/// The place of a value: it opens nowhere else.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Binding<'a> {
    pub(crate) id: &'a RecordId,
    pub(crate) fingerprint: &'a Fingerprint,
    pub(crate) part: Part,
    /// Which system the record belongs to; see [`EncryptionConfig::with_context`](crate::EncryptionConfig::with_context).
    pub(crate) context: &'a str,
}

/// Which part of the record the value is.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Part {
    /// The header fields and the body of an answer. They are one plaintext, so that no body goes with the fields of another answer.
    Answer {
        /// Whether the operation took effect. Both kinds of failure are one here, because the state machine makes one of the other.
        completed: bool,
        /// With which it was sealed.
        attempt: u32,
        status: u16,
        body_is_kept: bool,
        /// How much of the ciphertext the header fields are.
        headers: u32,
    },
    /// The name and the data of a checkpoint. It outlives its attempt, so its sequence says which one it is.
    Checkpoint { sequence: u32 },
}

impl Binding<'_> {
    /// All fields but the last have a fixed length within their part, so that no two bindings have the same bytes.
    fn associated_data(&self, prefix: &[u8]) -> Vec<u8> {
        let mut data = Vec::with_capacity(96);
        data.extend_from_slice(prefix);
        data.extend_from_slice(self.id.as_bytes());
        data.extend(self.fingerprint.algorithm().number().to_be_bytes());
        data.extend_from_slice(self.fingerprint.digest());
        match self.part {
            Part::Answer { completed, attempt, status, body_is_kept, headers } => {
                data.push(1);
                data.push(u8::from(completed));
                data.extend(attempt.to_be_bytes());
                data.extend(status.to_be_bytes());
                data.push(u8::from(body_is_kept));
                data.extend(headers.to_be_bytes());
            }
            Part::Checkpoint { sequence } => {
                data.push(2);
                data.extend(sequence.to_be_bytes());
            }
        }
        data.extend_from_slice(self.context.as_bytes());
        data
    }
}

/// Seals `buffer` in place with the primary key, and returns the head.
pub(crate) fn seal(keys: &Keys, binding: &Binding<'_>, format: Format, buffer: &mut [u8]) -> Result<[u8; HEAD], Fault> {
    let key = keys.primary();
    let mut head = [0; HEAD];
    head[0] = format as u8;
    head[1..PREFIX].copy_from_slice(&key.id.to_be_bytes());
    let data = binding.associated_data(&head[..PREFIX]);
    let tag = key.cipher.encrypt_inout_detached(&nonce(&data), &data, buffer.into()).map_err(|_| Fault::TooLarge)?;
    head[PREFIX..].copy_from_slice(&tag);
    Ok(head)
}

/// Opens `buffer` in place with the key that the head names.
pub(crate) fn open(keys: &Keys, binding: &Binding<'_>, head: &[u8; HEAD], buffer: &mut [u8]) -> Result<Format, Fault> {
    let (prefix, tag) = head.split_at(PREFIX);
    let id = key_of(head);
    let format = match prefix[0] {
        1 => Format::Plain,
        2 => Format::Compressed,
        format => return Err(Fault::Format(format)),
    };
    let key = keys.find(id).ok_or(Fault::Key(id))?;
    let tag = Tag::try_from(tag).map_err(|_| Fault::Damaged("the tag"))?;
    let data = binding.associated_data(prefix);
    let opened = key.cipher.decrypt_inout_detached(&nonce(&data), &data, buffer.into(), &tag);
    opened.map(|()| format).map_err(|_| Fault::NotAuthentic(id))
}

/// The id of the key that sealed a value with this head.
pub(crate) fn key_of(head: &[u8; HEAD]) -> u32 {
    u32::from_be_bytes([head[1], head[2], head[3], head[4]])
}

fn nonce(associated_data: &[u8]) -> Nonce {
    let digest = Sha256::new().chain_update(NONCE).chain_update(associated_data).finalize();
    let mut nonce = Nonce::default();
    nonce.copy_from_slice(&digest[..12]);
    nonce
}
