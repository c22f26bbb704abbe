//! Whether a write may have taken effect in an attempt whose answer is not the last one.
//!
//! The client repeats a request that got no answer, or a 5xx. If a later attempt is refused, the client returns that refusal alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use aws_sdk_dynamodb::config::interceptors::FinalizerInterceptorContextRef;
use aws_sdk_dynamodb::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_dynamodb::error::BoxError;

/// Watches the attempts of one request. Clones share what they have seen.
#[derive(Debug, Clone, Default)]
pub(crate) struct Attempts(Arc<AtomicBool>);

impl Attempts {
    /// Whether an attempt ended without a refusal.
    pub(crate) fn may_be_done(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Intercept for Attempts {
    fn name(&self) -> &'static str {
        "idem-dynamodb: attempts without a refusal"
    }

    fn read_after_attempt(
        &self,
        context: &FinalizerInterceptorContextRef<'_>,
        _components: &RuntimeComponents,
        _config: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        // Before a request is sent, as without credentials, there is none to look at.
        let is_sent = context.request().is_some();
        let is_refused = context.response().is_some_and(|response| response.status().is_client_error());
        self.0.fetch_or(is_sent && !is_refused, Ordering::Relaxed);
        Ok(())
    }
}
