//! The decision table: what to do after an attempt. It has no clock and does no I/O.

use std::time::Duration;

use http::header::{HeaderName, LOCATION};
use http::{HeaderMap, StatusCode};

use crate::answer::{Answer, Failure};
use crate::profile::Profile;
use crate::retry_after::{only, retry_after};

/// The header by which a server with idem states how long it keeps an answer.
pub(crate) const RETENTION: HeaderName = HeaderName::from_static("idempotency-retention");

/// Where the problem types of a server that uses idem are documented.
const IDEM_PROBLEMS: &str = "https://docs.rs/idem-http/latest/idem_http/problem/index.html#";

/// What to do after an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Decision {
    /// The answer is final: give it to the caller.
    Final {
        /// Whether the server marked it as the answer to an earlier request with this key.
        replayed: bool,
    },
    /// Send the same request with the same key again.
    Retry {
        /// Why, as a name for metrics and logs.
        reason: &'static str,
        /// How long the server asks to wait; `None` if it does not say, so that the client's backoff holds.
        after: Option<Duration>,
    },
    /// The operation goes on after its answer: ask `location` with GET until the answer is final.
    Poll {
        /// The `Location` of the answer, perhaps relative to the URL of the request.
        location: Option<String>,
        /// How long the server asks to wait.
        after: Option<Duration>,
    },
    /// Send nothing: a repeat cannot help now.
    Stop(Stop),
}

/// Why a repeat cannot help.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Stop {
    /// The server does not know whether the operation took effect. An operator may find out, so a journal keeps the operation.
    OutcomeUnknown,
    /// The server cannot read its record of the operation. An operator must look at it, so a journal keeps the operation.
    RecordUnreadable,
    /// The server's layers are misconfigured, and nothing ran. A journal keeps the operation until the server is corrected.
    Misconfigured,
    /// The last answer says nothing about the operation, such as a refused login or a missing route, and an earlier attempt may
    /// have taken effect. A journal keeps the operation until that is corrected.
    NotAnswered,
    /// No attempt can succeed: the server's TLS was refused, or the request cannot be sent.
    CannotSend(Failure),
}

impl Stop {
    /// A name for metrics and logs. Names stay the same in later versions.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::OutcomeUnknown => "outcome-unknown",
            Self::RecordUnreadable => "record-unreadable",
            Self::Misconfigured => "misconfigured",
            Self::NotAnswered => "not-answered",
            Self::CannotSend(_) => "cannot-send",
        }
    }
}

/// Which server decides by which rules.
///
/// Every rule is strict: what is not known to be safe to repeat, and not known to change by a repeat, is final.
#[derive(Debug, Clone)]
pub struct RetryPolicy {
    profile: Profile,
    problem_type_base: String,
    in_progress_types: Vec<String>,
    replay_header: Option<HeaderName>,
    poll: bool,
}

impl RetryPolicy {
    /// The rules for servers of this profile.
    #[must_use]
    pub fn new(profile: Profile) -> Self {
        Self {
            profile,
            problem_type_base: IDEM_PROBLEMS.to_owned(),
            in_progress_types: Vec::new(),
            replay_header: None,
            poll: false,
        }
    }

    /// What the problem types of the server begin with, as its `HttpPolicy::problem_type_base` says.
    ///
    /// Default: the documentation of `idem-http`. Counts for [`Profile::Idem`] only.
    #[must_use]
    pub fn problem_type_base(mut self, base: impl Into<String>) -> Self {
        self.problem_type_base = base.into();
        self
    }

    /// Names a problem type by which the server says that the same operation runs now, so that a 409 with it is repeated.
    ///
    /// Default: none, and a 409 is final, unless the profile names such types. Without a type, a 409 may be the application's
    /// own.
    #[must_use]
    pub fn in_progress_type(mut self, type_uri: impl Into<String>) -> Self {
        self.in_progress_types.push(type_uri.into());
        self
    }

    /// The header by which the server marks replays. Default: `Idempotency-Replayed`, or `Idempotent-Replayed` for Stripe.
    #[must_use]
    pub fn replay_header(mut self, name: HeaderName) -> Self {
        self.replay_header = Some(name);
        self
    }

    /// Polls the `Location` of a 202 until the operation has ended. Default: off, and a 202 is final.
    #[must_use]
    pub fn poll(mut self, poll: bool) -> Self {
        self.poll = poll;
        self
    }

