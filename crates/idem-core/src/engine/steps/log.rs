//! What the steps of an operation have done, as its checkpoint keeps it.

use serde::{Deserialize, Serialize};

use crate::record_id::RecordId;

/// The name of the checkpoint that holds the log.
pub(in crate::engine) const CHECKPOINT: &str = "idem:steps";

/// The longest log with results. Below the limit of a checkpoint there is room for the message of a failure.
const MAX_RESULT_BYTES: usize = 60 * 1024;

/// The longest kept message of a failed step. JSON may take six bytes for one.
const MAX_MESSAGE_BYTES: usize = 512;

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Log {
    /// The completed steps, in their order.
    pub(super) completed: Vec<Completed>,
    /// The step that ended the way forward.
    pub(super) failed: Option<FailedStep>,
    /// How many steps are undone, counted from the last one. The failed step is one of them.
    pub(super) undone: usize,
    /// How many attempts have begun to undo.
    pub(super) undo_attempts: u32,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Completed {
    pub(super) step: String,
    /// As JSON text: reading it as a value and writing it again would change some numbers.
    pub(super) result: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FailedStep {
    pub(super) step: String,
    pub(super) message: String,
    /// Whether it may have taken effect all the same.
    pub(super) is_in_doubt: bool,
}

impl Log {
    /// The log with one more completed step. The error says why its result cannot be kept.
    pub(super) fn with(&self, step: &str, result: &impl Serialize) -> Result<Self, String> {
        let result =
            serde_json::to_string(result).map_err(|error| format!("its result cannot be written as JSON: {error}"))?;
        let mut log = self.clone();
        log.completed.push(Completed { step: step.to_owned(), result });
        let bytes = log.encode()?.len();
        if bytes > MAX_RESULT_BYTES {
            return Err(format!(
                "the results of all steps have {bytes} bytes; at most {MAX_RESULT_BYTES} are kept, so return an identifier"
            ));
        }
        Ok(log)
    }

    pub(super) fn encode(&self) -> Result<Vec<u8>, String> {
        serde_json::to_vec(self).map_err(|error| error.to_string())
    }
}

impl FailedStep {
    pub(super) fn new(step: &str, message: &str, is_in_doubt: bool) -> Self {
        let fits = |(start, character): &(usize, char)| start + character.len_utf8() <= MAX_MESSAGE_BYTES;
        let message = message.char_indices().take_while(fits).map(|(_, character)| character).collect();
        Self { step: step.to_owned(), message, is_in_doubt }
    }
}

/// The key of a step. An undo has another prefix, so that no name of a step leads to the key of an undo.
pub(super) fn key_of(id: &RecordId, step: &str) -> String {
    id.downstream_key(&format!("step:{step}"))
}
