//! The store on two emulators. One executable, so that its tests share them.
#![allow(unreachable_pub, clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects by failing")]

mod conformance;
mod cuts;
mod leases;
mod opening;
mod parts;
mod privileges;
mod settling;
mod support;
