//! Checks that the version reflects every breaking change since the last release.

use std::error::Error;
use std::process::Command;

use crate::command::{cargo, output_of, require_cargo_tool, run, workspace};
use crate::gates::published::published;

/// Compares with the newest tag `v*`. Before the first release there is nothing to compare with, and the gate passes.
pub(crate) fn check() -> Result<(), Box<dyn Error>> {
    let tags = output_of(&mut git(&["tag", "--list", "v*", "--sort=-version:refname"]))?;
    let Some(release) = tags.lines().next() else {
        println!("there is no tag v*, so no release to compare with");
        return Ok(());
    };
    require_cargo_tool("semver-checks")?;
    let mut command = cargo(&["semver-checks", "--baseline-rev", release]);
    for package in published()? {
        // A crate that is newer than the release has no baseline.
        if is_in(release, &package.name)? {
            command.args(["-p", &package.name]);
        } else {
            println!("{} is not in {release}", package.name);
        }
    }
    run(&mut command)
}

fn is_in(release: &str, package: &str) -> Result<bool, Box<dyn Error>> {
    let manifest = format!("crates/{package}/Cargo.toml");
    Ok(!output_of(&mut git(&["ls-tree", "--name-only", release, "--", &manifest]))?.is_empty())
}

fn git(args: &[&str]) -> Command {
    let mut command = Command::new("git");
    command.args(args).current_dir(workspace());
    command
}
