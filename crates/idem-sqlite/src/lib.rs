#![doc = include_str!("../README.md")]

mod config;
mod error;
mod handler_connection;
mod migrate;
mod permits;
mod queue;
mod reader;
mod row;
mod store;
mod transaction;
mod writer;

pub use config::SqliteConfig;
pub use idem_core::TransactionSlots;
pub use migrate::{Migration, migrations};
pub use store::{SqliteHealth, SqliteStore};
pub use transaction::SqliteTransaction;
