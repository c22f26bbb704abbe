//! A shell between this process and a server, which ends the server when this process is gone.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use crate::account::Account;
use crate::{Error, processes};

/// The time limit for starting or stopping a server. A loaded machine is slow, but a server that takes longer hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Executes orders line by line until the pipe ends.
///
/// The operating system closes the pipe when the parent ends, even after a `kill -9`. Signals must not end the shell before its
/// work is done. SIGPIPE comes when an answer finds no reader.
const SCRIPT: &str = r#"trap : HUP INT TERM PIPE
last=$1; folder=$2; shift 2; exec 2>>"$folder/log"
while read -r order; do eval "$order"; done
eval "$last"; rm -rf "$folder""#;

/// Starts the server, whose command is `$@`.
const START: &str = r#""$@" </dev/null >>"$folder/log" 2>&1 & server=$!; echo "$server""#;

/// Reaps a server that has ended.
const REAP: &str = r#"wait "$server"; server=; echo reaped"#;

/// The final commands for a server that has nothing to finish.
pub(crate) const KILL: &str = r#"if [ "$server" ]; then kill -s KILL "$server"; wait "$server"; fi"#;

#[derive(Debug)]
pub(crate) struct Keeper {
    shell: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    log: PathBuf,
}

impl Keeper {
    /// Starts the keeper of the server with this command. At the end it runs `last` and removes the folder.
    pub(crate) fn start(
        account: Option<Account>,
        folder: &Path,
        last: &str,
        server: impl IntoIterator<Item = OsString>,
    ) -> Result<Keeper, Error> {
        let mut command = Command::new("sh");
        command.args(["-c", SCRIPT, "keeper", last]).arg(folder).args(server);
        // The server's account may not be able to read the current folder.
        command.current_dir(folder).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        // Ctrl-C goes to the whole process group of the terminal. It must not end the keeper before its work is done.
        command.process_group(0);
        if let Some(account) = account {
            account.own(folder)?;
            account.run(&mut command);
        }
        let mut shell = command.spawn().map_err(Error::io("run sh"))?;
        let (Some(orders), Some(answers)) = (shell.stdin.take(), shell.stdout.take()) else {
            return Err(Error::failed("sh has no pipes"));
        };
        Ok(Keeper { shell, orders: Some(orders), answers: BufReader::new(answers), log: folder.join("log") })
    }

    /// Sends a line of shell and returns the line that it prints.
    pub(crate) fn order(&mut self, order: &str) -> Result<String, Error> {
        let mut answer = String::new();
        let sent = self.orders.as_mut().map(|orders| writeln!(orders, "{order}").and_then(|()| orders.flush()));
        if matches!(sent, Some(Ok(()))) {
            self.answers.read_line(&mut answer).map_err(Error::io("read from the shell that keeps a server"))?;
        }
        match answer.strip_suffix('\n') {
            Some(answer) => Ok(answer.to_owned()),
            None => Err(self.error("the shell that keeps a server has ended")),
        }
    }

    /// Starts the server and returns its process id.
    pub(crate) fn start_server(&mut self) -> Result<u32, Error> {
        let id = self.order(START)?;
        id.parse().map_err(|_| self.error(format!("the server has no process id: {id}")))
    }

    /// Sends a signal. Processes that have ended are skipped.
    pub(crate) fn signal(&mut self, signal: &str, processes: &[u32]) -> Result<(), Error> {
        for process in processes {
            self.order(&format!("kill -s {signal} {process}; echo sent"))?;
        }
        Ok(())
    }

    /// Waits for the end of the server.
    pub(crate) fn reap(&mut self, server: u32) -> Result<(), Error> {
        self.wait_until("did not end", || Ok(!processes::is_running(server)?))?;
        self.order(REAP).map(drop)
    }

    /// Polls until `reached`, because there is no notification.
    pub(crate) fn wait_until(
        &self,
        otherwise: &str,
        mut reached: impl FnMut() -> Result<bool, Error>,
    ) -> Result<(), Error> {
        let start = Instant::now();
        while !reached()? {
            if start.elapsed() > PATIENCE {
                return Err(self.error(format!("the server {otherwise} within {} s", PATIENCE.as_secs())));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// The output of the server, including earlier runs.
    pub(crate) fn log(&self) -> Result<String, Error> {
        let log = std::fs::read(&self.log).map_err(Error::io("read the log of a server"))?;
        Ok(String::from_utf8_lossy(&log).into_owned())
    }

    pub(crate) fn error(&self, what: impl Into<String>) -> Error {
        Error::logged(what, &self.log)
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        drop(self.orders.take());
        // A failure of the keeper cannot be handled here: the temporary folder is removed by its own value.
        let _ = self.shell.wait();
    }
}
