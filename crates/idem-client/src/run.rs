//! One operation, from its key to its final answer.

use std::sync::Arc;
use std::time::Duration;

use http::header::{EXPECT, HeaderName, HeaderValue, TRANSFER_ENCODING};
use http::{Extensions, HeaderMap, Method};
use idem_core::IdempotencyKey;
use reqwest::{Request, Response, Url};
use reqwest_middleware::Next;
use tower::retry::budget::TpsBudget;

use crate::answer::{Answer, Failure};
use crate::clock::Since;
use crate::error::{Error, ErrorKind};
use crate::exchange::{Arrived, NoAnswer, exchange};
use crate::hosts::{Hosts, count_operation, may_retry};
use crate::keep::{Beginning, KeepError, Kept, Resumed, Rules};
use crate::observer::{Event, EventKind, tell};
use crate::operation::{Operation, bytes_of, header_value};
use crate::report::Report;
use crate::retry_after::only;
use crate::settings::{Settings, shorter};
use crate::table::{Decision, RETENTION};

const KEY: HeaderName = HeaderName::from_static("idempotency-key");
const PREFER: HeaderName = HeaderName::from_static("prefer");

/// Reasons for a repeat by which the operation did not begin.
const RAN_NOTHING: [&str; 4] = ["connect", "too-early", "too-many-requests", "body-incomplete"];

/// The smallest pause between two looks at an empty budget.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// An operation that is being sent.
pub(crate) struct Run<'a> {
    settings: &'a Settings,
    budget: Arc<TpsBudget>,
    request: Request,
    kept: Option<Arc<dyn Kept>>,
    since: Since,
    deadline: Duration,
    rules: Rules,
    stated_retention: Option<Duration>,
    /// Whether an earlier attempt may have reached the operation.
    is_repeat: bool,
    /// Failures since the last progress, for the backoff.
    failures: u32,
    /// Where the answer to a 202 is.
    location: Option<Url>,
    report: Report,
    last_error: Option<KeepError>,
    is_decided: bool,
}

impl<'a> Run<'a> {
    /// Gives the operation its key, and stores it if there is a journal. Nothing is sent.
    pub(crate) async fn begin(
        settings: &'a Settings,
        hosts: &Hosts,
        mut request: Request,
        extensions: &Extensions,
    ) -> Result<Self, Error> {
        let resumed = extensions.get::<Resumed>();
        let usual = Operation::new();
        let operation = extensions.get::<Operation>().unwrap_or(&usual);
        let refused = |kind, source| Error::new(kind, Report::default(), source);
        if resumed.is_none() && request.headers().contains_key(KEY) {
            return Err(refused(ErrorKind::KeyPresent, None));
        }
        let is_repeatable = match settings.keep {
            Some(_) => bytes_of(&request).is_some(),
            None => request.try_clone().is_some(),
        };
        if !is_repeatable {
            return Err(refused(ErrorKind::BodyNotRepeatable, None));
        }
        let key = match resumed {
            Some(resumed) => resumed.key.clone(),
            None => operation.key(&request).ok_or_else(|| refused(ErrorKind::BodyNotRepeatable, None))?,
        };
        let deadline = match resumed {
            Some(resumed) => resumed.deadline,
            None => operation.deadline.unwrap_or(settings.deadline),
        };
        let mut rules = settings.rules();
        let (kept, sent_before) = match (resumed, &settings.keep) {
            (Some(resumed), _) => {
                let retention = shorter(rules.retention, resumed.rules.retention);
                rules = Rules { retention, ..resumed.rules };
                (Some(Arc::clone(&resumed.kept)), resumed.sent_before)
            }
            (None, Some(keep)) => {
                let label = operation.label.as_deref();
                let begun = keep.begin(Beginning { request: &request, key: &key, label, deadline, rules }).await;
                let begun = begun.map_err(|error| refused(ErrorKind::Journal, Some(error)))?;
                (Some(begun.kept), begun.sent_before)
            }
            (None, None) => (None, Duration::ZERO),
        };
        add_headers(settings, request.headers_mut(), &key, rules.bare_key);
        let journal_id = kept.as_ref().map(|kept| kept.id().to_owned());
        Ok(Self {
            settings,
            budget: hosts.budget(request.url()),
            request,
            kept,
            since: Since::now(sent_before),
            rules,
            is_repeat: resumed.is_some(),
            deadline,
            stated_retention: resumed.and_then(|resumed| resumed.stated_retention),
            failures: 0,
            location: None,
            report: Report { key: Some(key), journal_id, ..Report::default() },
            last_error: None,
            is_decided: false,
        })
    }

