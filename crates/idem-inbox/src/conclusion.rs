//! What the end of a handler means for the record of its message, and what the record means for the message.

use std::time::Duration;

use idem_core::engine::{Conclusion, Contract, Disposition};
use idem_core::{Replay, ReplayKind, StoredBody, StoredResponse, Writes};

use crate::decision::{Decision, MessageError, ParkReason};

/// How much of an error's text is kept as a reason.
const MAX_REASON_BYTES: usize = 1024;

/// What a run leaves.
pub(crate) enum Left {
    Done,
    Failed(ParkReason),
    AnotherAttempt { after: Option<Duration> },
}

/// What a run means for the count of lost ones.
#[derive(Clone, Copy)]
pub(crate) enum Counts {
    /// It did not run.
    Nothing,
    /// Its handler may have run, and left no trace in the record.
    Lost,
    /// It left an attempt in the record, which counts those, or a result.
    Recorded,
}

/// What a final record means for its message.
pub(crate) fn replayed(replay: &Replay) -> Decision {
    match replay.kind {
        ReplayKind::Completed => Decision::Ack,
        ReplayKind::OutcomeUnknown => Decision::Parked(ParkReason::OutcomeUnknown),
        ReplayKind::Failed => {
            let why = match &replay.response.body {
                StoredBody::Retained(body) => String::from_utf8_lossy(body).into_owned(),
                StoredBody::NotRetained => String::new(),
            };
            let is_lost = why == ParkReason::Lost.to_string();
            Decision::Parked(if is_lost { ParkReason::Lost } else { ParkReason::Failed(why) })
        }
    }
}

/// What a run means for its record.
pub(crate) fn concluded(
    contract: Contract,
    result: Result<(), MessageError>,
    log: impl FnOnce(&str),
) -> Conclusion<Left> {
    match result {
        Ok(()) => {
            let response = StoredResponse::new(204, "");
            conclusion(Left::Done, Disposition::Complete { response, writes: Writes::Keep })
        }
        Err(MessageError::Reject { why }) => {
            let response = failure(&why);
            conclusion(Left::Failed(ParkReason::Failed(why)), Disposition::Fail { response })
        }
        Err(MessageError::Retry { after, why }) => {
            log(&why);
            let response = failure(&why);
            conclusion(Left::AnotherAttempt { after }, Disposition::Retry { response, after })
        }
        Err(MessageError::Fault(error)) => {
            let why = error.to_string();
            log(&why);
            faulted(contract, &why)
        }
    }
}

/// A fault counts as an attempt under every contract but AtMostOnce: a transaction that is rolled back would leave no record, and
/// the message would be delivered without an end.
pub(crate) fn faulted(contract: Contract, why: &str) -> Conclusion<Left> {
    let response = failure(why);
    let again = Left::AnotherAttempt { after: None };
    match contract {
        Contract::AtMostOnce => {
            conclusion(Left::Failed(ParkReason::Failed(why.to_owned())), Disposition::Fault { response })
        }
        Contract::AtLeastOnce => conclusion(again, Disposition::Fault { response }),
        Contract::Transactional => conclusion(again, Disposition::Retry { response, after: None }),
    }
}

pub(crate) fn conclusion(value: Left, disposition: Disposition) -> Conclusion<Left> {
    Conclusion { value, disposition, retention: None }
}

/// The result of a message that has failed. Operators see it, and no client does.
pub(crate) fn failure(why: &str) -> StoredResponse {
    StoredResponse::new(500, shortened(why))
}

/// A text that every database can keep.
pub(crate) fn shortened(text: &str) -> String {
    let end = (0..=MAX_REASON_BYTES.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    text[..end].replace('\0', "")
}
