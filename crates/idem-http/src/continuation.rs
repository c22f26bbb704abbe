//! Work that goes on after its request was answered.

use std::fmt;

use async_trait::async_trait;
use idem_core::engine::ExecuteError;
use idem_core::{RecordId, Replay, StoredResponse};

/// Knows the final answers to requests whose first answer says that the work was accepted; see
/// [`HttpPolicy::continued_by`](crate::HttpPolicy::continued_by).
#[async_trait]
pub trait Continuation: fmt::Debug + Send + Sync + 'static {
    /// The final answer to the request with the record `request`, which completed with the answer `first`. `None` while there
    /// is none, and if the request has no work that continues it: its repeat then gets `first`.
    ///
    /// # Errors
    /// [`ExecuteError`] when it cannot be found out. The repeat gets the answer to a store that is away.
    async fn final_answer(&self, request: &RecordId, first: &StoredResponse) -> Result<Option<Replay>, ExecuteError>;
}
