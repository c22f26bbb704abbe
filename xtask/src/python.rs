//! Programs of the Python Package Index, each in a separate environment among cargo's build artifacts.

use std::error::Error;
use std::path::PathBuf;
use std::process::Command;

use crate::command::{self, is_installed};

/// Installs `package` at `version`, unless its `program` is there and `--help` works. Returns the program.
pub(crate) fn install(package: &str, version: &str, program: &str) -> Result<PathBuf, Box<dyn Error>> {
    let name = package.split('[').next().unwrap_or(package);
    let folder = std::env::current_exe()?.with_file_name(format!("{name}-{version}"));
    let installed = folder.join("bin").join(program);
    // An environment whose Python has been replaced has the file, but does not run it.
    if command::output_of(Command::new(&installed).arg("--help")).is_ok() {
        return Ok(installed);
    }
    if !is_installed("python3") {
        return Err(
            format!("python3 is missing, by which {name} runs; install it (3.10 or newer) and run this again").into()
        );
    }
    let made = command::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder));
    made.map_err(|error| format!("{error}; Debian has what this needs in the package python3-venv"))?;
    let mut pip = Command::new(folder.join("bin/pip"));
    pip.args(["install", "--quiet", "--disable-pip-version-check", &format!("{package}=={version}")]);
    command::run(&mut pip)?;
    Ok(installed)
}
