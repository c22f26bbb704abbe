//! `cargo xtask test-browser`: what a browser shows.

use std::error::Error;
use std::path::PathBuf;
use std::process::Command;

use crate::command::{self, cargo, is_installed};

/// The pinned package of PyPI that contains Mermaid, and the path of the script in it.
const MERMAID: &str = "artoo-mermaid==11.16.0";
const SCRIPT: &str = "artoo_mermaid/assets/mermaid.min.js";

/// Runs the tests in a headless Chromium. They leave a screenshot in `target/browser`.
pub(crate) fn run() -> Result<(), Box<dyn Error>> {
    if !is_installed("chromium") {
        if !command::may_install() {
            return Err("chromium is missing; install it and run this again".into());
        }
        command::install(&["chromium"])?;
    }
    let script = mermaid()?;
    command::run(&mut cargo(&[
        "build",
        "--quiet",
        "-p",
        "payments",
        "-p",
        "idem-cli",
        "--features",
        "payments/simulate",
    ]))?;
    command::run(cargo(&["test", "-p", "idem-browser"]).env("MERMAID_JS", script))
}

/// Downloads Mermaid among cargo's build artifacts, unless it is there.
fn mermaid() -> Result<PathBuf, Box<dyn Error>> {
    let folder = std::env::current_exe()?.with_file_name(MERMAID);
    let script = folder.join(SCRIPT);
    if script.exists() {
        return Ok(script);
    }
    let made = command::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(folder.join("venv")));
    made.map_err(|error| format!("{error}; Debian has what this needs in the package python3-venv"))?;
    let mut pip = Command::new(folder.join("venv/bin/pip"));
    // The package is data, which any version of Python can unpack.
    pip.args(["install", "--quiet", "--disable-pip-version-check", "--no-deps", "--ignore-requires-python", MERMAID]);
    command::run(pip.arg("--target").arg(&folder))?;
    Ok(script)
}