    /// The profile of the server.
    #[must_use]
    pub fn profile(&self) -> Profile {
        self.profile
    }

    /// What to do after an attempt at an operation.
    ///
    /// The first row that fits decides:
    ///
    /// | answer | decision |
    /// |---|---|
    /// | no connection; reset, cut or late answer | retry |
    /// | refused TLS, a request that cannot be sent | stop |
    /// | Idem: problem `outcome-unknown`, `record-unreadable`, `misconfigured` | stop |
    /// | a problem document, or a 409 of Stripe, whose body was not read whole and may say one of these things or those below | retry |
    /// | 202, with [`poll`](Self::poll) and a `Location` | poll |
    /// | marked as a replay | final |
    /// | Idem: problem `in-progress`, `backoff`, `body-incomplete`; a type of [`in_progress_type`](Self::in_progress_type) | retry |
    /// | Stripe: `Stripe-Should-Retry: false` | final |
    /// | Stripe: `Stripe-Should-Retry: true`; 409 `idempotency_key_in_use` | retry |
    /// | 408, 425, 429 | retry |
    /// | 501, 505: the server never serves such requests | final |
    /// | other 5xx, of the server or of a proxy | retry |
    /// | everything else: 2xx, 3xx, other 4xx | final |
    ///
    /// A redirect is final, and its target never gets the key.
    #[must_use]
    pub fn decide(&self, outcome: Result<Answer<'_>, Failure>) -> Decision {
        let answer = match outcome {
            Ok(answer) => answer,
            Err(failure) => return after_failure(failure),
        };
        let after = retry_after(answer.headers, answer.received_at);
        let problem = self.problem(&answer);
        if let Some(stop) = problem.as_deref().and_then(stop_of) {
            return Decision::Stop(stop);
        }
        if self.is_undecidable(&answer) {
            return Decision::Retry { reason: "unreadable", after };
        }
        if answer.status == StatusCode::ACCEPTED && self.poll {
            let location = only(answer.headers, LOCATION).map(str::to_owned);
            if location.is_some() {
                return Decision::Poll { location, after };
            }
        }
        let replayed = self.is_replay(answer.headers);
        if replayed {
            return Decision::Final { replayed };
        }
        let reason = match problem.as_deref() {
            Some("in-progress") => Some("in-progress"),
            Some("backoff") => Some("backoff"),
            Some("body-incomplete") => Some("body-incomplete"),
            _ => self.by_stripe(&answer).unwrap_or_else(|| by_status(answer.status)),
        };
        reason.map_or(Decision::Final { replayed }, |reason| Decision::Retry { reason, after })
    }

    /// What to do after an attempt, if an earlier one may have reached the operation.
    ///
    /// The same as [`decide`](Self::decide), but for an answer that is neither a replay nor states by `Idempotency-Retention` that
    /// its record is kept:
    ///
    /// | answer | decision |
    /// |---|---|
    /// | 3xx, 401, 403, 404, 405, 407, 421 | stop |
    ///
    /// Logins, firewalls, load balancers and routers give such answers without a look at the operation.
    #[must_use]
    pub fn decide_repeat(&self, outcome: Result<Answer<'_>, Failure>) -> Decision {
        let is_of_a_gate =
            outcome.as_ref().is_ok_and(|answer| is_of_a_gate(answer.status) && !answer.headers.contains_key(RETENTION));
        match self.decide(outcome) {
            Decision::Final { replayed: false } if is_of_a_gate => Decision::Stop(Stop::NotAnswered),
            decision => decision,
        }
    }

