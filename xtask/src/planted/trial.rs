//! Runs one suite with one bug, or without any.

use std::error::Error;
use std::fmt;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::NamedTempFile;

use super::bugs::Bug;
use super::build::Executables;
use super::suites::Suite;
use crate::servers::Servers;

/// The environment variable with the bug's name.
const VARIABLE: &str = "IDEM_PLANTED_BUG";

/// The time limit of a suite: many times what it needs, because the machine may be busy.
const LIMIT: Duration = Duration::from_secs(180);

/// The number of random cases: fewer than in a test run, because a bug shows soon.
const FEWER: [(&str, &str); 2] = [("IDEM_CASES", "40"), ("PROPTEST_CASES", "256")];

/// The outcome of a suite.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// This test failed.
    Killed(String),
    /// It did not end in time.
    TimedOut,
    /// All tests passed.
    Survived,
}

impl fmt::Display for Outcome {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Killed(by) => write!(formatter, "killed by {by}"),
            Self::TimedOut => write!(formatter, "timed out after {} s", LIMIT.as_secs()),
            Self::Survived => formatter.write_str("survived"),
        }
    }
}

impl Outcome {
    /// Whether the suite has noticed the bug.
    pub(super) fn is_killed(&self) -> bool {
        matches!(self, Self::Killed(_))
    }
}

/// Runs the suite and prints its outcome.
pub(super) fn try_out(
    suite: &Suite,
    bug: Option<&Bug>,
    executables: &Executables,
    servers: &Servers,
) -> Result<Outcome, Box<dyn Error>> {
    let began = Instant::now();
    let outcome = attempt(suite, bug, executables, servers)?;
    let shown = match (bug, &outcome) {
        (None, Outcome::Survived) => "passed".to_owned(),
        _ => outcome.to_string(),
    };
    println!("  {:22} {:5.1} s  {shown}", suite.name, began.elapsed().as_secs_f32());
    Ok(outcome)
}

fn attempt(
    suite: &Suite,
    bug: Option<&Bug>,
    executables: &Executables,
    servers: &Servers,
) -> Result<Outcome, Box<dyn Error>> {
    let printed = NamedTempFile::new()?;
    let mut command = executables.of(suite)?.command();
    // A separate process group, so that all its child processes can be ended with it.
    command.args(suite.filters).process_group(0);
    let output = printed.reopen()?;
    command.stdout(output.try_clone()?).stderr(output);
    // A failure is expected, so no failing case is saved.
    command.envs(FEWER).env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "true").env_remove(VARIABLE);
    command.envs(bug.map(|bug| (VARIABLE, bug.name)));
    let mut child = servers.announce(&mut command).spawn()?;
    let read = || std::fs::read(printed.path()).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    // With a bug, the first failure is enough; without one, all failures matter.
    let ended = wait(&mut child, || Ok(bug.is_some() && first_failure(&read()?).is_some()))?;
    let printed = read()?;
    Ok(match (first_failure(&printed), ended) {
        (None, None) => Outcome::TimedOut,
        (None, Some(status)) if status.success() => {
            let is_idle = |filter: &&&str| !filter.starts_with("--") && !ran_like(&printed, filter);
            if let Some(filter) = suite.filters.iter().find(is_idle) {
                return Err(format!("{} has no test like {filter}", suite.name).into());
            }
            Outcome::Survived
        }
        (failure, status) => {
            if bug.is_none() {
                println!("{printed}");
            }
            Outcome::Killed(failure.or(status.map(|status| status.to_string())).unwrap_or_default())
        }
    })
}

/// Waits for the process. Returns `None` if it was ended early, because `is_enough` or the time limit was reached.
fn wait(child: &mut Child, is_enough: impl Fn() -> io::Result<bool>) -> io::Result<Option<ExitStatus>> {
    let began = Instant::now();
    while began.elapsed() < LIMIT && !is_enough()? {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        sleep(Duration::from_millis(50));
    }
    Command::new("kill").args(["-KILL", "--", &format!("-{}", child.id())]).status()?;
    child.wait()?;
    Ok(None)
}

/// Whether a test ran whose name contains `filter`. The HTTP suite has no harness: its filter is a store of its matrix.
fn ran_like(printed: &str, filter: &str) -> bool {
    let is_named = |line: &str| line.starts_with("test ") || line.starts_with("| ");
    printed.lines().any(|line| is_named(line) && line.contains(filter))
}

/// The name of the first failed test.
fn first_failure(printed: &str) -> Option<String> {
    let failed = |line: &str| Some(line.strip_prefix("test ")?.strip_suffix(" ... FAILED")?.to_owned());
    // The HTTP suite has no harness: its failures name the framework and store, the case, and the reason.
    let places = ["axum on ", "actix on "];
    let case =
        |line: &str| Some(line.split(": ").nth(1).filter(|_| places.iter().any(|at| line.starts_with(at)))?.to_owned());
    printed.lines().find_map(failed).or_else(|| printed.lines().find_map(case))
}
