//! Processes of an example, each behind its own proxies.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use idem_proxy::{Network, Proxy};

use crate::Error;

/// How long a process may take to start, servers that are away included.
const PATIENCE: Duration = Duration::from_secs(40);

/// A place for a process, whose port stays the same.
pub(crate) struct Process {
    name: String,
    program: &'static str,
    process: Option<Child>,
    args: Vec<String>,
    folder: PathBuf,
    pub(crate) to_service: Proxy<Network>,
    pub(crate) to_postgres: Proxy<Network>,
}

impl Process {
    /// Starts a program that is built beside this one. The URL of Postgres follows its arguments.
    pub(crate) async fn start(
        name: String,
        program: &'static str,
        mut args: Vec<String>,
        postgres: u16,
        folder: &Path,
    ) -> Result<Self, Error> {
        let to_postgres: Proxy<Network> = Proxy::to_port(postgres).await?;
        args.push(format!("postgres://postgres@127.0.0.1:{}/postgres", to_postgres.port()));
        let to_service = Proxy::to_port(0).await?;
        let folder = folder.to_owned();
        let mut process = Self { name, program, process: None, args, folder, to_service, to_postgres };
        tokio::task::block_in_place(|| process.launch())?;
        Ok(process)
    }

    /// Adds an argument for its next start.
    pub(crate) fn add(&mut self, argument: &str) {
        self.args.push(argument.to_owned());
    }

    /// Starts the process, and tries again while its servers are not there.
    pub(crate) fn launch(&mut self) -> Result<(), Error> {
        let give_up_at = Instant::now() + PATIENCE;
        while !self.try_launch()? {
            if Instant::now() > give_up_at {
                return Err(format!("{} could not start; see {}", self.name, self.folder.display()).into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    fn try_launch(&mut self) -> Result<bool, Error> {
        let program = std::env::current_exe()?.with_file_name(self.program);
        let log = std::fs::File::options().create(true).append(true).open(self.folder.join(&self.name))?;
        let mut process = Command::new(program).args(&self.args).stdout(Stdio::piped()).stderr(log).spawn()?;
        let mut line = String::new();
        BufReader::new(process.stdout.take().ok_or("no output")?).read_line(&mut line)?;
        if line.is_empty() {
            process.kill()?;
            process.wait()?;
            return Ok(false);
        }
        if let Some(port) = line.trim().rsplit_once(':').and_then(|(_, port)| port.parse().ok()) {
            self.to_service.lead_to(port);
        }
        self.process = Some(process);
        Ok(true)
    }

    /// Whether it has ended by itself.
    pub(crate) fn has_died(&mut self) -> Result<bool, Error> {
        Ok(match &mut self.process {
            Some(process) => process.try_wait()?.is_some(),
            None => true,
        })
    }

    /// Stops it, as a machine does that is suspended.
    pub(crate) fn pause(&self) -> Result<(), Error> {
        self.process.as_ref().map_or(Ok(()), |process| signal(process, "STOP"))
    }

    pub(crate) fn resume(&self) -> Result<(), Error> {
        self.process.as_ref().map_or(Ok(()), |process| signal(process, "CONT"))
    }

    pub(crate) fn kill(&mut self) -> Result<(), Error> {
        if let Some(mut process) = self.process.take() {
            process.kill()?;
            process.wait()?;
        }
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// Sends the signal of this name.
pub(crate) fn signal(process: &Child, name: &str) -> Result<(), Error> {
    let sent = Command::new("kill").args([format!("-{name}"), process.id().to_string()]).status()?;
    if sent.success() { Ok(()) } else { Err(format!("process {} got no {name}", process.id()).into()) }
}

/// Starts again what has killed itself, as a supervisor does.
pub(crate) fn start_the_dead(processes: &mut [Process]) -> Result<(), Error> {
    for process in processes {
        if process.has_died()? {
            tokio::task::block_in_place(|| process.launch())?;
        }
    }
    Ok(())
}
