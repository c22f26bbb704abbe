//! The configuration of servers, and checks that a group of servers is complete. Shared by processes of this machine and the
//! containers of `cargo xtask test-containers`.

pub mod mariadb;
pub mod pgbouncer;
pub mod postgres;
pub mod redis;
pub mod sentinel;

use std::fmt::Display;

use crate::Error;

/// Fails unless the two values are equal.
///
/// # Errors
///
/// If they differ.
pub fn expect<T: PartialEq + Display>(what: impl Display, found: T, expected: T) -> Result<(), Error> {
    if found == expected { Ok(()) } else { Err(Error::failed(format!("{what} is {found} and not {expected}"))) }
}
