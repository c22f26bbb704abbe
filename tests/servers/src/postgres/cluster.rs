//! A Postgres server that runs as a process of this machine.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::version_in;
use crate::account::Account;
use crate::clock::Clock;
use crate::keeper::Keeper;
use crate::server::Server;
use crate::{Error, TEMPLATE_VARIABLE, port, processes};

/// Runs `initdb`, which is in the server's folder. Nothing is synced, because the data need not survive a crash of the machine.
const INIT: &str = concat!(
    r#""${1%/*}/initdb" --pgdata="$folder/data" --username=postgres --auth=trust --encoding=UTF8 --no-locale --no-sync "#,
    r#"</dev/null >>"$folder/log" 2>&1; echo "$?""#,
);

/// Copies the output of an earlier `initdb`, which takes 0.1 s instead of 1.5 s.
const COPY_TEMPLATE: &str = r#"cp -Rp "$IDEM_TEST_POSTGRES_TEMPLATE" "$folder/data" >>"$folder/log" 2>&1; echo "$?""#;

/// Copies the primary with `pg_basebackup`, which also writes the standby's connection settings.
const COPY: &str = concat!(
    r#""${1%/*}/pg_basebackup" --pgdata="$folder/data" --host=127.0.0.1 --username=postgres --checkpoint=fast "#,
    r#"--wal-method=stream --no-sync --write-recovery-conf "#,
);

/// Promotes the server and waits until it accepts writes.
const PROMOTE: &str = r#""${1%/*}/pg_ctl" promote --pgdata="$folder/data" --wait >>"$folder/log" 2>&1; echo "$?""#;

/// Shuts the server down in immediate mode; a paused server must be resumed for that. A killed server leaves a shared memory
/// segment, of which a machine has a limited number. Its id is in line 7 of the pid file.
///
/// Background processes of a shell ignore QUIT, and so does a server until it has installed its handlers. The signal is
/// therefore repeated until the server has ended.
const LAST: &str = r#"if [ "$server" ]; then
    kill -s QUIT "$server"; kill -s CONT "$server"
    (while sleep 0.5; do kill -s QUIT "$server"; done) & again=$!
    wait "$server"; kill "$again"
fi
if [ -f "$folder/data/postmaster.pid" ]; then set -- $(sed -n 7p "$folder/data/postmaster.pid"); ipcrm -m "$2"; fi"#;

#[derive(Debug)]
pub(super) struct Cluster {
    // Dropped before the folder, which the keeper removes.
    keeper: Keeper,
    folder: TempDir,
    port: u16,
    version: String,
    origin: String,
    /// The process id of the postmaster while it runs.
    server: Option<u32>,
    /// Its private clock, if it has one.
    clock: Option<Clock>,
}

/// The source of a new server's data.
#[derive(Debug, Clone, Copy)]
pub(super) enum Data {
    New,
    /// A copy of the template, equivalent to new data.
    Template,
    /// A copy of the primary on this port, which it follows.
    CopyOf(u16),
}

impl Data {
    /// Puts the data into the keeper's folder. `binaries` must have no symbolic links in its path.
    pub(super) fn fill(self, keeper: &mut Keeper, binaries: &Path) -> Result<(), Error> {
        let (order, what) = match self {
            Data::New => (INIT.to_owned(), "initialise its data"),
            Data::Template => (COPY_TEMPLATE.to_owned(), "copy the data that were made for it"),
            Data::CopyOf(port) => {
                let order = format!(r#"{COPY} --port={port} </dev/null >>"$folder/log" 2>&1; echo "$?""#);
                (order, "copy the data of its primary")
            }
        };
        match keeper.order(&order)?.as_str() {
            "0" => Ok(()),
            status => {
                Err(keeper.error(format!("a server from {} could not {what}: status {status}", binaries.display())))
            }
        }
    }
}

/// Resolves symbolic links of the folder, because the real path says more than one on PATH.
pub(super) fn resolved(binaries: &Path) -> Result<PathBuf, Error> {
    let postgres = binaries.join("postgres").canonicalize().map_err(Error::io("find postgres"))?;
    Ok(postgres.parent().unwrap_or(binaries).to_owned())
}

impl Cluster {
    /// Starts the binaries in this folder.
    pub(super) fn start(binaries: &Path, settings: &[&str]) -> Result<Cluster, Error> {
        let is_made = std::env::var_os(TEMPLATE_VARIABLE).is_some();
        Cluster::start_on(if is_made { Data::Template } else { Data::New }, binaries, settings)
    }

