//! Stores that fail on demand.

mod plan;
mod store;
mod transaction;

pub use plan::{Fault, Verb};
pub use store::{Faults, FaultyStore};
