//! `cargo xtask test`: all tests.

use std::error::Error;
use std::process::Command;

use crate::checks;
use crate::command::{self, cargo, is_installed};
use crate::servers::Servers;

/// Programs that tests start, each with the Debian package that has it.
const PROGRAMS: [(&str, &str); 1] = [("curl", "curl")];

pub(crate) fn run() -> Result<(), Box<dyn Error>> {
    provision()?;
    checks::core_is_pure()?;
    let servers = Servers::start()?;
    command::run(servers.announce(with_threads(&mut cargo(&["test", "--workspace", "--all-features"]))))
}

/// Sets how many tests of one executable run at once, unless the caller has set it. Tests of stores, processes and leases wait for
/// most of their time, so there may be more of them than processors.
fn with_threads(command: &mut Command) -> &mut Command {
    const VARIABLE: &str = "RUST_TEST_THREADS";
    if std::env::var_os(VARIABLE).is_some() {
        return command;
    }
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    command.env(VARIABLE, (processors * 2).max(4).to_string())
}

/// Installs what tests need and this machine lacks, or says what to install.
fn provision() -> Result<(), Box<dyn Error>> {
    for (program, package) in PROGRAMS {
        if is_installed(program) {
            println!("{program}: found on this machine");
        } else if command::may_install() {
            println!("{program}: missing, so Debian's package {package} is installed");
            command::install(&[package])?;
        } else {
            return Err(format!("{program} is missing; install it and run this again").into());
        }
    }
    Ok(())
}
