#![doc = include_str!("../README.md")]
#![expect(clippy::expect_used, reason = "a test that cannot go on panics, which is how it fails")]

pub mod cases;
pub mod conformance;
mod erasing;
pub mod faults;
pub mod fixture;
pub mod golden;
#[cfg(feature = "handlers")]
pub mod handlers;
pub mod inspecting;
mod memory_database;
mod model;
#[cfg(feature = "engine")]
pub mod renewals;
pub mod resolving;
pub mod state_machine;
mod subject;
pub mod sweep;
pub mod transactional;

pub use faults::{Fault, Faults, FaultyStore, Verb};
#[cfg(feature = "handlers")]
pub use handlers::{Broken, Trial, assert_idempotent};
pub use memory_database::{MemoryDatabase, MemoryTransaction};
pub use model::{Answer, Model, Operation};
pub use subject::{Case, Purging, Remaining, Subject, TimeControl};
pub use sweep::{drop_at_await, drop_at_every_await};
pub use transactional::{BusinessData, TransactionalSubject};
