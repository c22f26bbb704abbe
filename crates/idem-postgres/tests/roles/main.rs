//! What other roles of the database can do to a store, and what its own role needs.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "tests say what they expect by failing, and share more than each needs"
)]

mod hostile;
mod layout;
mod locks;
mod names;
mod qualified;
#[path = "../support/mod.rs"]
mod support;
mod traps;
mod work;
