//! What a run with steps ends with: its steps decide over what its handler says.

use std::time::Duration;

use super::error::StepError;
use super::standing::{StandingStep, StepsState, log_of, unfinished};
use crate::engine::context::Context;
use crate::engine::contract::{Contract, Disposition, ErrorMeaning};
use crate::engine::observer::EventKind;
use crate::record::StoredResponse;
use crate::store::Writes;

/// The end of a run.
pub(in crate::engine) struct Ending {
    pub(in crate::engine) disposition: Disposition,
    /// The steps that no later attempt undoes, of a run that has failed for good.
    pub(in crate::engine) standing: Vec<StandingStep>,
    /// Why the handler's success does not count.
    pub(in crate::engine) denied: Option<StepError>,
    /// Whether a later attempt or an operator needs the steps.
    pub(in crate::engine) keeps_steps: bool,
}

impl Ending {
    /// The end of a run whose handler concluded with `disposition`.
    ///
    /// - A success counts only if no step has failed, and as many were taken as in earlier attempts.
    /// - While the steps go on, the run can neither end for good nor be forgotten.
    /// - After the last attempt it has failed for good, even if `max_attempts` is raised later: the steps that are not undone
    ///   are reported then.
    pub(in crate::engine) fn of(context: &Context, disposition: Disposition) -> Self {
        let state = context.steps_state().or_else(|| before_they_began(context));
        let Some(StepsState { error, standing }) = state else {
            return Self { disposition, standing: Vec::new(), denied: None, keeps_steps: false };
        };
        let meaning = error.as_ref().map(StepError::meaning);
        let is_last = context.attempt() >= context.shared().settings.max_attempts.get() && !standing.is_empty();
        let is_success = matches!(&disposition,
            Disposition::Complete { writes: Writes::Keep, response } if response.status < 400);
        let has_ended = match (meaning, &disposition) {
            (Some(ErrorMeaning::Final), _) => true,
            (_, Disposition::Release { .. }) => false,
            (Some(_), _) | (None, Disposition::Fault { .. } | Disposition::Retry { .. }) => is_last,
            (None, Disposition::Complete { .. } | Disposition::Fail { .. }) => !is_success && !standing.is_empty(),
        };
        let goes_on = meaning.is_some() && !has_ended;
        let runs_again = matches!(disposition, Disposition::Fault { .. } | Disposition::Retry { .. });
        let keeps_steps = goes_on || has_ended || runs_again && !standing.is_empty();
        let after = match meaning {
            Some(ErrorMeaning::Retry { after }) => Some(after),
            _ => None,
        };
        // Without the error, which clients need not see.
        let not_succeeded =
            || StoredResponse::new(500, "the operation returned a success although its steps had not succeeded");
        let told = |response| if is_success { not_succeeded() } else { response };
        let released = || StoredResponse::new(500, "the operation was released while it had steps");
        let disposition = match disposition {
            Disposition::Release { .. } if has_ended => Disposition::Fail { response: released() },
            // A release of the first attempt would forget that a step may have taken effect.
            Disposition::Release { .. } if goes_on && context.attempt() == 1 => {
                Disposition::Retry { response: released(), after: Some(Duration::ZERO) }
            }
            Disposition::Complete { response, .. }
            | Disposition::Fail { response }
            | Disposition::Fault { response }
            | Disposition::Retry { response, .. }
                if has_ended =>
            {
                Disposition::Fail { response: told(response) }
            }
            Disposition::Complete { response, .. }
            | Disposition::Fail { response }
            | Disposition::Fault { response }
                if goes_on =>
            {
                match after {
                    Some(after) => Disposition::Retry { response: told(response), after: Some(after) },
                    None => Disposition::Fault { response: told(response) },
                }
            }
            disposition => disposition,
        };
        let denied = error.filter(|_| is_success);
        Self { disposition, standing: if has_ended { standing } else { Vec::new() }, denied, keeps_steps }
    }
}

/// Reports the steps that stay, if there are any.
pub(in crate::engine) fn report_steps_that_stay(context: &Context, standing: &[StandingStep]) {
    if standing.is_empty() {
        return;
    }
    let steps: Vec<_> = standing.iter().map(|step| format!("{} (key {})", step.step, step.key)).collect();
    tracing::error!(
        record = %context.record_id(),
        steps = steps.join(", "),
        "an operation has failed for good, and these of its steps are not undone; an operator has to undo them"
    );
    context.observe(EventKind::StepsNotUndone(standing));
}

/// How the steps of earlier attempts stand, for a run that has not asked for its steps.
fn before_they_began(context: &Context) -> Option<StepsState> {
    // A route may have got another contract since, under which no operation resumes.
    if context.shared().contract() != Contract::AtLeastOnce {
        return None;
    }
    let log = log_of(context.last_checkpoint()?)?;
    Some(match log {
        Ok(log) => {
            let standing = StandingStep::of_log(context.record_id(), &log, log.failed.as_ref(), false);
            StepsState { error: unfinished(&log, 0), standing }
        }
        Err(error) => StepsState { error: Some(error), standing: Vec::new() },
    })
}