    /// Starts a standby of the primary on this port.
    pub(super) fn start_standby(binaries: &Path, primary: u16, settings: &[&str]) -> Result<Cluster, Error> {
        Cluster::start_on(Data::CopyOf(primary), binaries, settings)
    }

    fn start_on(data: Data, binaries: &Path, settings: &[&str]) -> Result<Cluster, Error> {
        /// Another process may take the port before the server does.
        const ATTEMPTS: usize = 5;
        let mut attempt = 1;
        let binaries = resolved(binaries)?;
        loop {
            match Cluster::start_once(data, &binaries, settings) {
                Err(Error::Failed { log, .. }) if attempt < ATTEMPTS && log.contains("Address already in use") => {
                    attempt += 1;
                }
                result => return result,
            }
        }
    }

    fn start_once(data: Data, binaries: &Path, settings: &[&str]) -> Result<Cluster, Error> {
        let folder = TempDir::with_prefix("idem-postgres-").map_err(Error::io("make a temporary folder"))?;
        let account = Account::for_owner_of(folder.path())?;
        let port = port::free()?;
        let command = command(binaries, folder.path(), port, settings);
        let mut keeper = Keeper::start(account, folder.path(), LAST, command)?;
        data.fill(&mut keeper, binaries)?;
        let version = Command::new(binaries.join("postgres")).arg("--version").output();
        let version = version.map_err(Error::io("run postgres --version"))?;
        let mut cluster = Cluster {
            keeper,
            folder,
            port,
            version: version_in(&String::from_utf8_lossy(&version.stdout)),
            origin: format!("private server from {}", binaries.display()),
            server: None,
            clock: None,
        };
        cluster.start_again()?;
        Ok(cluster)
    }

    fn running(&self) -> Result<u32, Error> {
        self.server.ok_or_else(|| Error::failed("the server is not running"))
    }

    /// Promotes a standby, and waits until it is a primary.
    pub(super) fn promote(&mut self) -> Result<(), Error> {
        match self.keeper.order(PROMOTE)?.as_str() {
            "0" => Ok(()),
            status => Err(self.keeper.error(format!("pg_ctl promote ended with status {status}"))),
        }
    }

    /// Sends a signal to the child of the server with this title, as in `walreceiver`, and returns its process id; `None` if
    /// there is no such child.
    pub(super) fn signal_child(&mut self, name: &str, signal: &str) -> Result<Option<u32>, Error> {
        let server = self.running()?;
        let child =
            processes::all()?.into_iter().find(|child| child.parent == server && title(child.id).contains(name));
        if let Some(child) = child {
            self.keeper.signal(signal, &[child.id])?;
        }
        Ok(child.map(|child| child.id))
    }

    /// Waits for the end of a child of the server.
    pub(super) fn wait_for_end_of(&self, child: u32) -> Result<(), Error> {
        self.keeper.wait_until("kept a child that was told to end", || Ok(!processes::is_running(child)?))
    }

    /// The server and its children. It stops the server first, so that no new child is missed.
    fn family(&mut self) -> Result<Vec<u32>, Error> {
        let server = self.running()?;
        self.keeper.signal("STOP", &[server])?;
        let stands_still = |process: &processes::Process| process.id != server || "TZ".contains(process.state);
        self.keeper.wait_until("did not stand still", || Ok(processes::all()?.iter().all(stands_still)))?;
        let children = processes::all()?.into_iter().filter(|process| process.parent == server);
        Ok(std::iter::once(server).chain(children.map(|child| child.id)).collect())
    }

    /// Whether the server is ready, by line 8 of its pid file. A connection would not show whose server answers on the port.
    fn is_ready(&self, server: u32) -> bool {
        let lines = std::fs::read_to_string(self.folder.path().join("data/postmaster.pid")).unwrap_or_default();
        let mut lines = lines.lines();
        lines.next() == Some(server.to_string().as_str()) && lines.nth(6).is_some_and(|state| state.trim() == "ready")
    }

