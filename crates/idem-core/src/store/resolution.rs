//! A resolution from what an operator enters.

use std::time::Duration;

use super::StateName;
use crate::machine::Resolution;
use crate::record::StoredResponse;

/// What an operator entered that makes no resolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidResolution {
    /// A record cannot become in progress.
    #[error("an operation is resolved as completed, failed, retryable or outcome-unknown")]
    State,
    /// An answer is missing.
    #[error("the answer that repeats get needs a status")]
    NoAnswer,
    /// An answer for an operation whose outcome is unknown.
    #[error("with an unknown outcome, repeats get no answer of yours: leave out its status, header fields and body")]
    Answer,
    /// The status is outside of 200 to 599.
    #[error("the status of an answer is 200 to 599")]
    Status,
    /// A success for an operation that took no effect.
    #[error("an operation that took no effect needs a status from 400 on: repeats would take it for a success")]
    Success,
    /// Only a failure that may run again has to wait.
    #[error("only an operation that may run again waits for it")]
    RetryAfter,
}

impl Resolution {
    /// The resolution that gives the record this state.
    ///
    /// Without `retry_after`, an operation may run again at once.
    ///
    /// # Errors
    /// [`InvalidResolution`] if the parts do not fit each other.
    pub fn new(
        state: StateName,
        response: Option<StoredResponse>,
        retry_after: Option<Duration>,
    ) -> Result<Self, InvalidResolution> {
        if retry_after.is_some() && state != StateName::Retryable {
            return Err(InvalidResolution::RetryAfter);
        }
        let response = match (state, response) {
            (StateName::InProgress, _) => return Err(InvalidResolution::State),
            (StateName::OutcomeUnknown, None) => return Ok(Self::OutcomeUnknown),
            (StateName::OutcomeUnknown, Some(_)) => return Err(InvalidResolution::Answer),
            (_, None) => return Err(InvalidResolution::NoAnswer),
            (_, Some(response)) => response,
        };
        match (state, response.status) {
            (_, ..200 | 600..) => Err(InvalidResolution::Status),
            (StateName::Completed, _) => Ok(Self::Completed(response)),
            (_, ..400) => Err(InvalidResolution::Success),
            (StateName::Failed, _) => Ok(Self::FailedTerminal(response)),
            _ => Ok(Self::FailedRetryable { response, retry_after: retry_after.unwrap_or_default() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused() {
        let of = |status| Some(StoredResponse::new(status, "by an operator"));
        let second = Some(Duration::from_secs(1));
        for (state, response, retry_after, expected) in [
            (StateName::InProgress, None, None, InvalidResolution::State),
            (StateName::OutcomeUnknown, of(500), None, InvalidResolution::Answer),
            (StateName::Completed, None, None, InvalidResolution::NoAnswer),
            (StateName::Completed, of(199), None, InvalidResolution::Status),
            (StateName::Retryable, of(600), None, InvalidResolution::Status),
            (StateName::Failed, of(399), None, InvalidResolution::Success),
            (StateName::Retryable, of(200), second, InvalidResolution::Success),
            (StateName::Failed, of(400), second, InvalidResolution::RetryAfter),
        ] {
            assert_eq!(Resolution::new(state, response, retry_after), Err(expected));
        }
    }

    #[test]
    fn each_other_state_can_be_asked_for() {
        let of = |status| StoredResponse::new(status, "by an operator");
        let retryable = |retry_after| Resolution::FailedRetryable { response: of(503), retry_after };
        let second = Duration::from_secs(1);
        for (state, response, retry_after, expected) in [
            (StateName::Completed, Some(of(201)), None, Resolution::Completed(of(201))),
            (StateName::Failed, Some(of(400)), None, Resolution::FailedTerminal(of(400))),
            (StateName::Retryable, Some(of(503)), None, retryable(Duration::ZERO)),
            (StateName::Retryable, Some(of(503)), Some(second), retryable(second)),
            (StateName::OutcomeUnknown, None, None, Resolution::OutcomeUnknown),
        ] {
            assert_eq!(Resolution::new(state, response, retry_after), Ok(expected));
        }
    }
}
