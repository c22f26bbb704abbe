//! Docker's command line, for what the library lacks.

use std::process::Stdio;

use tokio::process::Command;

use crate::Error;

/// Runs `docker` and returns its output.
pub(crate) async fn docker(args: &[&str]) -> Result<String, Error> {
    let mut command = Command::new("docker");
    command.args(args).stdin(Stdio::null()).kill_on_drop(true);
    let output = command.output().await.map_err(|error| format!("docker: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned());
    }
    Err(format!("docker {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim_end()).into())
}
