//! What a run with steps ends with: its steps decide over what its handler says.

use std::time::Duration;

use super::error::StepError;
use super::standing::{StandingStep, log_of};
use super::unfinished;
use crate::engine::context::Context;
use crate::engine::contract::Disposition;
use crate::engine::observer::EventKind;
use crate::engine::run::ErrorMeaning;
use crate::record::StoredResponse;
use crate::store::Writes;

/// How the steps of a run stand.
#[derive(Debug, Clone, Default)]
pub(in crate::engine) struct StepsState {
    /// Why the operation cannot succeed as they stand.
    pub(in crate::engine) error: Option<StepError>,
    /// Those that are not undone, the last one first.
    pub(in crate::engine) standing: Vec<StandingStep>,
}

/// The end of a run.
pub(in crate::engine) struct Ending {
    pub(in crate::engine) disposition: Disposition,
    /// The steps that no later attempt undoes, of a run that has failed for good.
    pub(in crate::engine) standing: Vec<StandingStep>,
    /// Why the handler's success does not count.
    pub(in crate::engine) denied: Option<StepError>,
    /// Whether a later attempt goes on with the steps.
    pub(in crate::engine) goes_on: bool,
}

impl Ending {
    /// The end of a run whose handler concluded with `disposition`.
    ///
    /// - A success counts only if no step has failed, and as many were taken as in earlier attempts.
    /// - While the steps go on, the run can neither end for good nor be forgotten.
    /// - After the last attempt it has failed for good, even if `max_attempts` is raised later: the steps that are not undone
    ///   are reported then.
    pub(in crate::engine) fn of(context: &Context, disposition: Disposition) -> Self {
        let Some(StepsState { error, standing }) = context.steps_state().or_else(|| before_they_began(context)) else {
            return Self { disposition, standing: Vec::new(), denied: None, goes_on: false };
        };
        let meaning = error.as_ref().map(StepError::meaning);
        let is_last = context.attempt() >= context.shared().settings.max_attempts.get() && !standing.is_empty();
        let is_success = matches!(disposition, Disposition::Complete { writes: Writes::Keep, .. });
        let has_ended = match (meaning, &disposition) {
            (_, Disposition::Release { .. }) => false,
            (Some(meaning), _) => meaning == ErrorMeaning::Final || is_last,
            (None, Disposition::Fault { .. } | Disposition::Retry { .. }) => is_last,
            (None, Disposition::Complete { .. } | Disposition::Fail { .. }) => !is_success && !standing.is_empty(),
        };
        let goes_on = meaning.is_some() && !has_ended;
        let is_forgotten = context.attempt() == 1 && standing.is_empty();
        let after = match meaning {
            Some(ErrorMeaning::Retry { after }) => Some(after),
            _ => None,
        };
        let denied = error.filter(|_| is_success);
        let disposition = match disposition {
            // A release would forget that a step may have taken effect.
            Disposition::Release { .. } if goes_on && is_forgotten => {
                let response = StoredResponse::new(500, "the operation was released while it had steps");
                Disposition::Retry { response, after: Some(Duration::ZERO) }
            }
            Disposition::Complete { writes: Writes::Keep, .. } if has_ended => {
                Disposition::Fail { response: not_succeeded() }
            }
            Disposition::Complete { writes: Writes::Keep, .. } if goes_on => again(not_succeeded(), after),
            Disposition::Complete { response, .. }
            | Disposition::Fail { response }
            | Disposition::Fault { response }
            | Disposition::Retry { response, .. }
                if has_ended =>
            {
                Disposition::Fail { response }
            }
            Disposition::Complete { response, .. }
            | Disposition::Fail { response }
            | Disposition::Fault { response }
                if goes_on =>
            {
                again(response, after)
            }
            disposition => disposition,
        };
        Self { disposition, standing: if has_ended { standing } else { Vec::new() }, denied, goes_on }
    }

    /// Reports the steps that stay, if there are any.
    pub(in crate::engine) fn report(&self, context: &Context) {
        if self.standing.is_empty() {
            return;
        }
        let steps: Vec<_> = self.standing.iter().map(|step| format!("{} (key {})", step.step, step.key)).collect();
        tracing::error!(
            record = %context.id(),
            steps = steps.join(", "),
            "an operation has failed for good, and these of its steps are not undone; an operator has to undo them"
        );
        context.observe(EventKind::StepsNotUndone(&self.standing));
    }
}

fn again(response: StoredResponse, after: Option<Duration>) -> Disposition {
    match after {
        Some(after) => Disposition::Retry { response, after: Some(after) },
        None => Disposition::Fault { response },
    }
}

/// Without the error, which clients need not see.
fn not_succeeded() -> StoredResponse {
    StoredResponse::new(500, "the operation returned a success although its steps had not succeeded")
}

/// How the steps of earlier attempts stand, for a run that has not asked for its steps.
fn before_they_began(context: &Context) -> Option<StepsState> {
    let log = log_of(context.last_checkpoint()?)?;
    Some(match log {
        Ok(log) => {
            let standing = StandingStep::of_log(context.id(), &log, log.failed.as_ref(), false);
            StepsState { error: unfinished(&log, 0), standing }
        }
        Err(error) => StepsState { error: Some(error), standing: Vec::new() },
    })
}
