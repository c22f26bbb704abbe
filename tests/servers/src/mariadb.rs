//! Private MariaDB servers.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use crate::broker::Broker;
use crate::container::{Container, Image};
use crate::server::Server as _;
use crate::setup::mariadb;
use crate::{Error, programs};

static IMAGE: Image = Image {
    variable: mariadb::IMAGE_VARIABLE,
    default: mariadb::IMAGE,
    absent: "`mariadbd` is not on PATH",
    package: "mariadb-server",
    prefix: "idem-mariadb-",
    port: 3306,
    environment: mariadb::ENVIRONMENT,
    is_ready: mariadb::IS_READY,
    version: &["mariadbd", "--version"],
    version_in,
};

/// A MariaDB server on a free port of 127.0.0.1. The user is `root`, without a password, and the database is `test`.
///
/// It runs from the `mariadbd` on PATH, with a socket in its folder. If there is none, or if `IDEM_MARIADB_IMAGE` names an image, it runs in
/// a Docker container.
///
/// Settings are those of a new server, without the files of options of this machine, and with 400 connections. What was committed
/// survives [`kill`](Self::kill). It is gone when the value is dropped, or when its process ends in whatever way.
#[derive(Debug)]
pub struct MariaDb {
    server: Running,
    version: String,
    origin: String,
}

#[derive(Debug)]
enum Running {
    Process(Broker),
    Container(Container),
}

impl MariaDb {
    /// Starts a server, and waits until it is ready.
    ///
    /// # Errors
    ///
    /// - [`Error::Missing`] if this machine has no `mariadbd`, and no Docker; or no `mariadb-install-db`.
    /// - An error with its log if it is not ready within a minute.
    pub fn start() -> Result<MariaDb, Error> {
        MariaDb::start_with(&[])
    }

    /// Starts a server with further options, as in `--read-only=ON`.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start).
    pub fn start_with(options: &[&str]) -> Result<MariaDb, Error> {
        if IMAGE.is_named() || programs::find("mariadbd").is_none() {
            let words: Vec<&str> = COMMON.iter().chain(options).copied().collect();
            let container = Container::start(&IMAGE, &[&["mariadbd"], &words[..]].concat())?;
            let (version, origin) = (container.version().to_owned(), container.origin().to_owned());
            return Ok(MariaDb { server: Running::Container(container), version, origin });
        }
        let (server, install) = (find("mariadbd")?, find("mariadb-install-db")?);
        let start = |folder: &Path, port| {
            make_data(&install, folder)?;
            command(&server, folder, port, options)
        };
        let broker = Broker::start("ready for connections", start)?;
        let version = version_of(&server)?;
        Ok(MariaDb { server: Running::Process(broker), version, origin: server.display().to_string() })
    }

    /// Starts a server that syncs nothing to the disk, with further options. Most tests do not lose power, and the syncs would take most
    /// of their time.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start).
    pub fn start_unsynced(options: &[&str]) -> Result<MariaDb, Error> {
        MariaDb::start_with(&[&UNSYNCED[..], options].concat())
    }

    /// Starts it on the same port and folder after [`kill`](Self::kill), and waits until it is ready.
    ///
    /// # Errors
    ///
    /// If it is running, or is not ready within a minute.
    pub fn start_again(&mut self) -> Result<(), Error> {
        match &mut self.server {
            Running::Process(broker) => broker.start_again(),
            Running::Container(container) => container.start_again(),
        }
    }

    /// Crashes it: `kill -9`. Clients see their connections end. Does nothing if it is not running.
    ///
    /// # Errors
    ///
    /// If it does not end within a minute.
    pub fn kill(&mut self) -> Result<(), Error> {
        match &mut self.server {
            Running::Process(broker) => broker.kill(),
            Running::Container(container) => container.kill(),
        }
    }

    /// Stops all its threads until [`thaw`](Self::thaw). Connections stay open.
    ///
    /// # Errors
    ///
    /// If it is not running.
    pub fn freeze(&mut self) -> Result<(), Error> {
        match &mut self.server {
            Running::Process(broker) => broker.signal("STOP"),
            Running::Container(container) => container.freeze(),
        }
    }

