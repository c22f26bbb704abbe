//! `cargo xtask test`: the tests of the core, the stores and HTTP. `test-jobs`: those of jobs. `test-messaging`: those of
//! messages. `test-mysql`: those of the store on MariaDB. `test-dynamodb`: those of the store in DynamoDB.

mod runner;

use std::error::Error;
use std::ffi::OsString;

use self::runner::Job;
use crate::checks;
use crate::command::{self, cargo, is_installed};
use crate::executables::Executable;
use crate::python;
use crate::servers::Servers;

/// Programs that tests start, with their Debian packages.
const PROGRAMS: [(&str, &str); 4] =
    [("curl", "curl"), ("node", "nodejs"), ("prometheus", "prometheus"), ("python3", "python3")];

/// The same for the tests of messages.
const BROKERS: [(&str, &str); 2] = [("nats-server", "nats-server"), ("rabbitmq-server", "rabbitmq-server")];

/// The same for the tests of the store on MariaDB.
const MARIADB: [(&str, &str); 1] = [("mariadbd", "mariadb-server")];

/// This package builds a second dependency graph, so `cargo xtask ci` runs it separately.
const COMPILE_FAIL: &str = "idem-compile-fail";

/// This package builds further database drivers, so it has a separate command.
const DRIVERS: &str = "drivers";

/// These tests need a browser, so they have a separate command.
const BROWSER: &str = "idem-browser";

/// This package builds the client of a cloud service, so it has a separate command.
const DYNAMODB: &str = "idem-dynamodb";

/// Emulators of that service: a package of Python with its version, and a crate.
const MOTO: [&str; 3] = ["moto[dynamodb,server]", "5.1.22", "moto_server"];
const DYNOXIDE: [&str; 2] = ["dynoxide-rs", "3.2.0"];

/// The tests of these packages have separate commands, which build nothing that `cargo xtask test` has not built.
const JOBS: [&str; 2] = ["idem-jobs", "reports"];
const MESSAGING: [&str; 3] = ["idem-inbox", "idem-outbox", "consumer"];
const MYSQL: [&str; 1] = ["idem-mysql"];

/// The arguments that select what to build and run.
const ALL: [&str; 11] = [
    "test",
    "--workspace",
    "--all-features",
    "--exclude",
    COMPILE_FAIL,
    "--exclude",
    DRIVERS,
    "--exclude",
    BROWSER,
    "--exclude",
    DYNAMODB,
];

/// The slowest tests, slowest first. They start first, because a slow test that starts last would run alone at the end.
const LONG: [(&str, &str); 4] =
    [("payments", "system"), ("payments", "http"), ("idem-postgres", "store"), ("servers", "servers")];

pub(crate) fn run() -> Result<(), Box<dyn Error>> {
    provision(&PROGRAMS)?;
    checks::core_is_pure()?;
    let mut executables = Executable::build(&mut cargo(&ALL))?;
    executables
        .retain(|executable| ![&JOBS[..], &MESSAGING, &MYSQL].iter().any(|packages| is_of(executable, packages)));
    let place = |executable: &Executable| {
        let is_it = |(package, name): &(&str, &str)| executable.package.ends_with(package) && executable.name == *name;
        LONG.iter().position(is_it).unwrap_or(LONG.len())
    };
    executables.sort_by_key(place);
    if executables.iter().take(LONG.len()).map(place).ne(0..LONG.len()) {
        return Err(format!("cargo has not built the tests {LONG:?}, or they have another name").into());
    }
    let mut jobs: Vec<Job> = executables.iter().map(Job::of).collect();
    let mut examples = cargo(&ALL);
    examples.args(["--doc", "--no-fail-fast", "--quiet"]);
    jobs.push(Job { name: "examples in documentation".into(), command: examples });
    with_servers(jobs)
}

/// Runs the tests of jobs.
pub(crate) fn jobs() -> Result<(), Box<dyn Error>> {
    packages(&JOBS)
}

/// Runs the tests of messages, with real brokers.
pub(crate) fn messaging() -> Result<(), Box<dyn Error>> {
    provide_brokers()?;
    packages(&MESSAGING)
}

/// Runs the tests of the store on MariaDB, those of `idem` with it, and its part of the HTTP matrix. They start their own
/// servers.
pub(crate) fn mysql() -> Result<(), Box<dyn Error>> {
    provide_mariadb()?;
    let executables = Executable::build(&mut cargo(&ALL))?;
    let part_of = |package: &str, name: &str, arguments: &[&str]| {
        let is_it = |executable: &&Executable| is_of(executable, &[package]) && executable.name == name;
        let executable = executables.iter().find(is_it);
        let executable = executable.ok_or_else(|| format!("cargo has built no test {name} of {package}"))?;
        let mut job = Job::of(executable);
        job.command.args(arguments);
        Ok::<_, Box<dyn Error>>(job)
    };
    let mut jobs =
        vec![part_of("payments", "http", &["mariadb"])?, part_of("idem-cli", "command", &["mariadb::", "--ignored"])?];
    jobs.extend(executables.iter().filter(|executable| is_of(executable, &MYSQL)).map(Job::of));
    runner::run(jobs)
}

