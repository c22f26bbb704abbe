//! Between actix's types and the neutral ones of the policy.

use std::collections::VecDeque;
use std::error::Error;
use std::pin::Pin;
use std::task::{Context, Poll};

use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::dev::Payload;
use actix_web::error::PayloadError;
use actix_web::http::StatusCode;
use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};
use actix_web::{HttpMessage, HttpResponse};
use bytes::Bytes;
use futures_util::{Stream, stream};
use idem_http::{BodyError, HeaderFields, Reply};

/// Actix's header fields. It keeps the order of lines with one name, and none between names.
pub(crate) struct Fields<'a>(pub(crate) &'a HeaderMap);

impl HeaderFields for Fields<'_> {
    fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> + 'a {
        self.0.get_all(name).map(HeaderValue::as_bytes)
    }

    fn lines(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_bytes()))
    }
}

/// Takes the chunks of a request body out of the request.
pub(crate) fn arriving(
    request: &mut impl HttpMessage<Stream: Stream<Item = Result<Bytes, PayloadError>> + Unpin>,
) -> impl Stream<Item = Result<Bytes, BodyError>> {
    use futures_util::TryStreamExt;
    request.take_payload().map_err(|error| match error {
        // An outer middleware may also limit the body.
        PayloadError::Overflow => BodyError::TooLarge,
        _ => BodyError::Incomplete,
    })
}

/// A request body that has arrived.
pub(crate) fn payload(chunks: Vec<Bytes>) -> Payload {
    match <[Bytes; 1]>::try_from(chunks) {
        Ok([chunk]) => Payload::from(chunk),
        Err(chunks) => Payload::Stream { payload: Box::pin(stream::iter(chunks.into_iter().map(Ok))) },
    }
}

/// Converts the layer's reply. An invalid status becomes 500, and invalid fields are left out: only a foreign or damaged
/// record can have them.
pub(crate) fn respond(reply: Reply) -> HttpResponse {
    let status = StatusCode::from_u16(reply.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = HttpResponse::with_body(status, BoxBody::new(reply.body));
    for (name, value) in reply.headers {
        if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(&name), HeaderValue::from_maybe_shared(value)) {
            response.headers_mut().append(name, value);
        }
    }
    if let Some(kind) = reply.problem {
        response.extensions_mut().insert(kind);
        response.extensions_mut().insert(kind.directives());
    }
    response
}

/// The chunks of a response body.
pub(crate) struct Data<'a>(pub(crate) &'a mut BoxBody);

impl Stream for Data<'_> {
    type Item = Result<Bytes, Box<dyn Error>>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.as_pin_mut().poll_next(context)
    }
}

/// A body of chunks that are here, then the rest of the body that they were taken from, whose size was `whole`.
pub(crate) fn sendable(chunks: Vec<Bytes>, whole: BodySize, rest: Option<BoxBody>) -> BoxBody {
    let size = match &rest {
        Some(_) => whole,
        None => BodySize::Sized(chunks.iter().map(|chunk| chunk.len() as u64).sum()),
    };
    BoxBody::new(Chunks { chunks: chunks.into(), size, rest })
}

struct Chunks {
    chunks: VecDeque<Bytes>,
    size: BodySize,
    rest: Option<BoxBody>,
}

impl MessageBody for Chunks {
    type Error = Box<dyn Error>;

    fn size(&self) -> BodySize {
        self.size
    }

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, Box<dyn Error>>>> {
        if let Some(chunk) = self.chunks.pop_front() {
            return Poll::Ready(Some(Ok(chunk)));
        }
        match &mut self.rest {
            Some(rest) => rest.as_pin_mut().poll_next(context),
            None => Poll::Ready(None),
        }
    }
}
