//! The build that contains the bugs.

use std::collections::BTreeSet;
use std::error::Error;
use std::path::PathBuf;
use std::process::Command;

use super::patches::patched_copy;
use super::suites::{SUITES, Suite, Target};
use crate::command::{self, cargo, workspace};
use crate::executables::Executable;

/// Makes a cargo command build a copy of the tree that contains the bugs. The copy has its own target folder, so that neither
/// build invalidates the other. Returns that folder.
fn with_bugs(command: &mut Command) -> Result<PathBuf, Box<dyn Error>> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from);
    let folder = target.join("planted-bugs");
    let tree = folder.join("tree");
    patched_copy(&tree)?;
    command.current_dir(tree).arg("--target-dir").arg(&folder);
    Ok(folder)
}

/// Builds the example with the bugs. An environment variable turns one of them on when it starts.
pub(crate) fn example() -> Result<PathBuf, Box<dyn Error>> {
    let mut command = cargo(&["build", "--quiet", "-p", "payments", "--features", "simulate"]);
    let folder = with_bugs(&mut command)?;
    command::run(&mut command)?;
    Ok(folder.join("debug/payments"))
}

/// Checks that the copy with the bugs compiles, because a patch may match text whose names have changed.
pub(crate) fn compiles() -> Result<(), Box<dyn Error>> {
    let mut command = cargo(&["check", "--quiet", "--workspace", "--all-features"]);
    with_bugs(&mut command)?;
    command::run(&mut command)
}

/// The executables of all suites.
pub(super) struct Executables(Vec<Executable>);

impl Executables {
    /// Builds all executables.
    pub(super) fn build() -> Result<Self, Box<dyn Error>> {
        let packages: BTreeSet<&str> = SUITES.iter().map(|suite| suite.package).collect();
        let tests: BTreeSet<&str> = SUITES.iter().filter_map(|suite| suite.target.test()).collect();
        let mut command = cargo(&["test", "--all-features", "--lib"]);
        command.args(packages.iter().flat_map(|package| ["-p", package]));
        command.args(tests.iter().flat_map(|test| ["--test", test]));
        with_bugs(&mut command)?;
        Executable::build(&mut command).map(Self)
    }

    /// The executable of a suite.
    pub(super) fn of(&self, suite: &Suite) -> Result<&Executable, Box<dyn Error>> {
        let (kind, name) = match suite.target {
            Target::Library => ("lib", suite.package.replace('-', "_")),
            Target::Test(name) => ("test", name.to_owned()),
        };
        let is_it = |executable: &&Executable| {
            executable.package.ends_with(suite.package) && executable.kind == kind && executable.name == name
        };
        let executable = self.0.iter().find(is_it);
        executable.ok_or_else(|| format!("cargo has built no {kind} {name} of {}", suite.package).into())
    }
}
