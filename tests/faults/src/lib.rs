//! The payments example under faults: processes die and stand still, servers as well, and networks lose what they carry. What
//! clients were answered, and what really happened, is checked against what each contract promises.

mod checker;
mod history;
mod random;
mod register;
mod schedule;

pub use checker::{Behind, Known, Promise, Seen, Violation, What, check, seen};
pub use history::{Answer, Key, Operation, Payment};
pub use random::Random;
pub use schedule::{Bad, Cell, Contract, Fault, Kind, Planned, Share, Stall, Store, plan};
