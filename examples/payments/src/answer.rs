//! An answer, whatever framework sends it.

use bytes::Bytes;
use serde::Serialize;

/// The chunks of a streamed answer, in bytes.
const CHUNK: usize = 16 * 1024;

/// Status, header fields and body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, Vec<u8>)>,
    pub(crate) body: Body,
}

/// A body that is there, or one that is made while it is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Body {
    Whole(Bytes),
    /// So many bytes, whose number nobody declares.
    Stream(usize),
}

impl Answer {
    /// A JSON document.
    pub(crate) fn json(status: u16, document: &impl Serialize) -> Self {
        Self::document(status, "application/json", document)
    }

    /// A document of another media type that is JSON.
    pub(crate) fn document(status: u16, media_type: &str, document: &impl Serialize) -> Self {
        // What this service says are strings and numbers, which always serialise.
        let body = serde_json::to_vec(document).unwrap_or_default().into();
        Self { status, headers: vec![("content-type", media_type.into())], body: Body::Whole(body) }
    }

    /// With one more header line.
    pub(crate) fn header(mut self, name: &'static str, value: impl Into<Vec<u8>>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// Without a body, nor a field that describes it.
    pub(crate) fn without_content(mut self) -> Self {
        self.headers.retain(|(name, _)| *name != "content-type");
        Self { body: Body::Whole(Bytes::new()), ..self }
    }

    /// With another body instead: `bytes` of them, as they come.
    pub(crate) fn stream(mut self, bytes: usize, media_type: &str) -> Self {
        self.headers.retain(|(name, _)| *name != "content-type");
        self.body = Body::Stream(bytes);
        self.header("content-type", media_type)
    }
}

/// The chunks of a body of so many bytes, which take every value.
pub(crate) fn chunks(bytes: usize) -> impl Iterator<Item = Bytes> {
    let chunk: Bytes = (0..=u8::MAX).cycle().take(CHUNK).collect();
    (0..bytes).step_by(CHUNK).map(move |sent| chunk.slice(..CHUNK.min(bytes - sent)))
}
