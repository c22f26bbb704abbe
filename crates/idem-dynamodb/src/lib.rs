#![doc = include_str!("../README.md")]

mod attributes;
mod clock;
mod config;
mod error;
mod item;
mod notes;
mod parts;
mod records;
mod sightings;
mod store;
mod table;
mod upkeep;
mod within;

pub use config::DynamoConfig;
pub use idem_core::TimeOffset;
pub use store::DynamoStore;
