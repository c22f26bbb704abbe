//! What an encrypted store can be told.

use crate::keys::Keys;
use crate::scope::ScopeSecret;

/// The keys and the options of an [`EncryptedStore`](crate::EncryptedStore).
#[derive(Debug)]
pub struct EncryptionConfig {
    pub(crate) keys: Keys,
    pub(crate) options: Options,
}

#[derive(Debug, Default)]
pub(crate) struct Options {
    pub(crate) reads_unencrypted: bool,
    pub(crate) writes_unencrypted: bool,
    #[cfg(feature = "compression")]
    pub(crate) compresses: bool,
    pub(crate) context: String,
    pub(crate) scope_secret: Option<ScopeSecret>,
}

impl EncryptionConfig {
    /// Encryption with these keys.
    #[must_use]
    pub fn new(keys: Keys) -> Self {
        Self { keys, options: Options::default() }
    }

    /// Also reads answers and checkpoints that are not encrypted, for a service that switches encryption on.
    ///
    /// Default off: then such a record is an error of the kind `Corrupt`, and a client of the database cannot replace a sealed answer
    /// by a forged one. Switch it off again when no record is left that was made before the end of the last process that
    /// wrote without encryption.
    #[must_use]
    pub fn reading_unencrypted_records(mut self) -> Self {
        self.options.reads_unencrypted = true;
        self
    }

    /// Reads sealed values, and seals none, for the first step of switching encryption on: see
    /// [switching it on](crate#switching-it-on). It includes [`reading_unencrypted_records`](Self::reading_unencrypted_records).
    ///
    /// Default off.
    #[must_use]
    pub fn writing_unencrypted_records(mut self) -> Self {
        self.options.reads_unencrypted = true;
        self.options.writes_unencrypted = true;
        self
    }

    /// Compresses bodies and checkpoints of up to 1 MiB before they are sealed, if that makes them shorter.
    ///
    /// Default off: lengths stay readable in the store, and a compressed length tells about the content. If one
    /// answer holds a secret and text that a client chose, the client can guess the secret by lengths (CRIME). Every process needs the feature
    /// `compression` to read such records.
    #[cfg(feature = "compression")]
    #[must_use]
    pub fn with_compression(mut self) -> Self {
        self.options.compresses = true;
        self
    }

    /// Binds sealed values to this text, such as `production`: under another one they do not open.
    ///
    /// Default empty. It keeps a client that can write to one database from putting records of another one there, if both have the same
    /// keys. Separate keys do the same, and are better. Give the same text in every process. Records from before a change do not open.
    #[must_use]
    pub fn with_context(mut self, context: impl Into<String>) -> Self {
        self.options.context = context.into();
        self
    }

    /// Hides principals and operations: the store keeps their HMAC-SHA-256 under this secret, as `hmac:` and 64
    /// hexadecimal digits.
    ///
    /// Default off: operators read and filter both. With it, [`Inspect::list`](idem_core::Inspect::list) filters by the principal
    /// and the operation as the application names them, or by their stored form, which it shows.
    /// [`EncryptedStore::stored_principal`](crate::EncryptedStore::stored_principal) gives that form. The namespace stays readable.
    ///
    /// Give 32 random bytes, the same in every process, that are no encryption key. The secret does not rotate: records from before a
    /// change are not found by their principal and operation any more. Nothing else depends on it.
    #[must_use]
    pub fn hashing_scopes(mut self, secret: [u8; 32]) -> Self {
        self.options.scope_secret = Some(ScopeSecret::new(secret));
        self
    }
}
