//! Between the types of `http` and the neutral ones of the policy.

use std::collections::VecDeque;
use std::error::Error;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::Stream;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use http_body_util::LengthLimitError;
use idem_http::{BodyError, HeaderFields, Reply};

use crate::framework::{BoxError, Framework};

/// Header fields.
pub(crate) struct Fields<'a>(pub(crate) &'a HeaderMap);

impl HeaderFields for Fields<'_> {
    fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> + 'a {
        self.0.get_all(name).into_iter().map(HeaderValue::as_bytes)
    }

    fn lines(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_bytes()))
    }
}

/// The data of a body; its trailers are kept apart.
pub(crate) struct Data<'a, B> {
    body: &'a mut B,
    pub(crate) trailers: Option<HeaderMap>,
}

impl<'a, B> Data<'a, B> {
    pub(crate) fn of(body: &'a mut B) -> Self {
        Self { body, trailers: None }
    }
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin> Stream for Data<'_, B> {
    type Item = Result<Bytes, BoxError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            return Poll::Ready(match ready!(Pin::new(&mut *self.body).poll_frame(context)) {
                None => None,
                Some(Err(error)) => Some(Err(error.into())),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(chunk) => Some(Ok(chunk)),
                    Err(frame) => {
                        self.trailers = frame.into_trailers().ok();
                        continue;
                    }
                },
            });
        }
    }
}

/// Why a request body ended; an outer layer may also limit it.
pub(crate) fn reason(error: BoxError) -> BodyError {
    let error: &(dyn Error + 'static) = &*error;
    let mut causes = std::iter::successors(Some(error), |&error| error.source());
    if causes.any(|cause| cause.is::<LengthLimitError>()) { BodyError::TooLarge } else { BodyError::Incomplete }
}

/// Converts the layer's reply. An invalid status becomes 500, and invalid fields are left out: only a foreign or damaged
/// record can have them.
pub(crate) fn respond<F: Framework>(reply: Reply) -> Response<F::Body> {
    let mut response = Response::new(F::body(Full::new(reply.body)));
    *response.status_mut() = StatusCode::from_u16(reply.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
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

/// A body of chunks that are here, then the rest of the body or the trailers.
pub(crate) fn sendable<F: Framework>(
    chunks: Vec<Bytes>,
    trailers: Option<HeaderMap>,
    rest: Option<F::Body>,
) -> F::Body {
    F::body(Chunks { chunks: chunks.into(), trailers, rest })
}

struct Chunks<B> {
    chunks: VecDeque<Bytes>,
    trailers: Option<HeaderMap>,
    rest: Option<B>,
}

impl<B: Body<Data = Bytes> + Unpin> Body for Chunks<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if let Some(chunk) = self.chunks.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(chunk))));
        }
        if let Some(rest) = &mut self.rest {
            return Pin::new(rest).poll_frame(context);
        }
        Poll::Ready(self.trailers.take().map(|trailers| Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.chunks.is_empty() && self.trailers.is_none() && self.rest.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let here: u64 = self.chunks.iter().map(|chunk| chunk.len() as u64).sum();
        let rest = match &self.rest {
            Some(rest) => rest.size_hint(),
            // HTTP/1.1 has trailers only after a body of undeclared length.
            None if self.trailers.is_some() => SizeHint::new(),
            None => SizeHint::with_exact(0),
        };
        let mut hint = SizeHint::new();
        hint.set_lower(here + rest.lower());
        if let Some(upper) = rest.upper() {
            hint.set_upper(here + upper);
        }
        hint
    }
}
