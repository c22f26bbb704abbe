//! Checks that every published crate compiles without features, with each feature alone, and with all.

use std::error::Error;

use crate::command::{cargo, require_cargo_tool, run};
use crate::gates::published::published;

/// Runs clippy with each feature. Warnings are errors, which also finds imports that only one feature needs.
///
/// `--no-dev-deps` is not needed, and would rewrite the manifests while it runs. The resolver of this edition ignores features
/// of dev-dependencies when it builds a library.
pub(crate) fn check() -> Result<(), Box<dyn Error>> {
    require_cargo_tool("hack")?;
    let packages = published()?;
    let mut command = cargo(&["hack", "clippy", "--each-feature", "--lib"]);
    command.args(packages.iter().flat_map(|package| ["-p", &package.name]));
    run(command.args(["--", "-D", "warnings"]))
}
