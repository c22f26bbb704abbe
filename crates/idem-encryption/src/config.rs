//! What an encrypted store can be told.

use std::fmt;

use crate::keys::Keys;
use crate::scope::ScopeSecret;

/// The keys and the options of an [`EncryptedStore`](crate::EncryptedStore).
pub struct EncryptionConfig {
    pub(crate) keys: Keys,
    pub(crate) reads_unencrypted: bool,
    pub(crate) writes_unencrypted: bool,
    #[cfg(feature = "compression")]
    pub(crate) compresses: bool,
    pub(crate) scope_secret: Option<ScopeSecret>,
}

impl EncryptionConfig {
    /// Encryption with these keys.
    #[must_use]
    pub fn new(keys: Keys) -> Self {
        Self {
            keys,
            reads_unencrypted: false,
            writes_unencrypted: false,
            #[cfg(feature = "compression")]
            compresses: false,
            scope_secret: None,
        }
    }

    /// Also reads answers and checkpoints that are not encrypted, for a service that switches encryption on.
    ///
    /// Default off: then such a record is an error of the kind `Corrupt`, and a client of the database cannot replace a sealed answer
    /// by a forged one. Switch it off again after the longest retention, counted from when the last process without
    /// encryption ended.
    #[must_use]
    pub fn reading_unencrypted_records(mut self) -> Self {
        self.reads_unencrypted = true;
        self
    }

    /// Reads sealed values, and seals none, for the first step of switching encryption on: see
    /// [switching it on](crate#switching-it-on). It includes [`reading_unencrypted_records`](Self::reading_unencrypted_records).
    ///
    /// Default off.
    #[must_use]
    pub fn writing_unencrypted_records(mut self) -> Self {
        self.reads_unencrypted = true;
        self.writes_unencrypted = true;
        self
    }

    /// Compresses bodies and checkpoints before they are sealed, if that makes them shorter.
    ///
    /// Default off: lengths stay readable in the store, and a compressed length tells about the content. If one
    /// answer holds a secret and text that a client chose, the client can guess the secret by lengths (CRIME). Every process needs the feature
    /// `compression` to read such records.
    #[cfg(feature = "compression")]
    #[must_use]
    pub fn with_compression(mut self) -> Self {
        self.compresses = true;
        self
    }

    /// Hides principals and operations: the store keeps their HMAC-SHA-256 under this secret, as 64 hexadecimal digits.
    ///
    /// Default off: operators read and filter both. With it, [`Inspect::list`](idem_core::Inspect::list) still filters by the principal
    /// and the operation as the application names them, and shows the digests. The namespace stays readable.
    ///
    /// Give 32 random bytes, the same in every process, that are no encryption key. The secret does not rotate: records from before a
    /// change are not found by their principal and operation any more. Nothing else depends on it.
    #[must_use]
    pub fn hashing_scopes(mut self, secret: [u8; 32]) -> Self {
        self.scope_secret = Some(ScopeSecret::new(secret));
        self
    }
}

impl fmt::Debug for EncryptionConfig {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("EncryptionConfig")
            .field("keys", &self.keys)
            .field("reads_unencrypted", &self.reads_unencrypted)
            .field("writes_unencrypted", &self.writes_unencrypted)
            .field("hashes_scopes", &self.scope_secret.is_some())
            .finish_non_exhaustive()
    }
}
