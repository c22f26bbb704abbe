//! The port of a journal, as the middleware sees it.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http::{HeaderMap, StatusCode};
use idem_core::IdempotencyKey;
use reqwest::Request;

pub(crate) type KeepError = Box<dyn Error + Send + Sync>;

/// Keeps operations until they have a final answer.
#[async_trait]
pub(crate) trait Keep: fmt::Debug + Send + Sync {
    /// Stores an operation durably. Nothing was sent before, unless an operation with the same key has its answer.
    async fn begin(&self, operation: Beginning<'_>) -> Result<Begun, KeepError>;
}

/// An operation that is about to be sent.
#[cfg_attr(not(feature = "journal"), expect(dead_code, reason = "only a journal reads it"))]
#[derive(Clone, Copy)]
pub(crate) struct Beginning<'a> {
    pub(crate) request: &'a Request,
    pub(crate) key: &'a IdempotencyKey,
    pub(crate) label: Option<&'a str>,
    pub(crate) deadline: Duration,
    pub(crate) rules: Rules,
}

/// What has to stay the same when an operation goes on: under another form of the key, the server would run it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rules {
    /// Whether the key is sent without quotes.
    pub(crate) bare_key: bool,
    /// The longest time that the server is trusted to keep the answer; `None` if it states its own.
    pub(crate) retention: Option<Duration>,
}

/// A stored operation.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) kept: Arc<dyn Kept>,
    /// For how long the server may already have a request with this key.
    pub(crate) sent_before: Duration,
}

/// One stored operation. While it exists, no other process and no other task sends the operation.
#[async_trait]
pub(crate) trait Kept: fmt::Debug + Send + Sync {
    /// Its id in the journal.
    fn id(&self) -> &str;

    /// Stores how long the server says that it keeps the answer.
    async fn retention_is(&self, retention: Duration) -> Result<(), KeepError>;

    /// Removes the operation, or marks it with its final answer.
    async fn answered(&self, status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Result<(), KeepError>;

    /// Notes why the operation has no final answer yet. It can be resumed.
    async fn stopped(&self, why: &str) -> Result<(), KeepError>;
}

/// An operation of an earlier process that goes on; it comes to the middleware in the extensions of its request.
#[derive(Debug, Clone)]
pub(crate) struct Resumed {
    pub(crate) key: IdempotencyKey,
    pub(crate) kept: Arc<dyn Kept>,
    /// For how long the server may already have the request.
    pub(crate) sent_before: Duration,
    pub(crate) stated_retention: Option<Duration>,
    pub(crate) rules: Rules,
    pub(crate) deadline: Duration,
}
