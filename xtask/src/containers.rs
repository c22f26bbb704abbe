//! `cargo xtask test-containers`: the suites against servers in containers.

use std::error::Error;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;

use crate::command::cargo;
use crate::{docker, images};

/// Makes the image of the example unless one is named, and becomes the program that does the rest, so that Ctrl-C reaches nobody else.
pub(crate) fn run(options: &[OsString]) -> Result<(), Box<dyn Error>> {
    docker::expect_engine()?;
    // Somebody may have one of another version.
    if std::env::var_os("IDEM_PAYMENTS_IMAGE").is_none() {
        images::provide_example()?;
    }
    let mut suites = cargo(&["run", "--quiet", "-p", "idem-containers", "--"]);
    Err(suites.args(options).exec().into())
}
