//! Runs test executables concurrently: tests of stores, processes and leases mostly wait.
//!
//! cargo-nextest is not used: it starts a process for each test, so that tests cannot share a server, and must be installed.

use std::collections::VecDeque;
use std::error::Error;
use std::io;
use std::iter;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use tempfile::NamedTempFile;

use crate::executables::Executable;

/// The environment variable with the number of concurrent tests in one executable.
const THREADS: &str = "RUST_TEST_THREADS";

/// One executable, or another command that runs tests.
pub(super) struct Job {
    pub(super) name: String,
    pub(super) command: Command,
}

impl Job {
    pub(super) fn of(executable: &Executable) -> Self {
        let package = executable.package.file_name().unwrap_or_default().to_string_lossy();
        Self { name: format!("{package} ({} {})", executable.kind, executable.name), command: executable.command() }
    }
}

#[derive(Debug, Default)]
struct Total {
    passed: u64,
    /// The jobs with a failed test.
    failed: Vec<String>,
}

/// Runs all jobs, even if one fails. The output of a job is printed after its end, if it failed or has no harness that counts.
pub(super) fn run(jobs: Vec<Job>) -> Result<(), Box<dyn Error>> {
    let began = Instant::now();
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let is_set = std::env::var_os(THREADS).is_some();
    // On two processors, two executables at once disturb each other's servers: the store in Postgres took twice as long beside others.
    // Only the first one, which mostly waits for leases, has a worker for itself.
    let workers = if is_set { 1 } else { (processors / 2).max(1) + 1 };
    let (count, queue, total) = (jobs.len(), Mutex::new(VecDeque::from(jobs)), Mutex::new(Total::default()));
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    thread::scope(|scope| {
        for worker in 0..workers {
            let (next, total) = (&next, &total);
            scope.spawn(move || {
                let most = if worker == 0 && workers > 1 { 1 } else { count };
                for mut job in iter::from_fn(next).take(most) {
                    // Tests mostly wait, so there are more threads than processors.
                    if !is_set {
                        job.command.env(THREADS, (processors * 2).max(4).to_string());
                    }
                    println!("          begins        {}", job.name);
                    let began = Instant::now();
                    let (succeeded, printed) = attempt(&mut job.command);
                    let seconds = began.elapsed().as_secs_f32();
                    let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
                    let passed = passed(&printed);
                    total.passed += passed.unwrap_or(0);
                    match passed {
                        _ if !succeeded => println!("{seconds:6.1} s  FAILED       {}\n{printed}", job.name),
                        Some(passed) => println!("{seconds:6.1} s  {passed:4} passed  {}", job.name),
                        None => println!("{printed}\n{seconds:6.1} s       passed  {}", job.name),
                    }
                    if !succeeded {
                        total.failed.push(job.name);
                    }
                }
            });
        }
    });
    let Total { passed, mut failed } = total.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!("\n{passed} tests passed in {count} commands, in {:.0} s", began.elapsed().as_secs_f32());
    failed.sort();
    if failed.is_empty() { Ok(()) } else { Err(format!("tests failed: {}", failed.join(", ")).into()) }
}

/// Runs a command. Returns whether it succeeded, and its output.
fn attempt(command: &mut Command) -> (bool, String) {
    let mut run = || -> io::Result<(bool, String)> {
        let file = NamedTempFile::new()?;
        let output = file.reopen()?;
        let status = command.stdout(output.try_clone()?).stderr(output).status()?;
        let printed = String::from_utf8_lossy(&std::fs::read(file.path())?).into_owned();
        Ok((status.success(), if status.success() { printed } else { format!("{printed}\n{status}") }))
    };
    run().unwrap_or_else(|error| (false, error.to_string()))
}

/// How many tests passed, by the harness' last lines, as in `test result: ok. 5 passed; 0 failed`; `None` without a harness.
fn passed(printed: &str) -> Option<u64> {
    let results = printed.lines().filter_map(|line| line.strip_prefix("test result: "));
    let counts = results.filter_map(|result| result.split_once(". ")?.1.split(' ').next()?.parse::<u64>().ok());
    counts.fold(None, |sum, count| Some(sum.unwrap_or(0) + count))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(script: &str) -> Job {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Job { name: script.to_owned(), command }
    }

    #[test]
    fn passed_tests_are_summed_over_harnesses() {
        let result = "running 2 tests\ntest result: ok. 2 passed; 0 failed; 0 ignored\n";
        assert_eq!(passed(&result.repeat(2)), Some(4));
        assert_eq!(passed("test result: FAILED. 1 passed; 1 failed"), Some(1));
        assert_eq!(passed("a matrix"), None);
    }

    #[test]
    fn all_jobs_run_and_those_that_failed_are_named() {
        let folder = tempfile::TempDir::new().unwrap();
        let marks = ["a", "b"].map(|name| format!("touch {}", folder.path().join(name).display()));
        let error = run(vec![job(&marks[0]), job("false"), job("no-such-program"), job(&marks[1])]).unwrap_err();
        assert_eq!(error.to_string(), "tests failed: false, no-such-program");
        assert_eq!(folder.path().read_dir().unwrap().count(), 2);
        run(vec![job("true")]).unwrap();
    }
}
