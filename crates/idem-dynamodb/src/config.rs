//! What a store is opened with.

use std::fmt;

use aws_sdk_dynamodb::Client;
use idem_core::TimeOffset;

/// Where the records are, and how to get there.
#[derive(Clone)]
pub struct DynamoConfig {
    pub(crate) client: Client,
    pub(crate) table: String,
    pub(crate) offset: TimeOffset,
}

impl DynamoConfig {
    /// Records in `table`, by a client with the application's credentials, region, retries and timeouts.
    ///
    /// The store makes a client of its own from the client's configuration, to read the time from each answer.
    #[must_use]
    pub fn new(client: Client, table: impl Into<String>) -> Self {
        Self { client, table: table.into(), offset: TimeOffset::default() }
    }

    /// Moves the store's time, for tests. Default: not at all.
    #[must_use]
    pub fn time_offset(mut self, offset: TimeOffset) -> Self {
        self.offset = offset;
        self
    }
}

impl fmt::Debug for DynamoConfig {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("DynamoConfig").field("table", &self.table).finish_non_exhaustive()
    }
}
