//! One suite with one bug, or with none.

use std::error::Error;
use std::fmt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use tempfile::NamedTempFile;

use super::bugs::Bug;
use super::build::Binaries;
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
    /// It did not end, and the bug is one that makes tests wait.
    Hung,
    /// It did not end.
    TimedOut,
    /// All tests passed.
    Survived,
}

impl fmt::Display for Outcome {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Killed(by) => write!(formatter, "killed by {by}"),
            Self::Hung => formatter.write_str("killed, as it hung"),
            Self::TimedOut => write!(formatter, "timed out after {} s", LIMIT.as_secs()),
            Self::Survived => formatter.write_str("survived"),
        }
    }
}

impl Outcome {
    /// Whether the suite has noticed the bug.
    pub(super) fn is_killed(&self) -> bool {
        matches!(self, Self::Killed(_) | Self::Hung)
    }
}

/// Runs the suite, and says so.
pub(super) fn try_out(
    suite: &Suite,
    bug: Option<&Bug>,
    binaries: &Binaries,
    servers: &Servers,
) -> Result<Outcome, Box<dyn Error>> {
    let began = Instant::now();
    let outcome = attempt(suite, bug, binaries, servers)?;
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
    binaries: &Binaries,
    servers: &Servers,
) -> Result<Outcome, Box<dyn Error>> {
    let (program, folder) = binaries.of(suite)?;
    let printed = NamedTempFile::new()?;
    let mut command = Command::new(program);
    // As cargo would run it; in a group of its own, so that what it starts can be ended with it.
    command.args(suite.filters).current_dir(folder).env("CARGO_MANIFEST_DIR", folder).process_group(0);
    let output = printed.reopen()?;
    command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
    // A failure is expected here, and no case to be kept.
    command.envs(FEWER).env("PROPTEST_DISABLE_FAILURE_PERSISTENCE", "true").env_remove(VARIABLE);
    command.envs(bug.map(|bug| (VARIABLE, bug.name)));
    let ended = wait(&mut servers.announce(&mut command).spawn()?)?;
    let printed = std::fs::read_to_string(printed.path())?;
    Ok(match ended {
        None if bug.is_some_and(|bug| bug.hangs) => Outcome::Hung,
        None => Outcome::TimedOut,
        Some(status) if status.success() => {
            let count = tests(&printed);
            if count == 0 {
                return Err(format!("{} has no tests like {:?}", suite.name, suite.filters).into());
            }
            Outcome::Survived
        }
        Some(status) => {
            if bug.is_none() {
                println!("{printed}");
            }
            Outcome::Killed(first_failure(&printed).unwrap_or_else(|| status.to_string()))
        }
    })
}

/// `None` when it had to be ended.
fn wait(child: &mut Child) -> Result<Option<ExitStatus>, Box<dyn Error>> {
    let began = Instant::now();
    while began.elapsed() < LIMIT {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        sleep(Duration::from_millis(20));
    }
    Command::new("kill").args(["-KILL", "--", &format!("-{}", child.id())]).status()?;
    child.wait()?;
    Ok(None)
}

/// How many tests there were.
fn tests(printed: &str) -> u32 {
    let counts =
        printed.lines().filter_map(|line| line.strip_prefix("running ")?.split(' ').next()?.parse::<u32>().ok());
    counts.sum()
}

/// The name of a test that failed.
fn first_failure(printed: &str) -> Option<String> {
    let failed = |line: &str| Some(line.strip_prefix("test ")?.strip_suffix(" ... FAILED")?.to_owned());
    printed.lines().find_map(failed)
}
