//! One suite with one bug, or with none.

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

/// Names the bug that is on.
const VARIABLE: &str = "IDEM_PLANTED_BUG";

/// How long a suite may take: many times what it needs, as the machine may be busy.
const LIMIT: Duration = Duration::from_secs(180);

/// Sequences and values that are tried at random: fewer than in a test run, as a bug shows soon.
const FEWER: [(&str, &str); 2] = [("IDEM_CASES", "40"), ("PROPTEST_CASES", "256")];

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// A test failed, of this name.
    Killed(String),
    /// It did not end.
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

/// Runs the suite, and says so.
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
    // In a group of its own, so that what it starts can be ended with it.
    command.args(suite.filters).process_group(0);
    let output = printed.reopen()?;
    command.stdout(output.try_clone()?).stderr(output);
    // A failure is expected here, and no case to be kept.
    command.envs(FEWER).env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "true").env_remove(VARIABLE);
    command.envs(bug.map(|bug| (VARIABLE, bug.name)));
    let mut child = servers.announce(&mut command).spawn()?;
    let read = || std::fs::read(printed.path()).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    // With a bug, the first failure says it all; without one, all failures are of interest.
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

/// How it ended; `None` when it was ended because that was enough, or because its time was over.
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

/// Whether a test ran whose name contains `filter`. The suite over sockets has no harness: its filter is a store of its matrix.
fn ran_like(printed: &str, filter: &str) -> bool {
    let is_named = |line: &str| line.starts_with("test ") || line.starts_with("| ");
    printed.lines().any(|line| is_named(line) && line.contains(filter))
}

/// The name of a test that failed.
fn first_failure(printed: &str) -> Option<String> {
    let failed = |line: &str| Some(line.strip_prefix("test ")?.strip_suffix(" ... FAILED")?.to_owned());
    // The suite over sockets has no harness: it says where it failed, in which case, and why.
    let places = ["axum on ", "actix on "];
    let case =
        |line: &str| Some(line.split(": ").nth(1).filter(|_| places.iter().any(|at| line.starts_with(at)))?.to_owned());
    printed.lines().find_map(failed).or_else(|| printed.lines().find_map(case))
}
