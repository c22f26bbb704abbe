//! Tests what a client can see of the payments example, over real sockets and with raw bytes where they matter. One suite
//! demands the same answers from every framework and every store.
//!
//! Each case is a function of a [`Target`], listed in [`CASES`]. A case panics if it fails.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects by failing")]

mod cases;
mod client;
mod exchange;
mod http2;
mod limits;
mod run;
mod target;
mod transcript;

use std::time::{Duration, Instant};

pub use cases::{CASES, Case};
pub use client::{Answer, Connection, PAYMENT, Request};
pub use exchange::Protocol;
pub use limits::allow_many_connections;
pub use run::{Report, differences, run};
pub use target::{Contract, Target};
pub use transcript::Entry;

/// Far above the time that anything here takes on a loaded machine, so that reaching it is a failure.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Repeats `ask` until it returns a value; fails after [`PATIENCE`].
///
/// # Panics
/// If it returns none in time.
pub fn eventually<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let give_up_at = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < give_up_at, "{what} did not happen within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