    fn wait_until_ready(&mut self, server: u32) -> Result<(), Error> {
        self.keeper.wait_until("did not accept connections", || {
            if !processes::is_running(server)? {
                return Err(self.keeper.error("the server ended while it started"));
            }
            Ok(self.is_ready(server))
        })
    }
}

/// The title of a process; empty if it has ended.
fn title(process: u32) -> String {
    match std::fs::read(format!("/proc/{process}/cmdline")) {
        Ok(title) => String::from_utf8_lossy(&title).into_owned(),
        Err(_) => {
            let output = Command::new("ps").args(["-o", "command=", "-p", &process.to_string()]).output();
            output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
        }
    }
}

fn command(binaries: &Path, folder: &Path, port: u16, settings: &[&str]) -> Vec<OsString> {
    let mut command = vec![binaries.join("postgres").into(), "-D".into(), folder.join("data").into()];
    command.extend(["-k".into(), folder.into()]);
    let own = ["listen_addresses=127.0.0.1".into(), format!("port={port}")];
    let settings = super::SETTINGS.iter().chain(settings).map(|setting| (*setting).to_owned());
    command.extend(own.into_iter().chain(settings).flat_map(|setting| ["-c".into(), setting.into()]));
    command
}

impl Server for Cluster {
    fn port(&self) -> u16 {
        self.port
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn origin(&self) -> &str {
        &self.origin
    }

    fn log(&self) -> Result<String, Error> {
        self.keeper.log()
    }

    fn start_again(&mut self) -> Result<(), Error> {
        if self.server.is_some() {
            return Err(Error::failed("the server is running already"));
        }
        let server = self.keeper.start_server()?;
        self.server = Some(server);
        self.wait_until_ready(server).inspect_err(|_| {
            // It can be started again once the obstacle is gone.
            let _ = self.kill();
        })
    }

    fn stop(&mut self) -> Result<(), Error> {
        let Some(server) = self.server else { return Ok(()) };
        self.keeper.signal("INT", &[server])?;
        self.keeper.signal("CONT", &[server])?;
        self.keeper.reap(server)?;
        self.server = None;
        Ok(())
    }

    fn kill(&mut self) -> Result<(), Error> {
        let Some(server) = self.server else { return Ok(()) };
        let family = self.family()?;
        self.keeper.signal("KILL", &family)?;
        // The next server refuses to start while a child of this one still holds the shared memory.
        for process in &family {
            self.keeper.wait_until("did not end", || Ok(!processes::is_running(*process)?))?;
        }
        self.keeper.reap(server)?;
        self.server = None;
        Ok(())
    }

    fn pause(&mut self) -> Result<(), Error> {
        let server = self.running()?;
        self.keeper.signal("STOP", &[server])
    }

    fn resume(&mut self) -> Result<(), Error> {
        let server = self.running()?;
        self.keeper.signal("CONT", &[server])
    }

    /// Stops all processes: clients get no answers, and nothing is written.
    fn freeze(&mut self) -> Result<(), Error> {
        let family = self.family()?;
        self.keeper.signal("STOP", &family)
    }

    fn thaw(&mut self) -> Result<(), Error> {
        let family = self.family()?;
        self.keeper.signal("CONT", &family)
    }

    /// Sets the limit for the size of a file, which fails a write as a full disk does. Only the soft limit is set, because the
    /// hard one could not be raised again.
    fn set_room(&mut self, has_room: bool) -> Result<(), Error> {
        let size = if has_room { "unlimited" } else { "0" };
        let server = self.running()?;
        // Processes that have ended meanwhile need no limit.
        for process in self.family()? {
            self.keeper.order(&format!("prlimit --pid {process} --fsize={size}:; echo set"))?;
        }
        self.keeper.signal("CONT", &[server])
    }

    fn give_clock(&mut self) -> Result<(), Error> {
        self.stop()?;
        let clock = Clock::new(&self.folder.path().join("clock"))?;
        let pairs = clock.environment().into_iter().map(|(name, value)| format!("{name}='{}'", value.display()));
        self.keeper.order(&format!(r#"set -- env {} "$@"; echo set"#, pairs.collect::<Vec<_>>().join(" ")))?;
        self.clock = Some(clock);
        self.start_again()
    }

    fn shift_clock(&mut self, seconds: i64) -> Result<(), Error> {
        let Some(clock) = &self.clock else { return Err(Error::failed("the server has the clock of this machine")) };
        clock.shift(seconds)
    }
}
