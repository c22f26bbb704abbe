//! The payments example under faults: processes die or stand still, servers do too, and networks lose traffic. A checker
//! compares the answers and the effects with the promises of each contract. [`end_to_end`] does so for clients with journals,
//! services, workers and consumers together.

mod checker;
pub mod end_to_end;
mod history;
mod random;
mod register;
mod schedule;

pub use checker::{Behind, Known, Promise, Seen, Violation, What, check, seen};
pub use history::{Answer, Key, Operation, Payment};
pub use random::Random;
pub use schedule::{Bad, Cell, Contract, Fault, Kind, Planned, Share, Stall, Store, plan};
