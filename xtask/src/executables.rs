//! The test executables that cargo has built.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::command;

/// The test executable of one target of a package.
#[derive(Debug)]
pub(crate) struct Executable {
    /// The folder of its package, in which cargo runs it.
    pub(crate) package: PathBuf,
    /// `lib`, `bin` or `test`.
    pub(crate) kind: String,
    /// The name of the target.
    pub(crate) name: String,
    pub(crate) program: PathBuf,
}

impl Executable {
    /// Builds all executables of a `cargo test` without running them.
    pub(crate) fn build(test: &mut Command) -> Result<Vec<Self>, Box<dyn Error>> {
        test.args(["--no-run", "--message-format=json-render-diagnostics"]).stderr(Stdio::inherit());
        let printed = command::output_of(test)?;
        let messages = printed.lines().map(|line| Ok(Self::of(&serde_json::from_str(line)?)));
        let executables: Vec<Option<Self>> = messages.collect::<Result<_, serde_json::Error>>()?;
        Ok(executables.into_iter().flatten().collect())
    }

    /// The executable in a message of cargo; `None` for other messages.
    fn of(message: &Value) -> Option<Self> {
        let target = &message["target"];
        // Programs that tests start are built too.
        message["profile"]["test"].as_bool().filter(|is_test| *is_test)?;
        Some(Self {
            package: Path::new(message["manifest_path"].as_str()?).parent()?.to_owned(),
            kind: target["kind"][0].as_str()?.to_owned(),
            name: target["name"].as_str()?.to_owned(),
            program: message["executable"].as_str()?.into(),
        })
    }

    /// A command that runs it in the folder of its package, as cargo does.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.current_dir(&self.package).env("CARGO_MANIFEST_DIR", &self.package).stdin(Stdio::null());
        command
    }
}
