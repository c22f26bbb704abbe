//! `cargo xtask test`: everything that needs no container.

use std::error::Error;
use std::process::Command;

use crate::checks;
use crate::command::{self, cargo, is_installed};

/// Programs that tests start, each with the Debian package that has it.
const PROGRAMS: [(&str, &str); 1] = [("curl", "curl")];

pub(crate) fn run() -> Result<(), Box<dyn Error>> {
    provision()?;
    checks::core_is_pure()?;
    command::run(&mut cargo(&["test", "--workspace", "--all-features"]))
}

/// Installs what tests need and this machine lacks, or says what to install.
fn provision() -> Result<(), Box<dyn Error>> {
    for (program, package) in PROGRAMS {
        if is_installed(program) {
            println!("{program}: found on this machine");
        } else if is_installed("apt-get") {
            println!("{program}: missing, so Debian's package {package} is installed");
            command::run(Command::new("apt-get").arg("update"))?;
            command::run(Command::new("apt-get").args(["install", "--yes", "--no-install-recommends", package]))?;
        } else {
            return Err(format!("{program} is missing; install it and run this again").into());
        }
    }
    Ok(())
}