/// Runs the tests of the store in DynamoDB. They start emulators, which are installed first.
pub(crate) fn dynamodb() -> Result<(), Box<dyn Error>> {
    command::run(cargo(&["test", "-p", DYNAMODB]).env("PATH", provide_emulators()?))
}

/// Installs the emulators of DynamoDB among cargo's build artifacts, and returns a `PATH` that has them too.
pub(crate) fn provide_emulators() -> Result<OsString, Box<dyn Error>> {
    let [package, version, program] = MOTO;
    let moto = python::install(package, version, program)?;
    let [name, version] = DYNOXIDE;
    let dynoxide = moto.with_file_name("dynoxide");
    if !dynoxide.exists() {
        let folder = moto.ancestors().nth(2).ok_or("the emulator has no folder")?;
        // Without what else it can be: a server for agents, and an importer.
        let mut install = cargo(&["install", "--locked", name, "--version", version, "--no-default-features"]);
        install.args(["--features", "native-sqlite,http-server,cli", "--root"]).arg(folder);
        // Its build flags are its own.
        command::run(install.env_remove("RUSTFLAGS"))?;
    }
    let folder = moto.parent().ok_or("the emulator has no folder")?;
    let old = std::env::var_os("PATH").unwrap_or_default();
    Ok(std::env::join_paths(std::iter::once(folder.to_owned()).chain(std::env::split_paths(&old)))?)
}

/// Installs the brokers that this machine lacks, or fails with installation advice.
pub(crate) fn provide_brokers() -> Result<(), Box<dyn Error>> {
    provision(&BROKERS)
}

/// The same for MariaDB.
pub(crate) fn provide_mariadb() -> Result<(), Box<dyn Error>> {
    provision(&MARIADB)
}

fn packages(packages: &[&str]) -> Result<(), Box<dyn Error>> {
    let executables = Executable::build(&mut cargo(&ALL))?;
    if let Some(package) = packages.iter().find(|package| !executables.iter().any(|one| is_of(one, &[package]))) {
        return Err(format!("cargo has built no tests of {package}, or it has another name").into());
    }
    with_servers(executables.iter().filter(|executable| is_of(executable, packages)).map(Job::of).collect())
}

fn is_of(executable: &Executable, packages: &[&str]) -> bool {
    packages.iter().any(|package| executable.package.ends_with(package))
}

fn with_servers(mut jobs: Vec<Job>) -> Result<(), Box<dyn Error>> {
    let servers = Servers::start()?;
    jobs.iter_mut().for_each(|job| {
        servers.announce(&mut job.command);
    });
    runner::run(jobs)
}

/// Checks that the compile-fail cases do not compile, with the expected messages.
pub(crate) fn compile_fail() -> Result<(), Box<dyn Error>> {
    command::run(&mut cargo(&["test", "-p", COMPILE_FAIL]))
}

/// Runs the tests of the client that `run` does on a smaller scale. Numbers that are set in the environment stay.
pub(crate) fn client() -> Result<(), Box<dyn Error>> {
    let scale = [("IDEM_CLIENT_PAYMENTS", "10000"), ("IDEM_CLIENT_CLIENTS", "32"), ("IDEM_OUTAGE_S", "60")];
    let scale = scale.into_iter().filter(|(name, _)| std::env::var_os(name).is_none());
    for (package, features, tests, filter) in [
        ("payments", "simulate", "system", "client::payments_through_a_storm"),
        ("idem-client", "reqwest", "client", "budget::"),
    ] {
        let words =
            ["test", "--quiet", "-p", package, "--features", features, "--test", tests, "--", "--nocapture", filter];
        command::run(cargo(&words).envs(scale.clone()))?;
    }
    Ok(())
}

/// Kills the programs of `examples/drivers` at every message, with the servers of [`run`].
pub(crate) fn drivers() -> Result<(), Box<dyn Error>> {
    let servers = Servers::start()?;
    let mut command = cargo(&["test", "-p", DRIVERS]);
    servers.announce(&mut command);
    command::run(&mut command)
}

/// Installs programs that tests need and this machine lacks, or fails with installation advice.
fn provision(programs: &[(&str, &str)]) -> Result<(), Box<dyn Error>> {
    for (program, package) in programs {
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
