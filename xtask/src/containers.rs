//! `cargo xtask test-containers`: the suites against servers in containers.

use std::error::Error;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;

use crate::command::cargo;
use crate::{docker, images};

/// Builds the example's image unless one is named, and then replaces itself with the suites' program, so that only that one
/// gets Ctrl-C.
pub(crate) fn run(options: &[OsString]) -> Result<(), Box<dyn Error>> {
    docker::expect_engine()?;
    // The environment may name an image of another version.
    if std::env::var_os("IDEM_PAYMENTS_IMAGE").is_none() {
        images::provide_example()?;
    }
    let mut suites = cargo(&["run", "--quiet", "-p", "idem-containers", "--"]);
    Err(suites.args(options).exec().into())
}
