//! The digest of a body in one of its forms.

use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::json::JsonCanonicalizer;
use super::multipart::MultipartHasher;
use super::pointer::JsonPointer;

/// How a body is read for its fingerprint.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum BodyFormat {
    /// Byte for byte.
    Raw,
    /// As JSON text.
    Json {
        /// Members and elements that do not count, such as a time of sending.
        ignored: Arc<[JsonPointer]>,
    },
    /// As the parts of a multipart body.
    Multipart {
        /// The boundary parameter of the content type, without the leading hyphens.
        boundary: Arc<[u8]>,
    },
}

impl BodyFormat {
    /// JSON of which every member counts.
    #[must_use]
    pub fn json() -> Self {
        Self::Json { ignored: Arc::from([]) }
    }

    /// Multipart with this boundary.
    #[must_use]
    pub fn multipart(boundary: impl Into<Arc<[u8]>>) -> Self {
        Self::Multipart { boundary: boundary.into() }
    }
}

/// Hashes a body as it arrives, both raw and in its form: every doubt falls back to the raw digest.
pub(super) struct BodyHasher {
    raw: Sha256,
    form: Form,
}

/// The result of hashing a body.
pub(super) struct HashedBody {
    /// Names the form, so that bodies of different forms never match.
    pub(super) form: u8,
    pub(super) digest: [u8; 32],
    /// The boundary of a multipart body that counts raw: with another one, the same bytes are other parts.
    pub(super) boundary: Option<Vec<u8>>,
}

enum Form {
    Raw,
    Json(Box<JsonCanonicalizer>),
    Multipart(Box<MultipartHasher>),
}

impl BodyHasher {
    pub(super) fn new(format: BodyFormat) -> Self {
        let form = match format {
            BodyFormat::Raw => Form::Raw,
            BodyFormat::Json { ignored } => Form::Json(Box::new(JsonCanonicalizer::new(ignored))),
            BodyFormat::Multipart { boundary } => Form::Multipart(Box::new(MultipartHasher::new(&boundary))),
        };
        Self { raw: Sha256::new(), form }
    }

    pub(super) fn holds_body(&self) -> bool {
        matches!(self.form, Form::Json(_))
    }

    pub(super) fn update(&mut self, chunk: &[u8]) {
        self.raw.update(chunk);
        match &mut self.form {
            Form::Raw => {}
            Form::Json(json) => json.update(chunk),
            Form::Multipart(multipart) => multipart.update(chunk),
        }
    }

    /// The digest in its form, or of the raw bytes.
    pub(super) fn finish(self) -> HashedBody {
        let raw = |boundary| HashedBody { form: b'R', digest: self.raw.finalize().into(), boundary };
        match self.form {
            Form::Raw => raw(None),
            Form::Json(json) => match json.finish() {
                Some(text) => HashedBody { form: b'J', digest: Sha256::digest(text).into(), boundary: None },
                None => raw(None),
            },
            Form::Multipart(multipart) => match multipart.finish() {
                Ok(digest) => HashedBody { form: b'M', digest, boundary: None },
                Err(boundary) => raw(Some(boundary)),
            },
        }
    }
}
