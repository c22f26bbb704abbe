//! How servers are set up, and when a group of servers is complete. Processes of this machine and the containers of
//! `cargo xtask test-containers` share it.

pub mod pgbouncer;
pub mod postgres;
pub mod redis;
pub mod sentinel;

use std::fmt::Display;

use crate::Error;

/// For checks: an objection unless the two are the same.
///
/// # Errors
///
/// That objection.
pub fn expect<T: PartialEq + Display>(what: impl Display, found: T, expected: T) -> Result<(), Error> {
    if found == expected { Ok(()) } else { Err(Error::failed(format!("{what} is {found} and not {expected}"))) }
}
