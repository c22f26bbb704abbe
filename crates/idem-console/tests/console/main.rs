//! The pages of the console, what they permit, and what attacks on them do.
#![expect(
    clippy::expect_used,
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a test says what it expects by failing, and its modules have one user"
)]

mod attacks;
mod pages;
mod support;
