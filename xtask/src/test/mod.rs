//! `cargo xtask test`: all tests.

mod runner;

use std::error::Error;

use self::runner::Job;
use crate::checks;
use crate::command::{self, cargo, is_installed};
use crate::executables::Executable;
use crate::servers::Servers;

/// Programs that tests start, with their Debian packages.
const PROGRAMS: [(&str, &str); 1] = [("curl", "curl")];

/// This package builds a second dependency graph, so `cargo xtask ci` runs it separately.
const COMPILE_FAIL: &str = "idem-compile-fail";

/// This package builds further database drivers, so it has a separate command.
const DRIVERS: &str = "drivers";

/// These tests need a browser, so they have a separate command.
const BROWSER: &str = "idem-browser";

/// The arguments that select what to build and run.
const ALL: [&str; 9] =
    ["test", "--workspace", "--all-features", "--exclude", COMPILE_FAIL, "--exclude", DRIVERS, "--exclude", BROWSER];

/// The slowest tests, slowest first. They start first, because a slow test that starts last would run alone at the end.
const LONG: [(&str, &str); 4] =
    [("payments", "system"), ("payments", "http"), ("idem-postgres", "store"), ("servers", "servers")];

pub(crate) fn run() -> Result<(), Box<dyn Error>> {
    provision()?;
    checks::core_is_pure()?;
    let mut executables = Executable::build(&mut cargo(&ALL))?;
    let place = |executable: &Executable| {
        let is_it = |(package, name): &(&str, &str)| executable.package.ends_with(package) && executable.name == *name;
        LONG.iter().position(is_it).unwrap_or(LONG.len())
    };
    executables.sort_by_key(place);
    if executables.iter().take(LONG.len()).map(place).ne(0..LONG.len()) {
        return Err(format!("cargo has not built the tests {LONG:?}, or they have another name").into());
    }
    let servers = Servers::start()?;
    let mut jobs: Vec<Job> = executables.iter().map(Job::of).collect();
    let mut examples = cargo(&ALL);
    examples.args(["--doc", "--no-fail-fast", "--quiet"]);
    jobs.push(Job { name: "examples in documentation".into(), command: examples });
    jobs.iter_mut().for_each(|job| {
        servers.announce(&mut job.command);
    });
    runner::run(jobs)
}

/// Checks that the compile-fail cases do not compile, with the expected messages.
pub(crate) fn compile_fail() -> Result<(), Box<dyn Error>> {
    command::run(&mut cargo(&["test", "-p", COMPILE_FAIL]))
}

/// Kills the programs of `examples/drivers` at every message, with the servers of [`run`].
pub(crate) fn drivers() -> Result<(), Box<dyn Error>> {
    let servers = Servers::start()?;
    let mut command = cargo(&["test", "-p", DRIVERS]);
    servers.announce(&mut command);
    command::run(&mut command)
}

/// Installs programs that tests need and this machine lacks, or fails with installation advice.
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
