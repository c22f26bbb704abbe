//! A clock that can be shifted for some programs.

use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Error;

const SOURCE: &str = include_str!("clock.c");

/// A clock that can be shifted while programs use it. Monotonic clocks, which measure durations, are not shifted.
///
/// libfaketime does not work here: it reads its file, and so allocates memory, each time that a program reads the clock.
/// Postgres does so in signal handlers, which occasionally corrupts its heap.
#[derive(Debug, Clone)]
pub struct Clock {
    library: PathBuf,
    file: PathBuf,
}

impl Clock {
    /// Makes a clock that is not shifted at first. Linux only.
    ///
    /// `file` holds the shift, and the programs must be able to read it. The library that they load is in the same folder.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] if this machine has no C compiler.
    pub fn new(file: &Path) -> Result<Clock, Error> {
        let (source, library) = (file.with_extension("c"), file.with_extension("so"));
        std::fs::write(&source, SOURCE).map_err(Error::io("write a file"))?;
        let mut compile = Command::new("cc");
        let compiled = compile.args(["-shared", "-fPIC", "-O2", "-Wall", "-o"]).args([&library, &source]).output();
        let compiled = compiled.map_err(|error| match error.kind() {
            ErrorKind::NotFound => Error::Missing {
                what: "there is no C compiler on this machine, with which the library that shifts clocks is made"
                    .into(),
                advice: "install Debian's packages gcc and libc6-dev".into(),
            },
            _ => Error::io("run cc")(error),
        })?;
        if !compiled.status.success() {
            return Err(Error::failed(format!("cc: {}", String::from_utf8_lossy(&compiled.stderr))));
        }
        std::fs::write(file, 0_i64.to_ne_bytes()).map_err(Error::io("write a file"))?;
        Ok(Clock { library, file: file.to_owned() })
    }

    /// Sets the shift, in seconds: positive is ahead of the clock of this machine, negative is behind.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn shift(&self, seconds: i64) -> Result<(), Error> {
        // In place, because the file is mapped, and in one write.
        let mut file = File::options().write(true).open(&self.file).map_err(Error::io("open a file"))?;
        file.write_all(&seconds.to_ne_bytes()).map_err(Error::io("write a file"))
    }

    /// The environment of a program that uses this clock.
    #[must_use]
    pub fn environment(&self) -> Vec<(&'static str, OsString)> {
        vec![("LD_PRELOAD", self.library.clone().into()), ("IDEM_CLOCK", self.file.clone().into())]
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::io::{BufRead as _, BufReader};
    use std::process::Stdio;
    use std::time::{SystemTime, UNIX_EPOCH};

    use super::*;

    #[test]
    fn a_program_that_runs_sees_each_shift() {
        let folder = tempfile::tempdir().unwrap();
        let clock = Clock::new(&folder.path().join("clock")).unwrap();
        // One process that prints the time on request, with a builtin of the shell.
        let mut shell = Command::new("bash");
        let shell = shell.args(["-c", "while read; do printf '%(%s)T\\n' -1; done"]).envs(clock.environment());
        let mut shell = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (mut asks, mut says) = (shell.stdin.take().unwrap(), BufReader::new(shell.stdout.take().unwrap()));
        for ahead in [0, 3_600, -7_200, 0] {
            clock.shift(ahead).unwrap();
            writeln!(asks).unwrap();
            let mut said = String::new();
            says.read_line(&mut said).unwrap();
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs().cast_signed();
            let difference = said.trim().parse::<i64>().unwrap() - now - ahead;
            assert!(difference.abs() <= 60, "{said:?} is {difference} s from what was wanted");
        }
        drop(asks);
        assert!(shell.wait().unwrap().success());
    }

    #[test]
    fn a_clock_whose_file_is_missing_lets_nothing_run() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("clock");
        let clock = Clock::new(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        assert!(!Command::new("true").envs(clock.environment()).status().unwrap().success());
    }
}