    /// Ends a [`freeze`](Self::freeze).
    ///
    /// # Errors
    ///
    /// If it is not running.
    pub fn thaw(&mut self) -> Result<(), Error> {
        match &mut self.server {
            Running::Process(broker) => broker.signal("CONT"),
            Running::Container(container) => container.thaw(),
        }
    }

    /// The port. It stays the same across restarts.
    #[must_use]
    pub fn port(&self) -> u16 {
        match &self.server {
            Running::Process(broker) => broker.port(),
            Running::Container(container) => container.port(),
        }
    }

    /// The URL: `mysql://root@127.0.0.1:PORT/test`. It stays the same across restarts.
    #[must_use]
    pub fn url(&self) -> String {
        self.url_of("root", "test")
    }

    /// The URL of another user, who has no password, and another database.
    #[must_use]
    pub fn url_of(&self, user: &str, database: &str) -> String {
        format!("mysql://{user}@127.0.0.1:{}/{database}", self.port())
    }

    /// The version, as in `MariaDB 10.11.19`.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The program.
    #[must_use]
    pub fn origin(&self) -> &str {
        &self.origin
    }
}

/// The settings of each server, besides those of the caller.
const COMMON: [&str; 2] = ["--skip-name-resolve", "--max-connections=400"];

/// The settings of a server that syncs nothing.
const UNSYNCED: [&str; 3] =
    ["--innodb-flush-log-at-trx-commit=0", "--innodb-doublewrite=OFF", "--innodb-flush-method=nosync"];

fn find(program: &str) -> Result<std::path::PathBuf, Error> {
    programs::find(program).ok_or_else(|| Error::Missing {
        what: format!("`{program}` is not on PATH"),
        advice: "install it (Debian's package is mariadb-server)".into(),
    })
}

fn version_of(server: &Path) -> Result<String, Error> {
    let output = Command::new(server).arg("--version").output().map_err(Error::io("run mariadbd --version"))?;
    Ok(version_in(&String::from_utf8_lossy(&output.stdout)))
}

fn version_in(output: &str) -> String {
    let version = output.split_once("Ver ").and_then(|(_, rest)| rest.split(['-', ' ']).next());
    format!("MariaDB {}", version.unwrap_or("of unknown version"))
}

/// The account that owns the folder, because a server refuses to run as root without this option.
fn account(folder: &Path) -> Result<Option<&'static str>, Error> {
    let metadata = folder.metadata().map_err(Error::io(format!("read {}", folder.display())))?;
    Ok((metadata.uid() == 0).then_some("--user=root"))
}

fn make_data(install: &Path, folder: &Path) -> Result<(), Error> {
    let mut command = Command::new(install);
    command.arg("--no-defaults").args(account(folder)?).arg(option("datadir", &folder.join("data")));
    // A root without a password who may come over TCP, and a quick load of the system's tables.
    command.args(["--auth-root-authentication-method=normal", "--skip-name-resolve"]);
    let output = command.env("TMPDIR", folder).output().map_err(Error::io("run mariadb-install-db"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(Error::Failed {
        what: "mariadb-install-db could not make the data of a server".into(),
        log: String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr),
    })
}

fn option(name: &str, path: &Path) -> OsString {
    let mut option = OsString::from(format!("--{name}="));
    option.push(path);
    option
}

fn command(server: &Path, folder: &Path, port: u16, options: &[&str]) -> Result<Vec<OsString>, Error> {
    let mut command = vec![server.into(), "--no-defaults".into()];
    command.extend(account(folder)?.map(OsString::from));
    command.extend([option("datadir", &folder.join("data")), option("socket", &folder.join("socket"))]);
    // A server that starts removes the temporary tables of all others from their common folder.
    command.extend([option("pid-file", &folder.join("pid")), option("tmpdir", folder)]);
    command.extend([format!("--port={port}")].into_iter().map(OsString::from));
    command.push("--bind-address=127.0.0.1".into());
    command.extend(COMMON.iter().chain(options).map(OsString::from));
    Ok(command)
}
