//! All automation of the workspace: `cargo xtask help`.

mod model;

use clap::Parser;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask")]
enum Task {
    /// Searches every situation that crashes and lost messages can lead to, for each contract.
    Model(model::Options),
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    match Task::parse() {
        Task::Model(options) => model::run(&options)?,
    }
    Ok(())
}