    /// What to do after a poll of a 202's `Location`.
    ///
    /// | answer | decision |
    /// |---|---|
    /// | as for an operation: no answer; 408, 425, 429; 5xx but 501 and 505 | retry |
    /// | 202; 200 with `Retry-After`, by which `idem-jobs` says that the job has not ended | poll again |
    /// | 3xx but 303, 401, 403, 404, 405, 407, 421 | stop |
    /// | everything else | final |
    ///
    /// A login that has expired, or a router that does not know the `Location`, says nothing about the operation, which may still
    /// run. A request with the same key asks for it again.
    #[must_use]
    pub fn decide_poll(&self, outcome: Result<Answer<'_>, Failure>) -> Decision {
        let answer = match outcome {
            Ok(answer) => answer,
            Err(failure) => return after_failure(failure),
        };
        let after = retry_after(answer.headers, answer.received_at);
        match answer.status {
            StatusCode::ACCEPTED => Decision::Poll { location: None, after },
            StatusCode::OK if after.is_some() => Decision::Poll { location: None, after },
            // "See other" is how a monitor names the resource that was made.
            status if status != StatusCode::SEE_OTHER && is_of_a_gate(status) => Decision::Stop(Stop::NotAnswered),
            status => match by_status(status) {
                Some(reason) => Decision::Retry { reason, after },
                None => Decision::Final { replayed: false },
            },
        }
    }

    /// The name of the answer's problem, if it is one of the server's idempotency layer.
    fn problem(&self, answer: &Answer<'_>) -> Option<String> {
        if !answer.status.is_client_error() && !answer.status.is_server_error() {
            return None;
        }
        let problem_type = answer.problem_type()?;
        if self.in_progress_types.contains(&problem_type) {
            return Some("in-progress".to_owned());
        }
        let name = problem_type.strip_prefix(&self.problem_type_base).filter(|_| self.profile == Profile::Idem)?;
        Some(name.to_owned())
    }

    /// Whether the part of the body that was not read may change the decision. A repeat is safe, and a wrong end is not.
    fn is_undecidable(&self, answer: &Answer<'_>) -> bool {
        if answer.is_whole {
            return false;
        }
        let knows_problems = self.profile == Profile::Idem || !self.in_progress_types.is_empty();
        let is_error = answer.status.is_client_error() || answer.status.is_server_error();
        // A replayed problem may be an unknown outcome, which is a 504. Other replays are final, whatever they say.
        let may_be_final = answer.status.is_client_error() && self.is_replay(answer.headers);
        if knows_problems && is_error && answer.is_problem() && !may_be_final {
            return true;
        }
        let is_told = only(answer.headers, "stripe-should-retry").is_some() || self.is_replay(answer.headers);
        self.profile == Profile::Stripe && answer.status == StatusCode::CONFLICT && answer.is_json() && !is_told
    }

    fn is_replay(&self, headers: &HeaderMap) -> bool {
        let marked = match &self.replay_header {
            Some(name) => only(headers, name),
            None => only(headers, self.profile.replay_header()),
        };
        marked.is_some_and(|value| value.eq_ignore_ascii_case("true"))
    }

    /// What Stripe's own rules say: `None` if they leave it to the status.
    fn by_stripe(&self, answer: &Answer<'_>) -> Option<Option<&'static str>> {
        if self.profile != Profile::Stripe {
            return None;
        }
        match only(answer.headers, "stripe-should-retry") {
            Some("true") => Some(Some("stripe-should-retry")),
            Some("false") => Some(None),
            _ if answer.status == StatusCode::CONFLICT => {
                let in_use = answer.stripe_code().as_deref() == Some("idempotency_key_in_use");
                in_use.then_some(Some("in-progress"))
            }
            _ => None,
        }
    }
}

fn after_failure(failure: Failure) -> Decision {
    match failure {
        Failure::Connect | Failure::Timeout | Failure::Interrupted => {
            Decision::Retry { reason: failure.name(), after: None }
        }
        Failure::Tls | Failure::Request => Decision::Stop(Stop::CannotSend(failure)),
    }
}

fn stop_of(problem: &str) -> Option<Stop> {
    match problem {
        "outcome-unknown" => Some(Stop::OutcomeUnknown),
        "record-unreadable" => Some(Stop::RecordUnreadable),
        "misconfigured" => Some(Stop::Misconfigured),
        _ => None,
    }
}

/// Whether logins, firewalls, load balancers and routers give such an answer.
fn is_of_a_gate(status: StatusCode) -> bool {
    status.is_redirection() || matches!(status.as_u16(), 401 | 403 | 404 | 405 | 407 | 421)
}

/// Why an answer with this status is repeated.
fn by_status(status: StatusCode) -> Option<&'static str> {
    match status.as_u16() {
        408 => Some("request-timeout"),
        425 => Some("too-early"),
        429 => Some("too-many-requests"),
        501 | 505 => None,
        503 => Some("unavailable"),
        500..600 => Some("server-error"),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
