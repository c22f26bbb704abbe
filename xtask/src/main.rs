//! All automation of the workspace: `cargo xtask help`.

mod checks;
mod command;
mod model;
mod test;

use std::error::Error;

use clap::Parser;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask")]
enum Task {
    /// Runs everything that needs no container, after getting what is missing on this machine.
    Test,
    /// Everything that a change has to pass: format, lints, documentation, tests, model, packages.
    Ci(model::Options),
    /// Searches every situation that crashes and lost messages can lead to, for each contract.
    Model(model::Options),
    /// Changes the pure core in one place at a time, and expects the tests to notice (needs cargo-mutants).
    Mutants,
    /// Packs every crate that is published, and checks that what it embeds is inside.
    Package,
}

fn main() -> Result<(), Box<dyn Error>> {
    match Task::parse() {
        Task::Test => test::run(),
        Task::Ci(options) => {
            checks::format()?;
            checks::lints()?;
            checks::documentation()?;
            test::run()?;
            model::run(&options)?;
            checks::packages()
        }
        Task::Model(options) => Ok(model::run(&options)?),
        Task::Mutants => checks::mutants(),
        Task::Package => checks::packages(),
    }
}
