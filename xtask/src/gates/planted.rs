//! Checks that no file of the product mentions planted bugs, and that a copy with all of them compiles.

use std::error::Error;

use crate::command::workspace;
use crate::planted;

pub(crate) fn check() -> Result<(), Box<dyn Error>> {
    let mut grep = std::process::Command::new("git");
    grep.args(["grep", "--line-number", "--ignore-case", "planted", "--", "crates"]).current_dir(workspace());
    println!("> git grep --line-number --ignore-case planted -- crates");
    let output = grep.output()?;
    match output.status.code() {
        // Nothing was found.
        Some(1) => planted::compiles(),
        Some(0) => {
            Err(format!("the product mentions planted bugs:\n{}", String::from_utf8_lossy(&output.stdout)).into())
        }
        _ => Err(format!("git grep: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr)).into()),
    }
}
