#![doc = include_str!("../README.md")]

mod arguments;
mod batch;
mod begin;
mod config;
mod connection;
mod error;
mod guard;
mod health;
mod lane;
mod literal;
mod migrate;
mod partitions;
mod planted;
mod purger;
mod row;
mod schema;
mod sessions;
mod store;
mod transaction;
mod verb;

pub use config::{Isolation, PostgresConfig};
pub use guard::Guard;
pub use health::{DurabilityReport, PostgresHealth};
pub use idem_core::TimeOffset;
pub use migrate::{Migration, migrations};
pub use partitions::partitioning;
pub use purger::{Purger, PurgerSettings};
pub use store::PostgresStore;
pub use transaction::PostgresTransaction;
