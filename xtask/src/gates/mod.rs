//! `cargo xtask gate`: checks of a change besides the tests, one at a time.

mod circles;
mod dependencies;
mod features;
mod manifests;
mod planted;
mod public_api;
pub(crate) mod published;
mod rust_version;
mod semver;

use std::error::Error;

use crate::checks;

/// The gate to run.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The gate; default all that `ci` runs.
    #[arg(value_enum)]
    gate: Option<Gate>,
    /// Rewrites the lists that `public-api` compares with.
    #[arg(long)]
    bless: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Gate {
    /// Checks that the product contains no planted bug.
    Planted,
    /// Checks that no files of a crate import each other in a cycle.
    Circles,
    /// Checks that every published manifest has the fields that a registry and docs.rs show.
    Manifests,
    /// Checks licences, duplicate versions and sources of all dependencies (needs cargo-deny).
    Dependencies,
    /// Checks all dependencies for known vulnerabilities (needs cargo-deny and GitHub; not part of `ci`).
    Advisories,
    /// Checks that every published crate compiles with each feature alone and with none (needs cargo-hack).
    Features,
    /// Checks that no published crate uses anything newer than its `rust-version`.
    RustVersion,
    /// Compares the public items with the lists in `api/` (needs cargo-public-api).
    PublicApi,
    /// Checks that the version reflects every breaking change since the last release (needs cargo-semver-checks).
    Semver,
    /// Checks that every published crate compiles from its archive.
    Packages,
}

/// The gates of `ci`, quick ones first.
///
/// Advisories are not included: a new one would fail an unrelated change. A workflow checks them daily.
const CI: [Gate; 9] = [
    Gate::Planted,
    Gate::Circles,
    Gate::Manifests,
    Gate::Dependencies,
    Gate::Features,
    Gate::RustVersion,
    Gate::PublicApi,
    Gate::Semver,
    Gate::Packages,
];

/// Runs one gate, or all that `ci` runs.
pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    if options.bless {
        return match options.gate {
            Some(Gate::PublicApi) => public_api::bless(),
            _ => Err("--bless belongs to the gate public-api".into()),
        };
    }
    match options.gate {
        Some(gate) => gate.run(),
        None => run_all(),
    }
}

/// Runs the gates of `ci`.
pub(crate) fn run_all() -> Result<(), Box<dyn Error>> {
    CI.into_iter().try_for_each(Gate::run)
}

impl Gate {
    fn run(self) -> Result<(), Box<dyn Error>> {
        match self {
            Self::Planted => planted::check(),
            Self::Circles => circles::check(),
            Self::Manifests => manifests::check(),
            Self::Dependencies => dependencies::check(),
            Self::Advisories => dependencies::advisories(),
            Self::Features => features::check(),
            Self::RustVersion => rust_version::check(),
            Self::PublicApi => public_api::check(),
            Self::Semver => semver::check(),
            Self::Packages => checks::packages(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// These gates only read files, so that every run of the tests has them.
    #[test]
    fn the_workspace_passes_the_gates_that_only_read() {
        for gate in [Gate::Circles, Gate::Manifests] {
            gate.run().unwrap();
        }
    }
}
