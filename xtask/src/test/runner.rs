//! Runs test executables side by side, as tests of stores, processes and leases wait for most of their time.
//!
//! cargo-nextest does that too. It starts a process for each test, so that tests cannot share a server, and has to be installed.

use std::collections::VecDeque;
use std::error::Error;
use std::io;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use tempfile::NamedTempFile;

use crate::executables::Executable;

/// How many tests of one executable run at once.
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
    /// The jobs of which a test failed.
    failed: Vec<String>,
}

/// Runs all of them, also after one has failed. What a job prints is shown once it has ended, if it has failed.
pub(super) fn run(jobs: Vec<Job>) -> Result<(), Box<dyn Error>> {
    let began = Instant::now();
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let (count, queue, total) = (jobs.len(), Mutex::new(VecDeque::from(jobs)), Mutex::new(Total::default()));
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    thread::scope(|scope| {
        for _ in 0..processors.max(2) {
            scope.spawn(|| {
                while let Some(mut job) = next() {
                    // More than processors, for the same reason.
                    if std::env::var_os(THREADS).is_none() {
                        job.command.env(THREADS, (processors * 2).max(4).to_string());
                    }
                    let began = Instant::now();
                    let (passed, outcome) = attempt(&mut job.command);
                    let seconds = began.elapsed().as_secs_f32();
                    let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
                    total.passed += passed;
                    match outcome {
                        Ok(()) => println!("{seconds:6.1} s  {passed:4} passed  {}", job.name),
                        Err(printed) => {
                            println!("{seconds:6.1} s  FAILED  {}\n{printed}", job.name);
                            total.failed.push(job.name);
                        }
                    }
                }
            });
        }
    });
    let Total { passed, failed } = total.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!("\n{passed} tests passed, of {count} executables, in {:.0} s", began.elapsed().as_secs_f32());
    if failed.is_empty() { Ok(()) } else { Err(format!("tests failed: {}", failed.join(", ")).into()) }
}

/// How many tests passed, and what the command printed unless all did.
fn attempt(command: &mut Command) -> (u64, Result<(), String>) {
    let mut run = || -> io::Result<(bool, String)> {
        let file = NamedTempFile::new()?;
        let output = file.reopen()?;
        let status = command.stdout(output.try_clone()?).stderr(output).status()?;
        let printed = String::from_utf8_lossy(&std::fs::read(file.path())?).into_owned();
        Ok((status.success(), if status.success() { printed } else { format!("{printed}\n{status}") }))
    };
    match run() {
        Ok((true, printed)) => (passed(&printed), Ok(())),
        Ok((false, printed)) => (passed(&printed), Err(printed)),
        Err(error) => (0, Err(error.to_string())),
    }
}

/// How many tests passed, by the harness' last lines: `test result: ok. 5 passed; …`.
fn passed(printed: &str) -> u64 {
    let results = printed.lines().filter_map(|line| line.strip_prefix("test result: "));
    results.filter_map(|result| result.split_once(". ")?.1.split(' ').next()?.parse::<u64>().ok()).sum()
}
