//! `cargo xtask schemathesis`: sends generated requests, derived from the example's OpenAPI description.

use std::error::Error;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use clap::ValueEnum;
use tempfile::TempDir;

use crate::command::{self, cargo, workspace};
use crate::python;

/// The pinned version: this one is known to find nothing, and another one may find more.
const VERSION: &str = "4.32.5";

/// The only tenant. A server that accepts every token would never refuse a wrong one.
const TENANT: &str = "acme";

/// The frameworks, and the number of requests.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The framework; default each of them.
    #[arg(long, value_enum)]
    framework: Option<Framework>,
    /// The most requests for each operation and phase; default that of schemathesis.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    examples: Option<u32>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Framework {
    Axum,
    Actix,
}

impl Framework {
    fn name(self) -> &'static str {
        match self {
            Self::Axum => "axum",
            Self::Actix => "actix",
        }
    }
}

/// Runs schemathesis against the example with each framework, even if one fails.
pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let program = python::install("schemathesis", VERSION, "schemathesis")?;
    command::run(&mut cargo(&["build", "--quiet", "-p", "payments"]))?;
    let chosen = options.framework.as_ref().map_or(Framework::value_variants(), std::slice::from_ref);
    let results: Vec<_> =
        chosen.iter().map(|framework| (framework.name(), check(&program, *framework, options))).collect();
    for (name, result) in &results {
        match result {
            Ok(()) => println!("schemathesis on {name}: no failure"),
            Err(error) => println!("schemathesis on {name}: failed, {error}"),
        }
    }
    let failed: Vec<_> = results.iter().filter(|(_, result)| result.is_err()).map(|(name, _)| *name).collect();
    if failed.is_empty() { Ok(()) } else { Err(format!("schemathesis failed on {}", failed.join(" and ")).into()) }
}

fn check(program: &Path, framework: Framework, options: &Options) -> Result<(), Box<dyn Error>> {
    let mut server = Server::start(framework)?;
    let mut command = Command::new(program);
    // It writes files into the current folder, so it runs in the server's folder, which is removed.
    command.current_dir(server.folder.path());
    let beside = workspace().join("tests/http");
    command.env("SCHEMATHESIS_HOOKS", beside.join("schemathesis_hooks.py"));
    command.arg("--config-file").arg(beside.join("schemathesis.toml")).arg("run");
    command.arg(format!("{}/openapi.json", server.url)).args(["--checks", "all"]);
    command.args(["-H", &format!("Authorization: Bearer {TENANT}")]);
    if let Some(examples) = options.examples {
        command.args(["--max-examples", &examples.to_string()]);
    }
    let checked = command::run(&mut command);
    // If the server has ended, the findings are worthless.
    if let Some(status) = server.process.try_wait()? {
        return Err(format!("payments has ended in the middle: {status}").into());
    }
    checked
}

/// The example with its own databases; killed when dropped.
struct Server {
    process: Child,
    url: String,
    folder: TempDir,
}

impl Server {
    fn start(framework: Framework) -> Result<Self, Box<dyn Error>> {
        let folder = TempDir::new()?;
        // Cargo has built it in the same folder as this program.
        let program = std::env::current_exe()?.with_file_name("payments");
        let mut command = Command::new(&program);
        // Settings in the developer's environment, such as a store, are not for this server.
        let settings = std::env::vars_os().map(|(name, _)| name);
        settings.filter(|name| name.to_string_lossy().starts_with("PAYMENTS_")).for_each(|name| {
            command.env_remove(name);
        });
        let mut process = command
            .args(["--framework", framework.name(), "--listen", "127.0.0.1:0", "--tenants", TENANT])
            // schemathesis sends malformed requests, which actix logs as errors.
            .env("RUST_LOG", "error,actix_http=off")
            .current_dir(folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{}: {error}", program.display()))?;
        let out = process.stdout.take();
        let mut server = Self { process, url: String::new(), folder };
        let mut line = String::new();
        BufReader::new(out.ok_or("payments has no output")?).read_line(&mut line)?;
        let url = line.trim().strip_prefix("listening on ").ok_or_else(|| format!("payments said {line:?}"))?;
        url.clone_into(&mut server.url);
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A process that cannot be killed cannot be handled here.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
