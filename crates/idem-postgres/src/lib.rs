#![doc = include_str!("../README.md")]

mod batch;
mod config;
mod connect;
mod error;
mod records;
mod schema;
mod sql;
mod store;
mod timeouts;
mod transaction;
mod upkeep;

pub use config::{Isolation, PostgresConfig};
pub use connect::server::DurabilityReport;
pub use idem_core::{TimeOffset, TransactionSlots};
pub use schema::migrate::{Migration, migrations};
pub use schema::partitions::partitioning;
pub use store::PostgresStore;
pub use transaction::guard::Guard;
pub use transaction::handler_transaction::PostgresTransaction;
pub use transaction::join::{CommitTicket, Join, JoinedRun};
pub use upkeep::health::{PostgresHealth, SelfTestReport};
pub use upkeep::identity::ServerHistory;
pub use upkeep::privileges::OpenSchema;
