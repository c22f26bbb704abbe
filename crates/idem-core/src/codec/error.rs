//! The error of decoding a stored record.

/// Why a stored record cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// Another version wrote it.
    #[error("the record has format {0}, and this version reads format 1; run the version that wrote it")]
    UnknownFormat(i64),
    /// A part is missing, too long, too short, or not one of its possible values.
    #[error("the stored record is damaged: {0}")]
    Damaged(&'static str),
}
