//! `cargo xtask fuzz`: lets libFuzzer look for inputs that break a property.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::{self, cargo, is_installed, workspace};

/// The longest input, in bytes: several times the longest that any code here distinguishes.
const LONGEST: &str = "-max_len=8192";

/// The time limit of one input, in seconds: enough for a thousand inputs on a loaded machine.
const PATIENCE: &str = "-timeout=10";

/// How long, and which target.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Seconds for each target.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// The target; default all of them.
    #[arg(long)]
    target: Option<String>,
}

/// The results of one target.
struct Run {
    executions: String,
    /// The last line of progress: edges, features, size of the corpus.
    reached: String,
    /// The failure, if there was one.
    failure: Option<String>,
}

/// Runs each target from its committed corpus, and prints how many inputs it tried.
pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let targets = chosen(options.target.as_deref())?;
    if command::output_of(&mut cargo(&["fuzz", "--version"])).is_err() {
        return Err("cargo-fuzz is missing; run `cargo install --locked cargo-fuzz`".into());
    }
    if !is_installed("c++") {
        return Err("a C++ compiler is missing, of which libFuzzer is made; install Debian's package g++".into());
    }
    command::run(&mut cargo_fuzz("build", &[]))?;
    let mut failures = Vec::new();
    for target in &targets {
        let run = run_one(target, options.seconds)?;
        println!("{target}: {} executions, {}", run.executions, run.reached);
        failures.extend(run.failure.map(|failure| format!("{target}: {failure}")));
    }
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\n").into()) }
}

/// The targets, in the order of their files.
fn chosen(wanted: Option<&str>) -> Result<Vec<String>, Box<dyn Error>> {
    let mut targets = Vec::new();
    for file in fs::read_dir(folder().join("fuzz_targets"))? {
        targets.extend(file?.path().file_stem().map(|name| name.to_string_lossy().into_owned()));
    }
    targets.sort();
    match wanted {
        None => Ok(targets),
        Some(target) if targets.iter().any(|name| name == target) => Ok(vec![target.to_owned()]),
        Some(target) => Err(format!("there is no target {target}; there are {}", targets.join(", ")).into()),
    }
}

fn folder() -> PathBuf {
    workspace().join("fuzz")
}

/// The cargo-fuzz command, without a sanitizer: that would need a rebuilt standard library, and this workspace has no unsafe
/// code. The fuzzer's flags are unstable, and `RUSTC_BOOTSTRAP` makes a stable compiler accept them.
fn cargo_fuzz(verb: &str, args: &[&str]) -> Command {
    let mut command = cargo(&["fuzz", verb, "--sanitizer", "none"]);
    command.args(args).env("RUSTC_BOOTSTRAP", "1");
    command
}

fn run_one(target: &str, seconds: u32) -> Result<Run, Box<dyn Error>> {
    // New inputs go here, so that the committed corpus changes only by hand.
    let found = workspace().join("target/fuzz").join(target);
    fs::create_dir_all(&found)?;
    let (found, committed) = (found.display().to_string(), format!("fuzz/corpus/{target}"));
    let time = format!("-max_total_time={seconds}");
    let mut args =
        vec![target, &found, &committed, "--", &time, LONGEST, PATIENCE, "-print_final_stats=1", "-verbosity=1"];
    let dictionary = folder().join("dictionaries").join(target);
    let dictionary = dictionary.is_file().then(|| format!("-dict={}", dictionary.display()));
    args.extend(dictionary.as_deref());
    println!("> cargo fuzz run {target}, {seconds} s");
    let output = cargo_fuzz("run", &args).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    let failure = (!output.status.success()).then(|| failure(&said));
    Ok(Run { executions: executions(&said), reached: reached(&said), failure })
}

fn executions(said: &str) -> String {
    let count = said.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
    count.map_or("unknown", str::trim).to_owned()
}

/// Extracts the progress from a line such as `#4194304 DONE cov: 812 ft: 3014 corp: 402/21Kb lim: 4096 exec/s: 69905 rss:
/// 71Mb`.
fn reached(said: &str) -> String {
    let last = said.lines().rev().find(|line| line.starts_with('#') && line.contains(" cov: "));
    let figures =
        last.and_then(|line| Some(&line[line.find("cov: ")?..line.find(" lim: ").or(line.find(" exec/s: "))?]));
    figures.unwrap_or("nothing reached").to_owned()
}

/// The place of the failing input, and the panic.
fn failure(said: &str) -> String {
    let input = said.lines().find_map(|line| line.split("Test unit written to ").nth(1));
    let panic: Vec<&str> = said.lines().skip_while(|line| !line.contains("panicked at")).take(4).collect();
    match input {
        Some(input) => format!(
            "{}\nthe input is {}; keep it in fuzz/corpus once the bug is fixed",
            panic.join("\n"),
            Path::new(input.trim()).display()
        ),
        None => format!("it did not run:\n{said}"),
    }
}
