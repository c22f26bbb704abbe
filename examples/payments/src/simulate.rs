//! Trouble on demand: the request header `X-Simulate`, obeyed only under `--simulate`.

use std::str::FromStr;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;

use crate::problem::Problem;

/// The chunks of a streamed answer, in bytes.
const CHUNK: usize = 16 * 1024;

/// What to simulate, read from a comma list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Simulation {
    delay_before: Duration,
    delay_after: Duration,
    delay_answer: Duration,
    status_before: Option<StatusCode>,
    status: Option<StatusCode>,
    panic_before: bool,
    panic_after: bool,
    abort_after_effect: bool,
    /// Padding of the answer, in bytes.
    pub(crate) padding: usize,
    stream: Option<usize>,
    set_cookie: bool,
    raw_header: bool,
}

impl Simulation {
    /// Reads the header, if simulations are enabled.
    pub(crate) fn from_headers(enabled: bool, headers: &HeaderMap) -> Result<Self, Problem> {
        let Some(value) = headers.get("x-simulate").filter(|_| enabled) else { return Ok(Self::default()) };
        let text = value.to_str().map_err(|_| Problem::InvalidSimulation("X-Simulate is ASCII".to_owned()))?;
        let mut simulation = Self::default();
        for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            let (name, value) = item.split_once('=').unwrap_or((item, ""));
            simulation.set(name, value)?;
        }
        Ok(simulation)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), Problem> {
        match name {
            "delay-before" => self.delay_before = Duration::from_millis(number(name, value)?),
            "delay-after" => self.delay_after = Duration::from_millis(number(name, value)?),
            "delay-answer" => self.delay_answer = Duration::from_millis(number(name, value)?),
            "status-before" => self.status_before = Some(status(name, value)?),
            "status" => self.status = Some(status(name, value)?),
            "panic-before" => self.panic_before = true,
            "panic-after" => self.panic_after = true,
            "abort-after-effect" => self.abort_after_effect = true,
            "body" => self.padding = number(name, value)?,
            "stream" => self.stream = Some(number(name, value)?),
            "set-cookie" => self.set_cookie = true,
            "raw-header" => self.raw_header = true,
            _ => return Err(Problem::InvalidSimulation(format!("{name} is not known"))),
        }
        Ok(())
    }

    /// What happens before the effect; a response is answered in its place.
    pub(crate) async fn before(&self) -> Option<Response> {
        tokio::time::sleep(self.delay_before).await;
        assert!(!self.panic_before, "simulated panic before the effect");
        self.status_before.map(simulated)
    }

    /// What happens after the effect; a response is answered in place of the handler's.
    pub(crate) async fn after(&self) -> Option<Response> {
        if self.abort_after_effect {
            std::process::abort();
        }
        assert!(!self.panic_after, "simulated panic after the effect");
        tokio::time::sleep(self.delay_after).await;
        self.status.map(simulated)
    }

    /// What is done to the handler's answer.
    pub(crate) fn dress(&self, mut response: Response) -> Response {
        if let Some(bytes) = self.stream {
            let chunks = (0..bytes).step_by(CHUNK).map(move |sent| {
                let chunk = Bytes::from(vec![b's'; CHUNK.min(bytes - sent)]);
                Ok::<_, std::convert::Infallible>(chunk)
            });
            *response.body_mut() = Body::from_stream(futures_util::stream::iter(chunks));
            let octets = HeaderValue::from_static("application/octet-stream");
            response.headers_mut().remove(header::CONTENT_LENGTH);
            response.headers_mut().insert(header::CONTENT_TYPE, octets);
        }
        if self.set_cookie {
            response.headers_mut().append(header::SET_COOKIE, HeaderValue::from_static("session=secret"));
        }
        if self.raw_header {
            if let Ok(raw) = HeaderValue::from_bytes(b"\xFF\xFE raw") {
                response.headers_mut().append("x-raw", raw);
            }
            response.headers_mut().append("x-repeated", HeaderValue::from_static("one"));
            response.headers_mut().append("x-repeated", HeaderValue::from_static("two"));
        }
        response
    }
}

/// Keeps answers back. It stands outside of the idempotency layer, so that what it keeps back is settled already.
pub(crate) async fn delay_answer(State(enabled): State<bool>, request: Request, next: Next) -> Response {
    // What is not understood is the handler's to refuse.
    let simulation = Simulation::from_headers(enabled, request.headers()).unwrap_or_default();
    let response = next.run(request).await;
    tokio::time::sleep(simulation.delay_answer).await;
    response
}

fn number<T: FromStr>(name: &str, value: &str) -> Result<T, Problem> {
    value.parse().map_err(|_| Problem::InvalidSimulation(format!("{name} takes a number, as in {name}=100")))
}

fn status(name: &str, value: &str) -> Result<StatusCode, Problem> {
    let status = number(name, value).map(StatusCode::from_u16)?.ok().filter(|status| status.as_u16() >= 200);
    status.ok_or_else(|| Problem::InvalidSimulation(format!("{name} takes a final HTTP status, as in {name}=503")))
}

fn simulated(status: StatusCode) -> Response {
    (status, axum::Json(serde_json::json!({ "simulated": status.as_u16() }))).into_response()
}
