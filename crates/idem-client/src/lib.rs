#![doc = include_str!("../README.md")]

mod answer;
mod backoff;
mod profile;
mod retry_after;
mod table;

pub use answer::{Answer, Failure};
pub use backoff::Backoff;
pub use profile::Profile;
pub use table::{Decision, RetryPolicy, Stop};
