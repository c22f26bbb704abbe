//! The idempotency key: what a client sends to name one logical operation.

use std::fmt;
use std::sync::Arc;

/// The longest key, in bytes.
///
/// 255 is what the large payment APIs accept; a UUID needs 36.
pub const MAX_KEY_BYTES: usize = 255;

/// A validated idempotency key: 1 to 255 visible ASCII characters (`0x21..=0x7E`).
///
/// A key is compared byte for byte. It is never trimmed, folded or truncated, because each of those would make two
/// different operations share one answer. `idem-http` parses the `Idempotency-Key` header syntax around it.
///
/// `Debug` hides the key, so that it does not end up in logs.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IdempotencyKey(Arc<str>);

/// Why a string is not an idempotency key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// No characters at all.
    #[error("the idempotency key is empty; send 1 to 255 visible ASCII characters, for example a UUID")]
    Empty,
    /// More than [`MAX_KEY_BYTES`] bytes.
    #[error("the idempotency key has {bytes} bytes; at most 255 are allowed, and keys are never truncated")]
    TooLong {
        /// The length that was sent, in bytes.
        bytes: usize,
    },
    /// A byte outside `0x21..=0x7E`.
    #[error(
        "the idempotency key has the byte 0x{byte:02X} at offset {offset}; only visible ASCII characters are allowed"
    )]
    InvalidByte {
        /// The offending byte.
        byte: u8,
        /// Where it stands, counted from 0.
        offset: usize,
    },
}

impl IdempotencyKey {
    /// Validates `bytes` as a key.
    ///
    /// # Errors
    /// [`KeyError`] when the input is empty, longer than [`MAX_KEY_BYTES`], or has a byte that is not visible ASCII.
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<Self, KeyError> {
        let bytes = bytes.as_ref();
        if bytes.is_empty() {
            return Err(KeyError::Empty);
        }
        if bytes.len() > MAX_KEY_BYTES {
            return Err(KeyError::TooLong { bytes: bytes.len() });
        }
        if let Some((offset, &byte)) = bytes.iter().enumerate().find(|(_, byte)| !byte.is_ascii_graphic()) {
            return Err(KeyError::InvalidByte { byte, offset });
        }
        // All of it is ASCII, so nothing is lost.
        Ok(Self(String::from_utf8_lossy(bytes).as_ref().into()))
    }

    /// The key as it was sent.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "IdempotencyKey(redacted, {} bytes)", self.0.len())
    }
}

impl std::str::FromStr for IdempotencyKey {
    type Err = KeyError;

    fn from_str(key: &str) -> Result<Self, KeyError> {
        Self::new(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_single_byte_is_accepted_exactly_when_it_is_visible_ascii() {
        for byte in 0..=u8::MAX {
            let key = IdempotencyKey::new([byte]);
            if (0x21..=0x7E).contains(&byte) {
                assert_eq!(key.unwrap().as_str().as_bytes(), [byte]);
            } else {
                assert_eq!(key, Err(KeyError::InvalidByte { byte, offset: 0 }));
            }
        }
    }

    #[test]
    fn length_is_checked_at_both_ends_and_nothing_is_truncated() {
        assert_eq!(IdempotencyKey::new(""), Err(KeyError::Empty));
        let longest = "k".repeat(MAX_KEY_BYTES);
        assert_eq!(IdempotencyKey::new(&longest).unwrap().as_str(), longest);
        assert_eq!(IdempotencyKey::new("k".repeat(256)), Err(KeyError::TooLong { bytes: 256 }));
    }

    #[test]
    fn the_offending_byte_and_its_offset_are_named() {
        assert_eq!(IdempotencyKey::new("ab c"), Err(KeyError::InvalidByte { byte: b' ', offset: 2 }));
        let message = "ab\u{e9}".parse::<IdempotencyKey>().unwrap_err().to_string();
        assert!(message.contains("0xC3 at offset 2"), "{message}");
    }

    #[test]
    fn case_and_surrounding_characters_are_kept() {
        let key: IdempotencyKey = "Ab-\"1\\".parse().unwrap();
        assert_eq!(key.as_str(), "Ab-\"1\\");
        assert_ne!(key, "ab-\"1\\".parse().unwrap());
    }

    #[test]
    fn debug_output_hides_the_key() {
        let key: IdempotencyKey = "secret-key".parse().unwrap();
        assert_eq!(format!("{key:?}"), "IdempotencyKey(redacted, 10 bytes)");
    }
}
