//! Simulated trouble: the request header `X-Simulate`, obeyed only under `--simulate`.

use std::future::Future;
use std::str::FromStr;
use std::time::Duration;

use idem_http::ResponseDirectives;

use crate::answer::{Answer, End};
use crate::problem::Problem;
use crate::running::Stay;

/// What to simulate, read from a comma list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Simulation {
    /// Logged when the handler begins.
    say: Option<String>,
    hold_before: bool,
    hold_after: bool,
    hold_answer: bool,
    delay_before: Duration,
    delay_after: Duration,
    delay_answer: Duration,
    status_before: Option<u16>,
    status: Option<u16>,
    panic_before: bool,
    panic_after: bool,
    abort_after_effect: bool,
    /// Whether there is a timeout around the handler, inside of the idempotency layer.
    pub(crate) timeout_inside: bool,
    timeout_outside: bool,
    directives: Option<ResponseDirectives>,
    /// Padding of the answer, in bytes.
    pub(crate) padding: usize,
    stream: Option<usize>,
    events: Option<usize>,
    events_held: bool,
    break_off: Option<usize>,
    set_cookie: bool,
    raw_header: bool,
    momentary: bool,
}

/// Fields that concern one connection, one client, or one moment.
const MOMENTARY: [(&str, &str); 11] = [
    ("access-control-allow-origin", "https://first.test"),
    ("connection", "x-hop"),
    ("date", "Thu, 01 Jan 2015 00:00:00 GMT"),
    ("keep-alive", "timeout=5"),
    ("proxy-authenticate", "Basic"),
    ("retry-after", "7"),
    ("server-timing", "db;dur=1"),
    ("www-authenticate", "Basic"),
    ("x-hop", "1"),
    ("x-ratelimit-remaining", "9"),
    ("x-request-id", "first"),
];

