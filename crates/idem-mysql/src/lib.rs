#![doc = include_str!("../README.md")]

mod batch;
mod config;
mod error;
mod handler_session;
mod migrate;
mod permits;
mod records;
mod row;
mod server;
mod session;
mod sql;
mod store;
mod timeouts;
mod transaction;
mod upkeep;
mod within;

pub use config::MySqlConfig;
pub use idem_core::{TimeOffset, TransactionSlots};
pub use migrate::{Migration, migrations};
pub use server::{DurabilityReport, MySqlHealth, SelfTestReport};
pub use store::MySqlStore;
pub use transaction::MySqlTransaction;