    /// Sends the operation until it has a final answer.
    pub(crate) async fn finish(
        mut self,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        count_operation(&self.budget);
        loop {
            let attempt = self.attempt(extensions, next.clone()).await;
            let decided = match attempt {
                Ok(arrived) => self.after_answer(arrived).await,
                Err(Ended::Attempt(NoAnswer::Failed(failure, error))) => {
                    self.last_error = error.map(Into::into);
                    let decision = match self.location {
                        Some(_) => self.settings.policy.decide_poll(Err(failure)),
                        None => self.decide(Err(failure)),
                    };
                    self.obey(decision).await
                }
                Err(Ended::Attempt(NoAnswer::Refused(error))) => return Err(error),
                Err(Ended::Stopped(kind)) => Err(kind),
            };
            match decided {
                Ok(None) => {}
                Ok(Some(response)) => return Ok(response),
                Err(kind) => return Err(reqwest_middleware::Error::middleware(self.stop(kind).await)),
            }
        }
    }

    /// Sends the request once, or asks the `Location` of its 202.
    async fn attempt(&mut self, extensions: &mut Extensions, next: Next<'_>) -> Result<Arrived, Ended> {
        let mut timeout = self.settings.attempt_timeout.min(self.deadline_left()?);
        let request = match &self.location {
            Some(location) => poll_of(&self.request, location.clone()),
            None => {
                timeout = timeout.min(self.retention_left()?);
                self.request.try_clone().ok_or(Ended::Stopped(ErrorKind::BodyNotRepeatable))?
            }
        };
        if self.location.is_some() {
            self.report.polls += 1;
            self.tell(EventKind::Polled);
        } else {
            self.report.attempts += 1;
            self.tell(EventKind::Sent);
        }
        exchange(next, request, extensions, timeout, self.settings.body_limit).await.map_err(Ended::Attempt)
    }

    /// Follows the table after an answer: returns the final one, or pauses.
    async fn after_answer(&mut self, arrived: Arrived) -> Result<Option<Response>, ErrorKind> {
        self.last_error = None;
        self.report.last_status = Some(arrived.parts.status);
        let decision = if self.location.is_some() {
            self.settings.policy.decide_poll(Ok(arrived.answer()))
        } else {
            self.learn_retention(&arrived.parts.headers).await;
            self.decide(Ok(arrived.answer()))
        };
        match decision {
            Decision::Final { replayed } => Ok(Some(self.answer(arrived, replayed).await)),
            Decision::Poll { location: Some(location), after } => match self.poll_target(&location) {
                Some(target) => {
                    self.location = Some(target);
                    self.failures = 0;
                    self.pause("accepted", after).await.map(|()| None)
                }
                None => Ok(Some(self.answer(arrived, false).await)),
            },
            decision => self.obey(decision).await,
        }
    }

    fn decide(&self, outcome: Result<Answer<'_>, Failure>) -> Decision {
        match self.is_repeat {
            true => self.settings.policy.decide_repeat(outcome),
            false => self.settings.policy.decide(outcome),
        }
    }

    /// Pauses, or stops.
    async fn obey(&mut self, decision: Decision) -> Result<Option<Response>, ErrorKind> {
        match decision {
            Decision::Retry { reason, after } => {
                self.failures = self.failures.saturating_add(1);
                self.is_repeat |= !RAN_NOTHING.contains(&reason);
                self.pause(reason, after).await?;
                self.take_from_budget().await?;
                Ok(None)
            }
            Decision::Poll { after, .. } => {
                self.failures = self.failures.saturating_add(1);
                self.pause("accepted", after).await.map(|()| None)
            }
            Decision::Stop(stop) => Err(ErrorKind::Stopped(stop)),
            // Does not happen: only an answer is final.
            Decision::Final { .. } => Ok(None),
        }
    }

    async fn pause(&mut self, reason: &'static str, after: Option<Duration>) -> Result<(), ErrorKind> {
        let backoff = self.settings.backoff;
        let pause = match after {
            // Never earlier than the server asks, and not at the same moment as all other clients that it asked.
            Some(after) => after.saturating_add(backoff.pause(1, fastrand::f64())),
            None => backoff.pause(self.failures, fastrand::f64()),
        };
        if pause >= self.deadline.saturating_sub(self.since.active()) {
            return Err(ErrorKind::DeadlineExceeded);
        }
        self.tell(EventKind::Retry { reason, after: pause });
        tokio::time::sleep(pause).await;
        Ok(())
    }

    /// Waits until the host's budget has room for a retry.
    async fn take_from_budget(&mut self) -> Result<(), ErrorKind> {
        let mut is_told = false;
        while !may_retry(&self.budget) {
            if !std::mem::replace(&mut is_told, true) {
                self.tell(EventKind::BudgetEmpty);
            }
            let pause = self.settings.backoff.pause(self.failures, fastrand::f64()).max(LOOK_AGAIN);
            if pause >= self.deadline.saturating_sub(self.since.active()) {
                return Err(ErrorKind::DeadlineExceeded);
            }
            tokio::time::sleep(pause).await;
        }
        Ok(())
    }

