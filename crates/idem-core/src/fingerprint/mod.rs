//! Request fingerprints: digests that tell a reused key from a repeated request.
//!
//! In doubt, requests count as different: a false mismatch is a harmless 422, but a false match replays the wrong
//! answer. So equal fingerprints must mean the same request, and a body that cannot be parsed counts byte for byte.
//!
//! # Version 1
//! SHA-256 over named fields, each framed by its length, and over the SHA-256 of the body. For HTTP, the fields are the
//! method, the path, the query and an allow-list of header fields. The body has one of these forms:
//! - **raw**: The bytes.
//! - **JSON** (RFC 8259): White space and the order of members do not matter. Strings are compared by the characters
//!   that they denote. Numbers are compared as they are written: `9007199254740992` and `9007199254740993` are two
//!   payments, although RFC 8785 makes them one. Members can be ignored by JSON pointer (RFC 6901). Any error of
//!   syntax, invalid UTF-8, a lone surrogate or a duplicate member name makes the whole body raw. So do more than 128
//!   levels, and more than 32,768 members in the objects that are open at once.
//! - **multipart** (RFC 2046 section 5.1): The parts in their order, whatever the boundary. A preamble, an epilogue, a
//!   boundary that does not begin a line, or any error of syntax makes the whole body raw. Its boundary then counts as
//!   a last field called `boundary`.
//!
//! The form of a body follows from its bytes alone, not from its chunks or from what else the process does.

mod body;
mod json;
mod multipart;
mod pointer;

use std::fmt;

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

pub use body::BodyFormat;
pub use pointer::{JsonPointer, JsonPointerError};

use crate::encoding::{Sink, put_field};
use body::{BodyHasher, HashedBody};

/// The digest of a request, and how it was made.
///
/// Digests are compared in constant time, because a request may contain a secret.
#[derive(Clone, Copy)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Fingerprint {
    algorithm: Algorithm,
    digest: [u8; 32],
}

/// The algorithm that made a fingerprint. It is stored with the digest, so that a new one turns no live retries into
/// mismatches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Algorithm(u16);

impl Algorithm {
    /// Version 1, as the module documentation describes it.
    pub const V1: Self = Self(1);

    /// An algorithm by the number that a store kept, perhaps of a newer version than this library knows.
    #[must_use]
    pub const fn from_number(number: u16) -> Self {
        Self(number)
    }

    /// The number to keep.
    #[must_use]
    pub const fn number(self) -> u16 {
        self.0
    }
}

impl Fingerprint {
    /// The fingerprint of an operation without HTTP: its name and its raw input.
    #[must_use]
    pub fn of_bytes(operation: &str, input: &[u8]) -> Self {
        Self::of_body(operation, BodyFormat::Raw, input)
    }

    /// The fingerprint of an operation without HTTP: its name and its JSON input, canonicalised.
    #[must_use]
    pub fn of_json(operation: &str, input: &[u8]) -> Self {
        Self::of_body(operation, BodyFormat::json(), input)
    }

    fn of_body(operation: &str, format: BodyFormat, input: &[u8]) -> Self {
        let mut builder = FingerprintBuilder::new(format);
        builder.field("operation", operation.as_bytes());
        builder.body(input);
        builder.finish()
    }

    /// A fingerprint read back from a store.
    #[must_use]
    pub const fn from_parts(algorithm: Algorithm, digest: [u8; 32]) -> Self {
        Self { algorithm, digest }
    }

    /// How it was made.
    #[must_use]
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// The 32 bytes of the digest.
    #[must_use]
    pub const fn digest(&self) -> &[u8; 32] {
        &self.digest
    }
}

impl PartialEq for Fingerprint {
    fn eq(&self, other: &Self) -> bool {
        let same_digest: bool = self.digest.ct_eq(&other.digest).into();
        same_digest && self.algorithm == other.algorithm
    }
}

impl Eq for Fingerprint {}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Fingerprint(v{}, redacted)", self.algorithm.0)
    }
}

/// Builds a fingerprint while a request arrives.
///
/// Add the fields first, in a fixed order, then the body in chunks of any size: how the body is cut does not matter.
///
/// # Memory
/// For raw and multipart bodies, the builder holds less than 1 KiB. For JSON, it holds up to five times what has
/// arrived, and 1.5 MiB, until [`finish`](Self::finish). It holds the canonical form in a vector that doubles, and the
/// members of open objects. For ordinary documents, the canonical form is shorter than the text.
/// [`holds_body`](Self::holds_body) says whether the body is held.
pub struct FingerprintBuilder {
    head: Sha256,
    body: BodyHasher,
}

impl FingerprintBuilder {
    /// Starts a version 1 fingerprint of a request whose body is in `format`.
    #[must_use]
    pub fn new(format: BodyFormat) -> Self {
        let mut head = Sha256::new();
        put_field(&mut head, b"idem fingerprint v1");
        Self { head, body: BodyHasher::new(format) }
    }

    /// Adds a named field. Fields count in the order in which they are added.
    pub fn field(&mut self, name: &str, value: &[u8]) {
        put_named(&mut self.head, name, value);
    }

    /// Adds the next chunk of the body.
    pub fn body(&mut self, chunk: &[u8]) {
        self.body.update(chunk);
    }

    /// Whether the builder holds memory in proportion to the body. If so, a caller that buffers a slow body anyway can
    /// add it once it is complete.
    #[must_use]
    pub fn holds_body(&self) -> bool {
        self.body.holds_body()
    }

    /// The fingerprint of what was added.
    #[must_use]
    pub fn finish(mut self) -> Fingerprint {
        let HashedBody { form, digest, boundary } = self.body.finish();
        if let Some(boundary) = boundary {
            put_named(&mut self.head, "boundary", &boundary);
        }
        self.head.put(&[form]);
        self.head.put(&digest);
        Fingerprint { algorithm: Algorithm::V1, digest: self.head.finalize().into() }
    }
}

fn put_named(head: &mut Sha256, name: &str, value: &[u8]) {
    head.put(b"F");
    put_field(head, name.as_bytes());
    put_field(head, value);
}

impl fmt::Debug for FingerprintBuilder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("FingerprintBuilder").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
