//! What a store is opened with.

use std::fmt;

use aws_sdk_dynamodb::Client;
use idem_core::TimeOffset;

/// Where the records are, and how to get there.
#[derive(Clone)]
pub struct DynamoConfig {
    pub(crate) client: Client,
    pub(crate) renewals: Option<Client>,
    pub(crate) table: String,
    pub(crate) offset: TimeOffset,
}

impl DynamoConfig {
    /// Records in `table`, by a client with the application's credentials, region, retries and timeouts.
    ///
    /// The store makes another client from the configuration of this one, to read the time from each answer.
    #[must_use]
    pub fn new(client: Client, table: impl Into<String>) -> Self {
        Self { client, renewals: None, table: table.into(), offset: TimeOffset::default() }
    }

    /// Renews leases by this client, which must not share connections with the other one.
    ///
    /// Renewals run on a separate thread, so that a handler that blocks its thread keeps its lease. A connection that the blocked
    /// thread drives would not help them. Default: a client of the same configuration, which has its own connections unless the
    /// application set an HTTP client in it.
    #[must_use]
    pub fn renewals(mut self, client: Client) -> Self {
        self.renewals = Some(client);
        self
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
