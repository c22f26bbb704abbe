//! The record id: where the record of a (namespace, scope, key) lives.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::encoding::{Sink, put_field, put_optional};
use crate::key::IdempotencyKey;
use crate::scope::Scope;

/// Names the encoding below; a changed encoding gets a new name, because it moves every record.
const ENCODING: &[u8] = b"idem record id v1";

/// The address of a record: 32 bytes derived from (namespace, scope, key).
///
/// `Debug` and `Display` give lower-case hexadecimal; an id says nothing about the key it was made from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RecordId([u8; 32]);

impl RecordId {
    /// An id read back from a store.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The 32 bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// A key for a call to another system, the same on every attempt of this operation, different for every `step`.
    ///
    /// 64 lower-case hexadecimal digits: SHA-256 over (this id, `step`), so the other system learns nothing of the
    /// caller's key.
    #[must_use]
    pub fn downstream_key(&self, step: &str) -> String {
        let mut hash = Sha256::new();
        put_field(&mut hash, b"idem downstream key v1");
        hash.put(&self.0);
        put_field(&mut hash, step.as_bytes());
        Self(hash.finalize().into()).to_string()
    }
}

impl fmt::Display for RecordId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        // One write instead of 32 formatted numbers, because the span of each operation has the id.
        let mut digits = [0; 64];
        for (pair, byte) in digits.chunks_exact_mut(2).zip(self.0) {
            pair.copy_from_slice(&[DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 0xF)]]);
        }
        formatter.write_str(std::str::from_utf8(&digits).map_err(|_| fmt::Error)?)
    }
}

/// Text that is no record id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the id of a record has 64 hexadecimal digits")]
#[non_exhaustive]
pub struct InvalidRecordId;

impl FromStr for RecordId {
    type Err = InvalidRecordId;

    fn from_str(text: &str) -> Result<Self, InvalidRecordId> {
        if text.len() != 64 || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(InvalidRecordId);
        }
        let mut id = [0; 32];
        for (byte, digits) in id.iter_mut().zip(text.as_bytes().chunks(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| InvalidRecordId)?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| InvalidRecordId)?;
        }
        Ok(Self(id))
    }
}

impl fmt::Debug for RecordId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "RecordId({self})")
    }
}

/// How record ids are made: the namespace, and a secret if there is one.
///
/// The namespace separates applications or environments that share a store. With a secret, ids are HMAC-SHA-256 instead
/// of SHA-256, so that a reader of the store cannot test guesses of keys. Losing or changing the secret orphans every
/// record: when you rotate it, pause for one retention.
#[derive(Clone)]
pub struct RecordIdentity {
    namespace: Arc<str>,
    secret: Option<Hmac<Sha256>>,
}

impl RecordIdentity {
    /// Ids by SHA-256 within `namespace`.
    #[must_use]
    pub fn new(namespace: impl Into<Arc<str>>) -> Self {
        Self { namespace: namespace.into(), secret: None }
    }

    /// Ids by HMAC-SHA-256 with `secret`: at least 32 random bytes, the same in every process.
    ///
    /// # Errors
    /// [`SecretTooShort`] when the secret has fewer than 32 bytes.
    pub fn with_secret(namespace: impl Into<Arc<str>>, secret: &[u8]) -> Result<Self, SecretTooShort> {
        if secret.len() < 32 {
            return Err(SecretTooShort { bytes: secret.len() });
        }
        // HMAC takes a key of any length (RFC 2104 section 2), so the other arm is never reached.
        let secret = Hmac::new_from_slice(secret).map_err(|_| SecretTooShort { bytes: secret.len() })?;
        Ok(Self { namespace: namespace.into(), secret: Some(secret) })
    }

    /// The namespace.
    #[must_use]
    pub fn namespace(&self) -> &Arc<str> {
        &self.namespace
    }

    /// The id of `key` in `scope`.
    #[must_use]
    pub fn record_id(&self, scope: &Scope, key: &IdempotencyKey) -> RecordId {
        let encode = |sink: &mut dyn Sink| {
            let mut sink = sink;
            put_field(&mut sink, ENCODING);
            put_field(&mut sink, self.namespace.as_bytes());
            put_optional(&mut sink, scope.principal().map(str::as_bytes));
            put_field(&mut sink, scope.operation().as_bytes());
            put_field(&mut sink, key.as_str().as_bytes());
        };
        match &self.secret {
            None => {
                let mut hash = Sha256::new();
                encode(&mut hash);
                RecordId(hash.finalize().into())
            }
            Some(secret) => {
                let mut mac = secret.clone();
                encode(&mut mac);
                RecordId(mac.finalize().into_bytes().into())
            }
        }
    }
}

