//! The keys of a process: one to seal with, and any number to open with.

use std::fmt;

use aes_gcm_siv::{AesGcmSiv, KeyInit as _};
use zeroize::Zeroize as _;

/// AES-256-GCM-SIV (RFC 8452). It overwrites its key schedule when it is dropped.
pub(crate) type Cipher = AesGcmSiv<aes::Aes256>;

/// The keys of a process: the primary key seals, and the old keys only open.
///
/// A key has 32 random bytes and an id, which each sealed value names. An id stands for the same bytes for ever: a new key gets a new
/// id. `Debug` shows only ids. Dropping the keys overwrites their key schedules in memory. Copies of
/// the bytes that the compiler made when the array was moved may remain, and so do your own.
#[derive(Clone)]
pub struct Keys {
    primary: Key,
    old: Vec<Key>,
}

#[derive(Clone)]
pub(crate) struct Key {
    pub(crate) id: u32,
    pub(crate) cipher: Cipher,
}

/// Two keys have the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("two keys have the id {id}; give each key another id, because sealed values name their key by it")]
#[non_exhaustive]
pub struct DuplicateKeyId {
    /// The id.
    pub id: u32,
}

impl Keys {
    /// One key, which seals and opens: 32 bytes from a cryptographic random generator.
    #[must_use]
    pub fn new(id: u32, key: [u8; 32]) -> Self {
        Self { primary: Key::new(id, key), old: Vec::new() }
    }

    /// Adds a key that opens what it has sealed, and seals nothing.
    ///
    /// A key that will be the primary one is added in this way first, in every process: see [rotation](crate#rotation).
    ///
    /// # Errors
    /// [`DuplicateKeyId`] when there is a key with this id.
    pub fn with_old(mut self, id: u32, key: [u8; 32]) -> Result<Self, DuplicateKeyId> {
        let key = Key::new(id, key);
        if self.find(id).is_some() {
            return Err(DuplicateKeyId { id });
        }
        self.old.push(key);
        Ok(self)
    }

    /// The id of the key that seals.
    #[must_use]
    pub fn primary_id(&self) -> u32 {
        self.primary.id
    }

    pub(crate) fn primary(&self) -> &Key {
        &self.primary
    }

    pub(crate) fn find(&self, id: u32) -> Option<&Key> {
        std::iter::once(&self.primary).chain(&self.old).find(|key| key.id == id)
    }
}

impl Key {
    fn new(id: u32, mut bytes: [u8; 32]) -> Self {
        let cipher = Cipher::new((&bytes).into());
        bytes.zeroize();
        Self { id, cipher }
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let old: Vec<u32> = self.old.iter().map(|key| key.id).collect();
        write!(formatter, "Keys(primary {}, old {old:?})", self.primary.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_shows_ids_and_no_key() {
        let keys = Keys::new(2, *b"0123456789abcdef0123456789abcdef").with_old(1, [7; 32]).unwrap();
        assert_eq!(format!("{keys:?}"), "Keys(primary 2, old [1])");
        assert_eq!(keys.primary_id(), 2);
    }

    #[test]
    fn an_id_has_one_key() {
        let keys = || Keys::new(2, [2; 32]).with_old(1, [1; 32]).unwrap();
        for id in [1, 2] {
            let error = keys().with_old(id, [3; 32]).unwrap_err();
            assert_eq!(error, DuplicateKeyId { id });
            assert!(error.to_string().contains(&format!("the id {id};")), "{error}");
        }
    }

    #[test]
    fn keys_are_overwritten_when_they_are_dropped() {
        fn overwrites<T: zeroize::ZeroizeOnDrop>() {}
        overwrites::<aes::Aes256>();
    }
}
