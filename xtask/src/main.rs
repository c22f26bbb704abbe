//! All automation of the workspace: `cargo xtask help`.

mod bench;
mod browser;
mod checks;
mod command;
mod conformance;
mod containers;
mod docker;
mod executables;
mod fuzz;
mod gates;
mod images;
mod model;
mod planted;
mod python;
mod schemathesis;
mod servers;
mod test;

use std::error::Error;
use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask")]
enum Task {
    /// Runs the tests of the core, the stores and HTTP with real servers, after it has installed what this machine lacks.
    Test,
    /// Runs the tests of jobs and of the example with a worker, with the same servers.
    TestJobs,
    /// Runs the tests of the inbox and the outbox, with real brokers.
    TestMessaging,
    /// Runs the tests of the store on MariaDB, after it has installed MariaDB if this machine lacks it.
    TestMysql,
    /// Runs the tests of the store in DynamoDB on two emulators, which it installs into the target folder (needs python3).
    TestDynamodb,
    /// Opens the example's page in a headless Chromium, and renders the diagrams of the pages (needs python3).
    TestBrowser,
    /// Runs the tests of `examples/drivers`, which kill programs with other database drivers at every message.
    TestDrivers,
    /// Sends 10,000 payments by 32 clients through a network that harms three of ten exchanges, and asks a server that is down
    /// for a minute.
    TestClient,
    /// Runs a command with the servers that `test` starts, and returns its exit code.
    WithServers {
        /// The command, such as `cargo test -p idem-postgres`.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
    /// Runs the HTTP cases of `test` against a server that runs already.
    #[command(disable_help_flag = true)]
    HttpSuite {
        /// Its options, such as `--url http://127.0.0.1:8080`.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<OsString>,
    },
    /// Sends requests that schemathesis generates from the example's OpenAPI description, with each framework (needs python3).
    Schemathesis(schemathesis::Options),
    /// Runs all checks of a change: format, lints, documentation, gates, tests (also of code that must not compile, of other
    /// drivers and in a browser), model.
    Ci(model::Options),
    /// Runs one gate, or all that `ci` runs: features, dependencies, public items, packages and more.
    Gate(gates::Options),
    /// Searches every situation that crashes and lost messages can lead to, for each contract.
    Model(model::Options),
    /// Compares stores with the state-machine model in many more random sequences of verbs than the tests.
    Conformance(conformance::Options),
    /// Runs a check of a store that takes minutes, with its own servers: `cargo xtask long help`.
    #[command(disable_help_flag = true)]
    Long {
        /// The check and its options, such as `hammer --seconds 10`.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        check: Vec<OsString>,
    },
    /// Runs the payments example under hundreds of faults from a seed, and checks the answers of its clients. With
    /// `--end-to-end`: clients with journals, services, workers, relays and a consumer together.
    #[command(disable_help_flag = true)]
    Faults {
        /// Its options, such as `--minutes 30 --seed 1`; `--help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<OsString>,
    },
    /// Drops every future of the stores at every await, and cuts every exchange with a server after every byte.
    #[command(disable_help_flag = true)]
    Sweeps {
        /// Its options, such as `--store redis`; `--help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<OsString>,
    },
    /// Fuzzes all code that reads outside input (needs cargo-fuzz and a C++ compiler).
    Fuzz(fuzz::Options),
    /// Builds images of Postgres, Redis and PgBouncer from Debian's packages, and one of the example (needs Docker).
    Images(images::Options),
    /// Runs the suites against servers and the example in containers (needs Docker): `cargo xtask test-containers --help`.
    #[command(disable_help_flag = true)]
    TestContainers {
        /// Its options, such as `--only http`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<OsString>,
    },
    /// Changes the pure core in one place at a time; the tests must notice (needs cargo-mutants).
    Mutants,
    /// Breaks each promise in a known way, one at a time; the suites must notice.
    PlantedBugs(planted::Options),
    /// Measures the cost of safety, as ratios between contestants that take turns; `--check` counts instructions.
    Bench(bench::Options),
    /// Packs and builds every published crate, and checks that its archive holds the embedded files.
    Package,
}

fn main() -> ExitCode {
    // Print the error for people, so that a server's log stays readable.
    run(Task::parse()).unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

fn run(task: Task) -> Result<ExitCode, Box<dyn Error>> {
    match task {
        Task::Test => test::run()?,
        Task::TestJobs => test::jobs()?,
        Task::TestMessaging => test::messaging()?,
        Task::TestMysql => test::mysql()?,
        Task::TestDynamodb => test::dynamodb()?,
        Task::TestBrowser => browser::run()?,
        Task::TestDrivers => test::drivers()?,
        Task::TestClient => test::client()?,
        Task::WithServers { command } => return servers::run(&command),
        Task::Ci(options) => {
            checks::format()?;
            checks::lints()?;
            checks::documentation()?;
            gates::run_all()?;
            test::run()?;
            test::jobs()?;
            test::messaging()?;
            test::mysql()?;
            test::compile_fail()?;
            test::drivers()?;
            browser::run()?;
            model::run(&options)?;
        }
        Task::Gate(options) => gates::run(&options)?,
        Task::Model(options) => model::run(&options)?,
        Task::Conformance(options) => conformance::run(&options)?,
        Task::Long { check } => {
            servers::provide(&check)?;
            build_example("payments")?;
            let mut long = command::cargo(&["run", "--quiet", "--release", "-p", "idem-long", "--"]);
            command::run(long.args(check))?;
        }
        Task::Faults { options } => {
            servers::provide(&options)?;
            let mut faults = command::cargo(&["run", "--quiet", "--release", "-p", "idem-faults", "--"]);
            if options.iter().any(|option| option == "--end-to-end") {
                test::provide_brokers()?;
                build(&["idem-end-to-end", "idem-messages"])?;
                return command::run(faults.args(options)).map(|()| ExitCode::SUCCESS);
            }
            build_example("payments")?;
            build_example("reports")?;
            let names = |part| options.iter().any(|option| option.to_string_lossy().contains(part));
            if names("mariadb/") {
                test::provide_mariadb()?;
            }
            if names("messages/") {
                test::provide_brokers()?;
                build(&["idem-messages"])?;
            }
            command::run(faults.arg("--next").arg(planted::example()?).args(options))?;
        }
        Task::Sweeps { options } => {
            let says = |part| options.iter().any(|option| option.to_string_lossy().contains(part));
            if !says("--store") || says("mariadb") {
                test::provide_mariadb()?;
            }
            let mut sweeps = command::cargo(&["run", "--quiet", "--release", "-p", "idem-sweeps", "--"]);
            command::run(servers::Servers::start()?.announce(sweeps.args(options)))?;
        }
        Task::HttpSuite { options } => {
            let mut suite = command::cargo(&["run", "--quiet", "-p", "idem-http-suite", "--"]);
            command::run(suite.args(options))?;
        }
        Task::Schemathesis(options) => schemathesis::run(&options)?,
        Task::Fuzz(options) => fuzz::run(&options)?,
        Task::Images(options) => images::run(&options)?,
        Task::TestContainers { options } => containers::run(&options)?,
        Task::Mutants => checks::mutants()?,
        Task::PlantedBugs(options) => planted::run(&options)?,
        Task::Bench(options) => bench::run(&options)?,
        Task::Package => checks::packages()?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Builds an example, whose processes long checks and faults start.
fn build_example(package: &str) -> Result<(), Box<dyn Error>> {
    let build = ["build", "--quiet", "--release", "-p", package, "--features", "simulate"];
    command::run(&mut command::cargo(&build))
}

/// Builds programs that faults start, with one set of features of what they share.
fn build(packages: &[&str]) -> Result<(), Box<dyn Error>> {
    let mut build = command::cargo(&["build", "--quiet", "--release"]);
    build.args(packages.iter().flat_map(|package| ["-p", package]));
    command::run(&mut build)
}
