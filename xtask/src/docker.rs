//! The parts of Docker's command line that images need.

use std::error::Error;
use std::process::{Command, Stdio};

/// `docker` with these arguments.
pub(crate) fn docker(args: &[&str]) -> Command {
    let mut command = Command::new("docker");
    command.args(args).stdin(Stdio::null());
    command
}

/// Fails with one line of advice if no engine answers.
pub(crate) fn expect_engine() -> Result<(), Box<dyn Error>> {
    let asked = docker(&["version", "--format", "{{.Server.Version}}"]).output();
    let output = asked.map_err(|error| format!("containers need Docker, and `docker` does not run ({error})"))?;
    if output.status.success() {
        println!("Docker Engine: {}", String::from_utf8_lossy(&output.stdout).trim());
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let reason = said.lines().next().unwrap_or("it does not say why");
    Err(format!("containers need a Docker engine, and none answers: {reason}").into())
}

pub(crate) fn has_image(name: &str) -> bool {
    inspect(name, "{{.Id}}").is_ok()
}

/// The id of an image.
pub(crate) fn id_of(name: &str) -> Result<String, Box<dyn Error>> {
    inspect(name, "{{.Id}}")
}

/// A label of an image; `None` if the label or the image is missing.
pub(crate) fn label_of(name: &str, label: &str) -> Option<String> {
    inspect(name, &format!("{{{{index .Config.Labels \"{label}\"}}}}")).ok()
}

/// The size of an image, for people.
pub(crate) fn size_of(name: &str) -> Result<String, Box<dyn Error>> {
    let bytes: u64 = inspect(name, "{{.Size}}")?.parse()?;
    Ok(format!("{} MB", bytes / 1_000_000))
}

fn inspect(name: &str, format: &str) -> Result<String, Box<dyn Error>> {
    let output = docker(&["image", "inspect", "--format", format, name]).output()?;
    if output.status.success() {
        return Ok(String::from_utf8(output.stdout)?.trim().to_owned());
    }
    Err(format!("{name}: {}", String::from_utf8_lossy(&output.stderr).trim()).into())
}
