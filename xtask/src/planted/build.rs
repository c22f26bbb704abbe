//! The build that contains the bugs.

use std::collections::BTreeSet;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::patches::patched_copy;
use super::suites::{SUITES, Suite, Target};
use crate::command::{self, cargo, workspace};

/// Has a command of cargo build a copy of the tree that contains the bugs, in a target folder of that copy, so that neither
/// build undoes the other. Returns that target folder.
fn with_bugs(command: &mut Command) -> Result<PathBuf, Box<dyn Error>> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from);
    let folder = target.join("planted-bugs");
    let tree = folder.join("tree");
    patched_copy(&tree)?;
    command.current_dir(tree).arg("--target-dir").arg(&folder);
    Ok(folder)
}

/// The example with the bugs, of which the one that is named at its start is on.
pub(crate) fn example() -> Result<PathBuf, Box<dyn Error>> {
    let mut command = cargo(&["build", "--quiet", "-p", "payments"]);
    let folder = with_bugs(&mut command)?;
    command::run(&mut command)?;
    Ok(folder.join("debug/payments"))
}

/// Whether the copy with the bugs compiles: a patch may match text whose names have changed.
pub(crate) fn compiles() -> Result<(), Box<dyn Error>> {
    let mut command = cargo(&["check", "--quiet", "--workspace", "--all-features"]);
    with_bugs(&mut command)?;
    command::run(&mut command)
}

/// The binaries of all tests.
pub(super) struct Binaries(Vec<Binary>);

struct Binary {
    package: PathBuf,
    kind: String,
    name: String,
    program: PathBuf,
}

impl Binaries {
    /// Builds them.
    pub(super) fn build() -> Result<Self, Box<dyn Error>> {
        let packages: BTreeSet<&str> = SUITES.iter().map(|suite| suite.package).collect();
        let tests: BTreeSet<&str> = SUITES.iter().filter_map(|suite| suite.target.test()).collect();
        let mut command = cargo(&["test", "--no-run", "--message-format=json-render-diagnostics", "--all-features"]);
        command.arg("--lib").args(packages.iter().flat_map(|package| ["-p", package]));
        command.args(tests.iter().flat_map(|test| ["--test", test])).stderr(Stdio::inherit());
        let folder = with_bugs(&mut command)?;
        println!("> cargo test --no-run, in {}", folder.display());
        let output = command.output()?;
        if !output.status.success() {
            return Err(format!("the build with the planted bugs: {}", output.status).into());
        }
        let messages = output.stdout.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let binaries = messages.map(|line| Ok(Binary::of(&serde_json::from_slice(line)?)));
        let binaries: Vec<Option<Binary>> = binaries.collect::<Result<_, serde_json::Error>>()?;
        Ok(Self(binaries.into_iter().flatten().collect()))
    }

    /// The binary of a suite, and the folder in which cargo would run it.
    pub(super) fn of(&self, suite: &Suite) -> Result<(&Path, &Path), Box<dyn Error>> {
        let (kind, name) = match suite.target {
            Target::Library => ("lib", suite.package.replace('-', "_")),
            Target::Test(name) => ("test", name.to_owned()),
        };
        let is_it =
            |binary: &&Binary| binary.package.ends_with(suite.package) && binary.kind == kind && binary.name == name;
        let binary = self.0.iter().find(is_it);
        let binary = binary.ok_or_else(|| format!("cargo has built no {kind} {name} of {}", suite.package))?;
        Ok((&binary.program, &binary.package))
    }
}

impl Binary {
    /// `None` when the message is about something else.
    fn of(message: &Value) -> Option<Self> {
        let target = &message["target"];
        Some(Self {
            package: Path::new(message["manifest_path"].as_str()?).parent()?.to_owned(),
            kind: target["kind"][0].as_str()?.to_owned(),
            name: target["name"].as_str()?.to_owned(),
            program: message["executable"].as_str()?.into(),
        })
    }
}
