//! Commands that are printed before they run, and whose failure is an error.

use std::error::Error;
use std::path::Path;
use std::process::Command;

/// The folder of the workspace, independent of the current folder.
pub(crate) fn workspace() -> &'static Path {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest)
}

/// `cargo` with these arguments, in the workspace.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(workspace());
    command
}

/// Prints and runs a command.
pub(crate) fn run(command: &mut Command) -> Result<(), Box<dyn Error>> {
    let shown = shown(command);
    println!("> {shown}");
    let status = command.status().map_err(|error| format!("{shown}: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{shown}: {status}").into()) }
}

/// Prints and runs a command, and returns its output.
pub(crate) fn output_of(command: &mut Command) -> Result<String, Box<dyn Error>> {
    let shown = shown(command);
    println!("> {shown}");
    let output = command.output().map_err(|error| format!("{shown}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{shown}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// Whether a program is installed. It is not run: `rabbitmq-server --version` starts a server, which does not end.
pub(crate) fn is_installed(program: &str) -> bool {
    idem_servers::find_program(program).is_some()
}

/// Fails if this cargo tool is missing, with installation advice.
pub(crate) fn require_cargo_tool(name: &str) -> Result<(), Box<dyn Error>> {
    if output_of(&mut cargo(&[name, "--version"])).is_err() {
        return Err(format!("cargo-{name} is missing; run `cargo install --locked cargo-{name}`").into());
    }
    Ok(())
}

/// Whether Debian's packages can be installed without a prompt.
pub(crate) fn may_install() -> bool {
    let user = Command::new("id").arg("--user").output();
    is_installed("apt-get") && user.is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

/// Installs Debian's packages.
pub(crate) fn install(packages: &[&str]) -> Result<(), Box<dyn Error>> {
    run(Command::new("apt-get").arg("update"))?;
    let mut command = Command::new("apt-get");
    command.args(["install", "--yes", "--no-install-recommends"]).args(packages);
    run(command.env("DEBIAN_FRONTEND", "noninteractive"))
}

fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let words = std::iter::once(program).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
