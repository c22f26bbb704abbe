//! Checks dependencies against the rules of `deny.toml`.

use std::error::Error;

use crate::command::{cargo, require_cargo_tool, run};

/// Checks licences, duplicate versions and sources. These follow from the lock file alone and need no network.
pub(crate) fn check() -> Result<(), Box<dyn Error>> {
    // An unneeded entry of `deny.toml` fails too.
    deny(&[
        "-D",
        "unmatched-skip",
        "-D",
        "unnecessary-skip",
        "-D",
        "license-not-encountered",
        "licenses",
        "bans",
        "sources",
    ])
}

/// Checks for known vulnerabilities. cargo-deny fetches its advisory database from GitHub.
pub(crate) fn advisories() -> Result<(), Box<dyn Error>> {
    deny(&["advisories"])
}

fn deny(args: &[&str]) -> Result<(), Box<dyn Error>> {
    require_cargo_tool("deny")?;
    run(cargo(&["deny", "--locked", "check"]).args(args))
}
