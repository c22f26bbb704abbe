//! What a client can see of the payments example, over real sockets and with raw bytes where it matters: one suite that holds
//! every framework and every store to the same answers.
//!
//! Each case is a function of a [`Target`], listed in [`CASES`]. Cases panic when something is wrong.
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

/// Far above what anything here takes on a loaded machine, so that running into it is a failure.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Asks again and again until the answer is the one that is awaited; fails after [`PATIENCE`].
///
/// # Panics
/// When it does not happen.
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
