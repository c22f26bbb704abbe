//! An answer, independent of the framework that sends it.

use std::fmt;
use std::future::ready;

use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use idem_http::ResponseDirectives;
use serde::Serialize;

use crate::running::Stay;

/// The chunks of a streamed answer, in bytes.
const CHUNK: usize = 16 * 1024;

/// Status, header fields and body.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, Vec<u8>)>,
    pub(crate) body: Body,
    /// The handler's directives for the idempotency layer.
    pub(crate) directives: Option<ResponseDirectives>,
}

/// A body that is complete, or one that is made while it is sent.
#[derive(Debug)]
pub(crate) enum Body {
    Whole(Bytes),
    /// So many bytes without a declared length, and then its end.
    Stream(usize, End),
}

/// The end of a body that is made while it is sent.
#[derive(Debug)]
pub(crate) enum End {
    Whole,
    BrokenOff,
    /// Not at all.
    Never,
    /// By a last event, which a test releases.
    Held(Stay),
}

/// The error of a body that broke off.
#[derive(Debug)]
pub(crate) struct BrokenOff;

impl Answer {
    /// A JSON document.
    pub(crate) fn json(status: u16, document: &impl Serialize) -> Self {
        Self::document(status, "application/json", document)
    }

    /// A document of another media type that is JSON.
    pub(crate) fn document(status: u16, media_type: &str, document: &impl Serialize) -> Self {
        // This service answers with strings and numbers, which always serialise.
        let body = serde_json::to_vec(document).unwrap_or_default().into();
        Self { status, headers: vec![("content-type", media_type.into())], body: Body::Whole(body), directives: None }
    }

    /// Adds a header line.
    pub(crate) fn header(mut self, name: &'static str, value: impl Into<Vec<u8>>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// Removes the body and the field that describes it.
    pub(crate) fn without_content(mut self) -> Self {
        self.headers.retain(|(name, _)| *name != "content-type");
        Self { body: Body::Whole(Bytes::new()), ..self }
    }

    /// Replaces the body by a stream of so many bytes, and its end.
    pub(crate) fn stream(mut self, bytes: usize, end: End, media_type: &str) -> Self {
        self.headers.retain(|(name, _)| *name != "content-type");
        self.body = Body::Stream(bytes, end);
        self.header("content-type", media_type)
    }
}

/// The chunks of a streamed body, whose bytes take every value, and its end.
pub(crate) fn chunks(bytes: usize, end: End) -> impl Stream<Item = Result<Bytes, BrokenOff>> + Send {
    let chunk: Bytes = (0..=u8::MAX).cycle().take(CHUNK).collect();
    let chunks = (0..bytes).step_by(CHUNK).map(move |sent| Ok(chunk.slice(..CHUNK.min(bytes - sent))));
    stream::iter(chunks).chain(stream::once(end.come()).filter_map(ready))
}

impl End {
    async fn come(self) -> Option<Result<Bytes, BrokenOff>> {
        match self {
            Self::Whole => None,
            Self::BrokenOff => Some(Err(BrokenOff)),
            Self::Never => std::future::pending().await,
            Self::Held(stay) => {
                stay.released().await;
                Some(Ok(Bytes::from_static(b"data: last\n\n")))
            }
        }
    }
}

impl fmt::Display for BrokenOff {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("the simulated body broke off")
    }
}

impl std::error::Error for BrokenOff {}
