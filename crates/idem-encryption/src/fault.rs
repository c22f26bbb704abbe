//! Why a stored value does not open.

use idem_core::codec::CodecError;
use idem_core::{RecordId, StoreError, StoreErrorKind};

/// Why a stored value does not open, or cannot be sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Fault {
    #[error(
        "it is not encrypted; if it was written before encryption was switched on, set `reading_unencrypted_records`"
    )]
    Unencrypted,
    #[error("it is sealed in the format {0}, and this version reads 1 and 2; run the version that wrote it")]
    Format(u8),
    #[error("it is sealed under the key {0}, which this process does not have; add that key with `Keys::with_old`")]
    Key(u32),
    #[error(
        "it does not open under the key {0}: the key {0} of this process has other bytes than the one that sealed it, or the value \
         was changed, or belongs to another record; compare the key {0} of all processes, then restore the record from a backup"
    )]
    NotAuthentic(u32),
    #[error("it is sealed, but its outcome is unknown, which has no answer to seal; restore the record from a backup")]
    Unknown,
    #[error("its sealed form is damaged: {0}")]
    Damaged(&'static str),
    #[cfg(not(feature = "compression"))]
    #[error("it is compressed; build this process with the feature `compression` of idem-encryption")]
    Compressed,
    #[error("it is larger than the 64 GiB that can be encrypted")]
    TooLarge,
}

impl Fault {
    pub(crate) fn of(self, id: &RecordId) -> StoreError {
        // Corrupt never leads to another run, nor to endless repeats.
        StoreError::new(StoreErrorKind::Corrupt, format!("the record {id} cannot be read or written: {self}"))
    }
}

impl From<CodecError> for Fault {
    fn from(_: CodecError) -> Self {
        Self::Damaged("the header fields")
    }
}
