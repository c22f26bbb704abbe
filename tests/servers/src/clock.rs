//! A clock of somebody's own, by libfaketime.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::Error;

/// Where Debian puts it, for whatever machine.
const FOLDERS: [&str; 3] = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib"];

/// A clock that can be shifted while the programs run that have it. What measures how long something takes goes on as
/// before.
///
/// Programs must not bring an allocator of their own that tells the time, as Redis does: libfaketime does not get along with
/// them.
#[derive(Debug, Clone)]
pub struct Clock {
    library: PathBuf,
    file: PathBuf,
}

impl Clock {
    /// A clock that is right at first. What it shows stands in `file`, which the programs have to be able to read.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] if this machine has no libfaketime.
    pub fn new(file: &Path) -> Result<Clock, Error> {
        let libraries = FOLDERS.iter().map(|folder| Path::new(folder).join("faketime/libfaketimeMT.so.1"));
        let library = libraries.into_iter().find(|library| library.exists()).ok_or_else(|| Error::Missing {
            what: "there is no libfaketime on this machine, by which clocks are shifted".into(),
            advice: "install Debian's package faketime".into(),
        })?;
        let clock = Clock { library, file: file.to_owned() };
        clock.shift(0)?;
        Ok(clock)
    }

    /// From now on it is so many seconds ahead of the clock of this machine, or behind it.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn shift(&self, seconds: i64) -> Result<(), Error> {
        // Readers must never see half of it.
        let new = self.file.with_extension("new");
        std::fs::write(&new, format!("{seconds:+}\n")).map_err(Error::io("write a file"))?;
        std::fs::rename(&new, &self.file).map_err(Error::io("rename a file"))
    }

    /// The environment of a program that has this clock.
    #[must_use]
    pub fn environment(&self) -> Vec<(&'static str, OsString)> {
        vec![
            ("LD_PRELOAD", self.library.clone().into()),
            ("FAKETIME_TIMESTAMP_FILE", self.file.clone().into()),
            // Otherwise a clock that was put forward is read again only when that time has really come.
            ("FAKETIME_NO_CACHE", "1".into()),
            // Two names, for two ages of the library.
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1".into()),
            ("DONT_FAKE_MONOTONIC", "1".into()),
        ]
    }
}