    fn deadline_left(&self) -> Result<Duration, Ended> {
        left(self.deadline, self.since.active()).ok_or(Ended::Stopped(ErrorKind::DeadlineExceeded))
    }

    /// The first attempt of a new operation needs no record of the server.
    fn retention_left(&self) -> Result<Duration, Ended> {
        let repeatable_for = self.settings.repeatable_for(self.rules, self.stated_retention);
        left(repeatable_for, self.since.elapsed()).ok_or(Ended::Stopped(ErrorKind::RetentionOver))
    }

    async fn learn_retention(&mut self, headers: &HeaderMap) {
        let stated = only(headers, RETENTION).filter(|value| value.bytes().all(|byte| byte.is_ascii_digit()));
        let Some(stated) = stated.and_then(|value| value.parse().ok()).map(Duration::from_secs) else { return };
        let shortest = shorter(self.stated_retention, Some(stated));
        if std::mem::replace(&mut self.stated_retention, shortest) != shortest
            && let Some(kept) = &self.kept
        {
            let noted = kept.retention_is(shortest.unwrap_or(stated)).await;
            self.note(noted);
        }
    }

    /// The target of a poll. Another origin gets none, because the request's credentials are not its own.
    fn poll_target(&self, location: &str) -> Option<Url> {
        let target = self.request.url().join(location).ok()?;
        (target.origin() == self.request.url().origin()).then_some(target)
    }

    async fn answer(&mut self, mut arrived: Arrived, replayed: bool) -> Response {
        if let Some(kept) = &self.kept {
            let noted = kept.answered(arrived.parts.status, &arrived.parts.headers, &arrived.body).await;
            self.report.journal_failed = noted.is_err();
            self.note(noted);
        }
        self.report.replayed = replayed;
        self.report.elapsed = self.since.active();
        self.is_decided = true;
        self.tell(EventKind::Answered { status: arrived.parts.status, replayed });
        arrived.parts.extensions.insert(self.report.clone());
        arrived.into_response()
    }

    async fn stop(&mut self, kind: ErrorKind) -> Error {
        if let Some(kept) = &self.kept {
            let noted = kept.stopped(kind.name()).await;
            self.note(noted);
        }
        self.report.elapsed = self.since.active();
        self.is_decided = true;
        self.tell(EventKind::Stopped(kind));
        Error::new(kind, std::mem::take(&mut self.report), self.last_error.take())
    }

    fn note(&self, noted: Result<(), KeepError>) {
        if let Err(error) = noted {
            tracing::error!(
                error = &*error as &dyn std::error::Error,
                "the journal did not note how an operation went"
            );
            self.tell(EventKind::JournalFailed);
        }
    }

    fn tell(&self, kind: EventKind) {
        let host = self.request.url().host_str().unwrap_or_default();
        let (attempts, elapsed) = (self.report.attempts, self.since.active());
        tell(self.settings.observer.as_ref(), &Event { kind, host, attempts, elapsed });
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        if !self.is_decided {
            self.tell(EventKind::Abandoned);
        }
    }
}

/// Why there is no answer to decide about.
enum Ended {
    Attempt(NoAnswer),
    Stopped(ErrorKind),
}

/// What is left of a time; `None` if nothing is.
fn left(limit: Duration, elapsed: Duration) -> Option<Duration> {
    limit.checked_sub(elapsed).filter(|left| !left.is_zero())
}

fn add_headers(settings: &Settings, headers: &mut HeaderMap, key: &IdempotencyKey, bare_key: bool) {
    // A key is visible ASCII, so there is always a value.
    if let Some(value) = header_value(key, bare_key) {
        headers.insert(KEY, value);
    }
    let wait_s = settings.wait_s();
    if wait_s > 0 && !headers.contains_key(PREFER) {
        headers.insert(PREFER, HeaderValue::try_from(format!("wait={wait_s}")).unwrap_or(HeaderValue::from_static("")));
    }
}

/// A GET of `location`, with the fields of the request but its key and what describes its body.
fn poll_of(request: &Request, location: Url) -> Request {
    let mut poll = Request::new(Method::GET, location);
    let describes_body = |name: &HeaderName| {
        name.as_str().starts_with("content-") || [KEY, PREFER, EXPECT, TRANSFER_ENCODING].contains(name)
    };
    for (name, value) in request.headers().iter().filter(|(name, _)| !describes_body(name)) {
        poll.headers_mut().append(name, value.clone());
    }
    poll
}
