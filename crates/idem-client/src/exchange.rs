//! One attempt: a request, and its whole answer.

use std::error::Error as StdError;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use bytes::{Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::response::Parts;
use http::{Extensions, StatusCode};
use http_body::Frame;
use http_body_util::BodyExt;
use reqwest::{Body, Request, Response, ResponseBuilderExt, Url};
use reqwest_middleware::Next;

use crate::answer::{Answer, Failure};

/// An answer that has arrived, up to the limit.
pub(crate) struct Arrived {
    pub(crate) parts: Parts,
    url: Url,
    pub(crate) body: Bytes,
    /// What was not read.
    rest: Option<Body>,
    received_at: SystemTime,
}

/// An attempt without an answer.
pub(crate) enum NoAnswer {
    /// The table decides.
    Failed(Failure, Option<reqwest::Error>),
    /// Another middleware failed.
    Refused(reqwest_middleware::Error),
}

/// Sends a request, and reads the answer up to `limit` bytes. Of an error it reads more, if the decision can be in it.
///
/// # Cancellation safety
/// Dropping the future closes the connection. The server may have received the request.
pub(crate) async fn exchange(
    next: Next<'_>,
    request: Request,
    extensions: &mut Extensions,
    timeout: Duration,
    limit: usize,
) -> Result<Arrived, NoAnswer> {
    let attempt = async {
        let response = next.run(request, extensions).await.map_err(no_answer)?;
        read(response, limit).await.map_err(|error| NoAnswer::Failed(failure_of(&error), Some(error)))
    };
    tokio::time::timeout(timeout, attempt).await.unwrap_or(Err(NoAnswer::Failed(Failure::Timeout, None)))
}

fn no_answer(error: reqwest_middleware::Error) -> NoAnswer {
    match error {
        reqwest_middleware::Error::Reqwest(error) => NoAnswer::Failed(failure_of(&error), Some(error)),
        error @ reqwest_middleware::Error::Middleware(_) => NoAnswer::Refused(error),
    }
}

fn failure_of(error: &reqwest::Error) -> Failure {
    if error.is_builder() || error.is_redirect() {
        Failure::Request
    } else if error.is_connect() {
        if is_refused_tls(error) { Failure::Tls } else { Failure::Connect }
    } else if error.is_timeout() {
        Failure::Timeout
    } else {
        Failure::Interrupted
    }
}

/// Whether rustls refused the handshake: it reports that as invalid data.
fn is_refused_tls(error: &reqwest::Error) -> bool {
    let mut source = error.source();
    while let Some(error) = source {
        if error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::InvalidData) {
            return true;
        }
        source = error.source();
    }
    false
}

async fn read(response: Response, limit: usize) -> Result<Arrived, reqwest::Error> {
    let (url, received_at) = (response.url().clone(), SystemTime::now());
    let (parts, mut body) = http::Response::<Body>::from(response).into_parts();
    let is_error = parts.status.is_client_error() || parts.status.is_server_error();
    let limit = if is_error { limit.max(Answer::PROBLEM_BYTES) } else { limit };
    let (mut read, mut rest) = (BytesMut::new(), None);
    if is_endless(&parts) {
        rest = Some(body);
    } else {
        while let Some(frame) = body.frame().await.transpose()? {
            if let Ok(data) = frame.into_data() {
                read.extend_from_slice(&data);
            }
            if read.len() > limit {
                rest = Some(body);
                break;
            }
        }
    }
    Ok(Arrived { parts, url, body: read.freeze(), rest, received_at })
}

/// Whether a body ends only when one side wants it to.
fn is_endless(parts: &Parts) -> bool {
    let content_type = parts.headers.get(CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    parts.status == StatusCode::SWITCHING_PROTOCOLS
        || content_type.to_ascii_lowercase().starts_with(b"text/event-stream")
}

impl Arrived {
    pub(crate) fn answer(&self) -> Answer<'_> {
        let Self { parts, body, rest, received_at, .. } = self;
        let (status, headers) = (parts.status, &parts.headers);
        Answer { status, headers, body, is_whole: rest.is_none(), received_at: *received_at }
    }

    /// The answer for the caller.
    pub(crate) fn into_response(self) -> Response {
        let Self { mut parts, url, body, rest, .. } = self;
        let body = match rest {
            None => Body::from(body),
            Some(rest) => Body::wrap(Continued { read: Some(body).filter(|read| !read.is_empty()), rest }),
        };
        let response = match http::Response::builder().url(url).body(()) {
            Ok(with_url) => with_url.map(|()| body),
            Err(_) => http::Response::new(body),
        };
        let (with_url, body) = response.into_parts();
        parts.extensions.extend(with_url.extensions);
        http::Response::from_parts(parts, body).into()
    }
}

/// What was read of a body, and the rest as it arrives.
struct Continued {
    read: Option<Bytes>,
    rest: Body,
}

impl http_body::Body for Continued {
    type Data = Bytes;
    type Error = reqwest::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, reqwest::Error>>> {
        match self.read.take() {
            Some(read) => Poll::Ready(Some(Ok(Frame::data(read)))),
            None => Pin::new(&mut self.rest).poll_frame(context),
        }
    }
}
