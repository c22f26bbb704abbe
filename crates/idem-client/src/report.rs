//! What a caller learns besides the answer.

use std::time::Duration;

use http::StatusCode;
use idem_core::IdempotencyKey;

/// How an operation went. It is in the extensions of the final answer, and in an [`Error`](crate::Error).
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Report {
    /// The key that was sent; `None` if the operation was refused before it had one. `Debug` hides it.
    pub key: Option<IdempotencyKey>,
    /// How often the request was sent, by this client and since its start.
    pub attempts: u32,
    /// How often the `Location` of a 202 was asked.
    pub polls: u32,
    /// How long the operation took, with all pauses.
    pub elapsed: Duration,
    /// Whether the server marked the final answer as that to an earlier request with this key.
    pub replayed: bool,
    /// The last status that arrived, whatever followed.
    pub last_status: Option<StatusCode>,
    /// The id of the operation in the journal, to forget it once the answer is used, or to resume it if there is none. `None`
    /// without a journal, and if the operation was refused before it was stored.
    pub journal_id: Option<String>,
    /// Whether a journal could not note the final answer. It will resume the operation, which then gets the same answer.
    pub journal_failed: bool,
}

impl Report {
    /// The report in the extensions of an answer.
    #[must_use]
    pub fn of(response: &reqwest::Response) -> Option<&Self> {
        response.extensions().get()
    }
}
