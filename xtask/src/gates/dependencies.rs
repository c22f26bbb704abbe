//! Dependencies by the rules of `deny.toml`.

use std::error::Error;

use crate::command::{cargo, require_cargo_tool, run};

/// Licences, duplicate versions and sources: these follow from the lock file alone and need no network.
pub(crate) fn check() -> Result<(), Box<dyn Error>> {
    // An entry of `deny.toml` that nothing needs any more fails as well.
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

/// Known vulnerabilities. cargo-deny fetches its advisory database from GitHub.
pub(crate) fn advisories() -> Result<(), Box<dyn Error>> {
    deny(&["advisories"])
}

fn deny(args: &[&str]) -> Result<(), Box<dyn Error>> {
    require_cargo_tool("deny")?;
    run(cargo(&["deny", "--locked", "check"]).args(args))
}
