//! All automation of the workspace: `cargo xtask help`.

mod bench;
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
    /// Runs all tests with real servers, after getting what is missing on this machine.
    Test,
    /// Runs a command with the servers that `test` starts, and passes its exit code on.
    WithServers {
        /// The command, as in `cargo test -p idem-postgres`.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
    /// Holds a server that runs already to the suite of cases over sockets that `test` runs on every framework and store.
    #[command(disable_help_flag = true)]
    HttpSuite {
        /// Its options, as in `--url http://127.0.0.1:8080`.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<OsString>,
    },
    /// Sends the example, by each framework, requests that schemathesis makes out of its description (needs python3).
    Schemathesis(schemathesis::Options),
    /// Everything that a change has to pass: format, lints, documentation, gates, tests, model.
    Ci(model::Options),
    /// Runs one gate, or all that `ci` runs: features, dependencies, public items, packages and more.
    Gate(gates::Options),
    /// Searches every situation that crashes and lost messages can lead to, for each contract.
    Model(model::Options),
    /// Compares stores with the model of the state machine in many more random sequences of verbs than tests try.
    Conformance(conformance::Options),
    /// Runs a check of a store that takes minutes, with servers of its own: `cargo xtask long help`.
    #[command(disable_help_flag = true)]
    Long {
        /// The check and its options, as in `hammer --seconds 10`.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        check: Vec<OsString>,
    },
    /// Runs the payments example under hundreds of faults that follow from a seed, and checks what its clients saw.
    #[command(disable_help_flag = true)]
    Faults {
        /// Its options, as in `--minutes 30 --seed 1`; `--help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<OsString>,
    },
    /// Drops every future of the stores at every await, and cuts every exchange with a server after every byte.
    #[command(disable_help_flag = true)]
    Sweeps {
        /// Its options, as in `--store redis`; `--help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<OsString>,
    },
    /// Runs the fuzzers of everything that reads outside input (needs cargo-fuzz and a C++ compiler).
    Fuzz(fuzz::Options),
    /// Makes images of Postgres, Redis and PgBouncer out of Debian's packages, and one of the example (needs Docker).
    Images(images::Options),
    /// Runs the suites against servers and the example in containers (needs Docker): `cargo xtask test-containers --help`.
    #[command(disable_help_flag = true)]
    TestContainers {
        /// Its options, as in `--only http`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<OsString>,
    },
    /// Changes the pure core in one place at a time, and expects the tests to notice (needs cargo-mutants).
    Mutants,
    /// Breaks each promise in a known way, one at a time, and expects the suites to notice.
    PlantedBugs(planted::Options),
    /// Measures what the safety costs, as ratios between contestants that take turns; `--check` counts instructions.
    Bench(bench::Options),
    /// Packs and builds every crate that is published, and checks that what it embeds is inside.
    Package,
}

fn main() -> ExitCode {
    // The text for people: a server's log stays readable.
    run(Task::parse()).unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

fn run(task: Task) -> Result<ExitCode, Box<dyn Error>> {
    match task {
        Task::Test => test::run()?,
        Task::WithServers { command } => return servers::run(&command),
        Task::Ci(options) => {
            checks::format()?;
            checks::lints()?;
            checks::documentation()?;
            gates::run_all()?;
            test::run()?;
            test::compile_fail()?;
            model::run(&options)?;
        }
        Task::Gate(options) => gates::run(&options)?,
        Task::Model(options) => model::run(&options)?,
        Task::Conformance(options) => conformance::run(&options)?,
        Task::Long { check } => {
            servers::provide(&check)?;
            // Some start the example's processes.
            command::run(&mut command::cargo(&["build", "--quiet", "--release", "-p", "payments"]))?;
            let mut long = command::cargo(&["run", "--quiet", "--release", "-p", "idem-long", "--"]);
            command::run(long.args(check))?;
        }
        Task::Faults { options } => {
            servers::provide(&options)?;
            // It starts the example's processes.
            command::run(&mut command::cargo(&["build", "--quiet", "--release", "-p", "payments"]))?;
            let mut faults = command::cargo(&["run", "--quiet", "--release", "-p", "idem-faults", "--", "--next"]);
            command::run(faults.arg(planted::example()?).args(options))?;
        }
        Task::Sweeps { options } => {
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
