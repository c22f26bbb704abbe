//! The whole system from end to end: its faults and its checker.

mod checker;
mod schedule;

pub use checker::{Answer, Deed, Found, Journaled, Violation, check, read_answer};
pub use schedule::{CLIENTS, Fault, Kind, LEASE, PROCESSES, Target, plan};