impl Sink for &mut dyn Sink {
    fn put(&mut self, bytes: &[u8]) {
        (**self).put(bytes);
    }
}

impl fmt::Debug for RecordIdentity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.secret.is_some() { "HMAC-SHA-256" } else { "SHA-256" };
        write!(formatter, "RecordIdentity({kind}, {})", self.namespace)
    }
}

/// A secret for record ids that is too short to resist guessing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the record id secret has {bytes} bytes; give at least 32 random bytes")]
pub struct SecretTooShort {
    /// The length that was given, in bytes.
    pub bytes: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(namespace: &str, scope: Scope, key: &str) -> RecordId {
        RecordIdentity::new(namespace).record_id(&scope, &key.parse().unwrap())
    }

    /// Golden: these values are in users' stores. If this test fails, records have moved.
    #[test]
    fn the_released_encoding_never_changes() {
        let plain = id("app", Scope::new("acme", "POST /v1/payments"), "k1");
        assert_eq!(plain.to_string(), "f8f112834a6feee1aa8e14e8ff68add32988bba75a26e05f6d121db0da687df4");
        let single = id("app", Scope::single_tenant("POST /v1/payments"), "k1");
        assert_eq!(single.to_string(), "25b9a0168ed114be57616e18a23b8686ca14e378483b7dcebb793789053ff41a");
        let keyed = RecordIdentity::with_secret("app", &[7; 32]).unwrap();
        let keyed = keyed.record_id(&Scope::new("acme", "POST /v1/payments"), &"k1".parse().unwrap());
        assert_eq!(keyed.to_string(), "ba49c21b0674c453b7f394dad5c806c4597a9c1b09471b8b9ba571da667bac1f");
        assert_eq!(plain.downstream_key("charge"), "d71b6f2b2ff529fd18f92992e632e91c348db425ed1fdc10e21345fa6d1d4d74");
    }

    #[test]
    fn every_part_counts_and_no_boundary_can_be_moved() {
        let ids = [
            id("app", Scope::new("ab", "c"), "k"),
            id("app", Scope::new("a", "bc"), "k"),
            id("app", Scope::new("", "abc"), "k"),
            id("app", Scope::single_tenant("abc"), "k"),
            id("appa", Scope::new("b", "c"), "k"),
            id("app", Scope::new("ab", ""), "ck"),
            id("app", Scope::new("ab", "c"), "k2"),
            id("", Scope::new("ab", "c"), "k"),
        ];
        for (at, left) in ids.iter().enumerate() {
            assert!(ids[at + 1..].iter().all(|right| left != right), "entry {at} collides");
        }
    }

    #[test]
    fn a_secret_changes_every_id_and_is_never_shown() {
        let scope = Scope::new("acme", "pay");
        let key = "k".parse().unwrap();
        let plain = RecordIdentity::new("app");
        let one = RecordIdentity::with_secret("app", &[1; 32]).unwrap();
        let two = RecordIdentity::with_secret("app", &[2; 32]).unwrap();
        assert_ne!(plain.record_id(&scope, &key), one.record_id(&scope, &key));
        assert_ne!(one.record_id(&scope, &key), two.record_id(&scope, &key));
        assert_eq!(one.record_id(&scope, &key), one.clone().record_id(&scope, &key));
        assert_eq!(format!("{one:?} {plain:?}"), "RecordIdentity(HMAC-SHA-256, app) RecordIdentity(SHA-256, app)");
        assert_eq!(plain.namespace().as_ref(), "app");
    }

    #[test]
    fn a_short_secret_is_refused() {
        let error = RecordIdentity::with_secret("app", &[0; 31]).unwrap_err();
        assert_eq!(error, SecretTooShort { bytes: 31 });
    }

    #[test]
    fn downstream_keys_differ_by_step_and_by_record() {
        let one = RecordId::from_bytes([1; 32]);
        assert_eq!(one.downstream_key("charge"), one.downstream_key("charge"));
        assert_ne!(one.downstream_key("charge"), one.downstream_key("refund"));
        assert_ne!(one.downstream_key("charge"), RecordId::from_bytes([2; 32]).downstream_key("charge"));
    }

    #[test]
    fn ids_are_shown_in_hexadecimal_and_read_back() {
        let id = RecordId::from_bytes([0xAB; 32]);
        assert_eq!(format!("{id:?}"), format!("RecordId({})", "ab".repeat(32)));
        assert_eq!(RecordId::from_bytes(*id.as_bytes()), id);
    }
}
