//! Trouble on demand: the request header `X-Simulate`, obeyed only under `--simulate`.

use std::collections::HashMap;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;
use tokio::sync::Notify;

use crate::answer::Answer;
use crate::problem::Problem;

/// What to simulate, read from a comma list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Simulation {
    hold_before: bool,
    hold_after: bool,
    delay_before: Duration,
    delay_after: Duration,
    delay_answer: Duration,
    status_before: Option<u16>,
    status: Option<u16>,
    panic_before: bool,
    panic_after: bool,
    abort_after_effect: bool,
    /// Padding of the answer, in bytes.
    pub(crate) padding: usize,
    stream: Option<usize>,
    events: Option<usize>,
    set_cookie: bool,
    raw_header: bool,
    momentary: bool,
}

/// Fields that say something of one connection, one client, or one moment.
const MOMENTARY: [(&str, &str); 7] = [
    ("access-control-allow-origin", "https://first.test"),
    ("proxy-authenticate", "Basic"),
    ("retry-after", "7"),
    ("server-timing", "db;dur=1"),
    ("www-authenticate", "Basic"),
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
            "hold-before" => self.hold_before = true,
            "hold-after" => self.hold_after = true,
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
            "events" => self.events = Some(number(name, value)?),
            "set-cookie" => self.set_cookie = true,
            "raw-header" => self.raw_header = true,
            "momentary" => self.momentary = true,
            _ => return Err(Problem::InvalidSimulation(format!("{name} is not known"))),
        }
        Ok(())
    }

    /// What happens before the effect; an answer is given in its place.
    pub(crate) async fn before(&self, run: &Run<'_>) -> Option<Answer> {
        if self.hold_before {
            run.released().await;
        }
        tokio::time::sleep(self.delay_before).await;
        assert!(!self.panic_before, "simulated panic before the effect");
        self.status_before.map(simulated)
    }

    /// What happens after the effect; an answer is given in place of the handler's.
    pub(crate) async fn after(&self, run: &Run<'_>) -> Option<Answer> {
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

    /// Keeps an answer back. It is called outside of the idempotency layer, so that the answer is settled already.
    pub(crate) async fn delay_answer(&self) {
        tokio::time::sleep(self.delay_answer).await;
    }

    /// What is done to the handler's answer.
    pub(crate) fn dress(&self, mut answer: Answer) -> Answer {
        if let Some(bytes) = self.stream {
            answer = answer.stream(bytes, "application/octet-stream");
        }
        if let Some(bytes) = self.events {
            answer = answer.stream(bytes, "text/event-stream");
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

/// How far the runs of each tenant are that are under way, for tests that wait for them.
#[derive(Debug, Default)]
pub(crate) struct Running(Mutex<HashMap<String, Runs>>);

/// The runs of one tenant.
#[derive(Debug, Default)]
struct Runs {
    stages: Stages,
    release: Arc<Notify>,
}

/// How many runs of a tenant are before their effect, and how many after it.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct Stages {
    before: u32,
    after: u32,
}

/// One run that is under way.
#[derive(Debug)]
pub(crate) struct Run<'a> {
    running: &'a Running,
    tenant: &'a str,
    has_effect: bool,
}

impl Running {
    pub(crate) fn stages(&self, tenant: &str) -> Stages {
        self.lock().get(tenant).map(|runs| runs.stages).unwrap_or_default()
    }

    /// Lets a run of the tenant go on that is held, or the next one that would be.
    pub(crate) fn release(&self, tenant: &str) {
        if let Some(runs) = self.lock().get(tenant) {
            runs.release.notify_one();
        }
    }

    pub(crate) fn begin<'a>(&'a self, tenant: &'a str) -> Run<'a> {
        self.change(tenant, |stages| stages.before += 1);
        Run { running: self, tenant, has_effect: false }
    }

    fn change(&self, tenant: &str, change: impl FnOnce(&mut Stages)) {
        let mut running = self.lock();
        let runs = running.entry(tenant.to_owned()).or_default();
        change(&mut runs.stages);
        if runs.stages.before + runs.stages.after == 0 {
            running.remove(tenant);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Runs>> {
        // Every change is one step on one entry, so a panic leaves the map whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Run<'_> {
    async fn released(&self) {
        let release = self.running.lock().get(self.tenant).map(|runs| Arc::clone(&runs.release));
        if let Some(release) = release {
            release.notified().await;
        }
    }

    pub(crate) fn has_effect(&mut self) {
        self.has_effect = true;
        self.running.change(self.tenant, |stages| {
            stages.before -= 1;
            stages.after += 1;
        });
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        let has_effect = self.has_effect;
        self.running.change(self.tenant, |stages| if has_effect { stages.after -= 1 } else { stages.before -= 1 });
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