impl Simulation {
    /// Reads the header, if simulations are enabled.
    pub(crate) fn from_header(enabled: bool, header: Option<&[u8]>) -> Result<Self, Problem> {
        let Some(value) = header.filter(|_| enabled) else { return Ok(Self::default()) };
        let text = std::str::from_utf8(value).ok().filter(|text| text.is_ascii());
        let text = text.ok_or_else(|| Problem::InvalidSimulation("X-Simulate is ASCII".to_owned()))?;
        let mut simulation = Self::default();
        for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            let (name, value) = item.split_once('=').unwrap_or((item, ""));
            simulation.set(name, value)?;
        }
        Ok(simulation)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), Problem> {
        match name {
            "say" => self.say = Some(value.to_owned()),
            "hold-before" => self.hold_before = true,
            "hold-after" => self.hold_after = true,
            "hold-answer" => self.hold_answer = true,
            "delay-before" => self.delay_before = Duration::from_millis(number(name, value)?),
            "delay-after" => self.delay_after = Duration::from_millis(number(name, value)?),
            "delay-answer" => self.delay_answer = Duration::from_millis(number(name, value)?),
            "status-before" => self.status_before = Some(status(name, value)?),
            "status" => self.status = Some(status(name, value)?),
            "panic-before" => self.panic_before = true,
            "panic-after" => self.panic_after = true,
            "abort-after-effect" => self.abort_after_effect = true,
            "timeout-inside" => self.timeout_inside = true,
            "timeout-outside" => self.timeout_outside = true,
            "body" => self.padding = number(name, value)?,
            "stream" => self.stream = Some(number(name, value)?),
            "events" => self.events = Some(number(name, value)?),
            "events-held" => self.events_held = true,
            "break-off" => self.break_off = Some(number(name, value)?),
            "set-cookie" => self.set_cookie = true,
            "raw-header" => self.raw_header = true,
            "momentary" => self.momentary = true,
            _ => self.direct(name, value)?,
        }
        Ok(())
    }

    /// Reads a handler's directive for the settlement of its response.
    fn direct(&mut self, name: &str, value: &str) -> Result<(), Problem> {
        let directives = self.directives.take().unwrap_or_default();
        self.directives = Some(match name {
            "do-not-store" => directives.do_not_store(),
            "do-not-retain-body" => directives.do_not_retain_body(),
            "keep-writes" => directives.keep_writes(),
            "retain-for" => directives.retain_for(Duration::from_secs(number(name, value)?)),
            "retryable-after" => directives.retryable_after(Duration::from_secs(number(name, value)?)),
            _ => return Err(Problem::InvalidSimulation(format!("{name} is not known"))),
        });
        Ok(())
    }

    /// What happens before the effect; a returned answer takes the place of the effect.
    pub(crate) async fn before(&self, run: &Stay) -> Option<Answer> {
        if let Some(said) = &self.say {
            tracing::warn!(said, "simulated: the handler begins");
        }
        if self.hold_before {
            run.released().await;
        }
        tokio::time::sleep(self.delay_before).await;
        assert!(!self.panic_before, "simulated panic before the effect");
        self.status_before.map(simulated)
    }

    /// What happens after the effect; a returned answer takes the place of the handler's.
    pub(crate) async fn after(&self, run: &Stay) -> Option<Answer> {
        if self.hold_after {
            run.released().await;
        }
        if self.abort_after_effect {
            std::process::abort();
        }
        assert!(!self.panic_after, "simulated panic after the effect");
        tokio::time::sleep(self.delay_after).await;
        self.status.map(simulated)
    }

    /// Adds the directives to an answer.
    pub(crate) fn directed(&self, answer: Answer) -> Answer {
        Answer { directives: self.directives.clone(), ..answer }
    }

    /// Changes the answer of a payment that was made.
    pub(crate) fn dress(&self, mut answer: Answer, run: &Stay) -> Answer {
        if let Some(bytes) = self.stream {
            answer = answer.stream(bytes, End::Whole, "application/octet-stream");
        }
        if let Some(bytes) = self.break_off {
            answer = answer.stream(bytes, End::BrokenOff, "application/octet-stream");
        }
        if let Some(bytes) = self.events {
            answer = answer.stream(bytes, End::Whole, "text/event-stream");
        }
        if self.events_held {
            answer = answer.stream(100, End::Held(run.sending()), "text/event-stream");
        }
        if self.set_cookie {
            answer = answer.header("set-cookie", "session=secret");
        }
        if self.raw_header {
            answer = answer.header("x-raw", b"\xFF\xFE raw");
            answer = answer.header("x-repeated", "one").header("x-repeated", "two");
        }
        if self.momentary {
            answer = MOMENTARY.iter().fold(answer, |answer, (name, value)| answer.header(name, *value));
        }
        answer
    }
}

/// What happens to a request outside of the idempotency layer.
#[derive(Debug, Default)]
pub(crate) struct Outside {
    simulation: Simulation,
    request: Option<Stay>,
}

impl Outside {
    pub(crate) fn new(simulation: Simulation, request: Stay) -> Self {
        Self { simulation, request: Some(request) }
    }

    /// Runs `service`, which answers the request. An answer that is held back is settled already.
    pub(crate) async fn around<T>(self, service: impl Future<Output = T>) -> Result<T, Problem> {
        let Some(request) = self.request else { return Ok(service.await) };
        if self.simulation.timeout_outside {
            return request.until_time_out(service).await;
        }
        let answer = service.await;
        if self.simulation.hold_answer {
            request.released().await;
        }
        tokio::time::sleep(self.simulation.delay_answer).await;
        Ok(answer)
    }
}

fn number<T: FromStr>(name: &str, value: &str) -> Result<T, Problem> {
    value.parse().map_err(|_| Problem::InvalidSimulation(format!("{name} takes a number, as in {name}=100")))
}

fn status(name: &str, value: &str) -> Result<u16, Problem> {
    let status = number(name, value).ok().filter(|status| (200..1000).contains(status));
    status.ok_or_else(|| Problem::InvalidSimulation(format!("{name} takes a final HTTP status, as in {name}=503")))
}

fn simulated(status: u16) -> Answer {
    let answer = Answer::json(status, &serde_json::json!({ "simulated": status }));
    // These two have no content (RFC 9110 sections 15.3.5 and 15.4.5).
    if [204, 304].contains(&status) { answer.without_content() } else { answer }
}
