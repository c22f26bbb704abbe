//! `cargo xtask bench`: measures the cost of safety against alternatives, and counts instructions, which are free of noise.

use std::collections::BTreeMap;
use std::error::Error;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use crate::command::{self, cargo, install, is_installed, may_install, workspace};
use crate::test;

/// Programs that the benchmarks need besides the servers, with their Debian packages.
const PROGRAMS: [(&str, &str); 3] = [("wrk", "wrk"), ("redis-benchmark", "redis-tools"), ("valgrind", "valgrind")];

/// How many percent more instructions than the baseline are allowed, because a new compiler version changes them.
const TOLERANCE: f64 = 3.0;

/// The repetitions of work in two runs; the difference of the runs counts.
const TIMES: [u64; 2] = [100, 1_100];

/// What to measure.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Compares the instructions of the core's work with the baseline; fails if one needs over 3 % more.
    #[arg(long)]
    check: bool,
    /// Counts the instructions and makes them the baseline.
    #[arg(long, conflicts_with = "check")]
    record: bool,
    /// Times single pieces of work, without servers.
    #[arg(long, conflicts_with_all = ["check", "record"])]
    micro: bool,
    /// What to measure and how, such as `--quick store`; `-- --help` lists it.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, conflicts_with_all = ["check", "record", "micro"])]
    options: Vec<OsString>,
}

pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    if options.micro {
        return command::run(cargo(&["bench", "--quiet"]).current_dir(folder()));
    }
    for (program, package) in PROGRAMS {
        if is_installed(program) {
            continue;
        }
        if !may_install() {
            return Err(format!("{program} is missing; install Debian's package {package}").into());
        }
        install(&[package])?;
    }
    if options.check || options.record {
        return instructions(options.record);
    }
    let mut bench = cargo(&["run", "--release", "--quiet", "--bin", "idem-bench", "--"]);
    if needs_emulators(&options.options) {
        bench.env("PATH", test::provide_emulators()?);
    }
    command::run(bench.args(&options.options).current_dir(folder()))
}

/// Whether the words name a group, or a store of `scale`, that needs emulators of DynamoDB.
fn needs_emulators(words: &[OsString]) -> bool {
    let has = |wanted: &str| words.iter().any(|word| word.to_string_lossy().ends_with(wanted));
    has("dynamodb")
        || has("dynoxide")
        || has("moto")
        || (has("scale") && !words.iter().any(|word| word.to_string_lossy().starts_with("--engine")))
}

/// The folder of a separate workspace, which keeps the dependencies of the compared libraries out of this one.
fn folder() -> PathBuf {
    workspace().join("bench")
}

fn instructions(record: bool) -> Result<(), Box<dyn Error>> {
    command::run(cargo(&["build", "--release", "--quiet", "--bin", "idem-counts"]).current_dir(folder()))?;
    let program = folder().join("target/release/idem-counts");
    let listed = command::output_of(&mut Command::new(&program))?;
    let mut counted = BTreeMap::new();
    for work in listed.lines() {
        let [few, many] = [count(&program, work, TIMES[0])?, count(&program, work, TIMES[1])?];
        counted.insert(work.to_owned(), many.saturating_sub(few) / (TIMES[1] - TIMES[0]));
    }
    let compiler = command::output_of(Command::new("rustc").arg("--version"))?.trim().to_owned();
    let file = folder().join("baseline.json");
    if record {
        let baseline = json!({ "compiler": compiler, "instructions": counted });
        std::fs::write(&file, format!("{baseline:#}\n"))?;
        println!("{baseline:#}");
        return Ok(());
    }
    let baseline: Value = serde_json::from_slice(&std::fs::read(&file)?)?;
    if baseline["compiler"].as_str() != Some(&compiler) {
        println!("the baseline was counted with {}, and this is {compiler}", baseline["compiler"]);
    }
    compare(&counted, &baseline["instructions"])
}

/// The instructions of a process that does `work` this many times.
fn count(program: &std::path::Path, work: &str, times: u64) -> Result<u64, Box<dyn Error>> {
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(program).args([work, &times.to_string()]);
    // The start addresses of stack and heap change nothing, but the process copies its environment at the start.
    let output = valgrind.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default()).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    let collected = said.lines().find_map(|line| line.split_once("Collected :")?.1.trim().parse().ok());
    collected.ok_or_else(|| format!("callgrind counted nothing for {work}:\n{said}").into())
}

fn compare(counted: &BTreeMap<String, u64>, baseline: &Value) -> Result<(), Box<dyn Error>> {
    let mut slower = Vec::new();
    println!("| work | baseline | now | |");
    println!("|---|---|---|---|");
    for (work, &now) in counted {
        let Some(before) = baseline[work].as_u64() else {
            slower.push(format!("{work} is not in the baseline"));
            continue;
        };
        let change = (now as f64 / before as f64 - 1.0) * 100.0;
        println!("| {work} | {before} | {now} | {change:+.1} % |");
        if change > TOLERANCE {
            slower.push(format!("{work} takes {change:.1} % more instructions"));
        }
    }
    if slower.is_empty() {
        return Ok(());
    }
    Err(format!("{}; if that is meant, run `cargo xtask bench --record`", slower.join(", ")).into())
}
