//! A private PgBouncer.

use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::account::Account;
use crate::keeper::{self, Keeper};
use crate::setup::pgbouncer::configuration;
use crate::upstream::Upstream;
use crate::{Error, port, processes, programs};

/// A PgBouncer in front of a Postgres server, in transaction mode. Everything else that a client could notice has the defaults
/// of its version.
///
/// It listens on a free port of 127.0.0.1 and asks for no password. It is gone when the value is dropped, or when its process
/// ends in whatever way.
#[derive(Debug)]
pub struct PgBouncer {
    // Dropped before the folder, which the keeper removes.
    keeper: Keeper,
    folder: TempDir,
    port: u16,
    /// The process id while it runs.
    server: Option<u32>,
    url: String,
    version: String,
    origin: String,
}

impl PgBouncer {
    /// Starts a PgBouncer in front of the server with this URL (`postgres://user:password@host:port/database`).
    ///
    /// `pool_size` is the number of connections to the server for each database. Every client acts as the user in the URL,
    /// whatever name it gives. `sslmode` in the URL becomes `server_tls_sslmode`; other parameters are ignored.
    ///
    /// # Errors
    ///
    /// - [`Error::Missing`] if this machine has no `pgbouncer`.
    /// - An error with its log if it does not listen within a minute. The server behind it is not contacted.
    pub fn start(postgres: &str, pool_size: u16) -> Result<PgBouncer, Error> {
        PgBouncer::start_with(postgres, pool_size, &[])
    }

    /// [`start`](Self::start) with settings as in `pgbouncer.ini`: `&["server_login_retry = 1"]`.
    ///
    /// # Errors
    ///
    /// Those of [`start`](Self::start).
    pub fn start_with(postgres: &str, pool_size: u16, settings: &[&str]) -> Result<PgBouncer, Error> {
        let upstream = Upstream::parse(postgres)?;
        let program = programs::find("pgbouncer").ok_or_else(|| Error::Missing {
            what: "`pgbouncer` is neither on PATH nor in /usr/sbin".into(),
            advice: "install it (Debian's package is pgbouncer)".into(),
        })?;
        /// Another process may take the port before PgBouncer does.
        const ATTEMPTS: usize = 5;
        let mut attempt = 1;
        loop {
            match PgBouncer::start_once(&program, &upstream, pool_size, settings) {
                Err(Error::Failed { log, .. }) if attempt < ATTEMPTS && log.contains("in use") => attempt += 1,
                result => return result,
            }
        }
    }

    fn start_once(program: &Path, upstream: &Upstream, pool_size: u16, settings: &[&str]) -> Result<PgBouncer, Error> {
        let folder = TempDir::with_prefix("idem-pgbouncer-").map_err(Error::io("make a temporary folder"))?;
        let account = Account::for_owner_of(folder.path())?;
        let port = port::free()?;
        let file = folder.path().join("pgbouncer.ini");
        let encryption = upstream.encryption();
        let settings = [&[encryption.as_str()], settings].concat();
        let text = configuration(&upstream.databases(), ("127.0.0.1", port), pool_size, &settings);
        std::fs::write(&file, text).map_err(Error::io("write a file"))?;
        if let Some(account) = account {
            account.own(&file)?;
        }
        // The meaning of other signals differs between versions.
        let keeper = Keeper::start(account, folder.path(), keeper::KILL, [program.into(), file.into()])?;
        let output = Command::new(program).arg("--version").output().map_err(Error::io("run pgbouncer --version"))?;
        let mut pgbouncer = PgBouncer {
            keeper,
            folder,
            port,
            server: None,
            url: format!("postgres://{}@127.0.0.1:{port}/{}", upstream.user, upstream.database),
            version: String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned(),
            origin: program.display().to_string(),
        };
        pgbouncer.start_again()?;
        Ok(pgbouncer)
    }

    /// Starts it on the same port after [`kill`](Self::kill), and waits until it listens.
    ///
    /// # Errors
    ///
    /// If it is running, or does not listen within a minute.
    pub fn start_again(&mut self) -> Result<(), Error> {
        if self.server.is_some() {
            return Err(Error::failed("pgbouncer is running already"));
        }
        // Look for the log line of this start, because another process may answer on the port.
        let listens = format!("listening on 127.0.0.1:{}", self.port);
        let path = self.folder.path().join("log");
        let times = || std::fs::read_to_string(&path).unwrap_or_default().matches(&listens).count();
        let before = times();
        let server = self.keeper.start_server()?;
        self.server = Some(server);
        self.keeper.wait_until("did not listen", || {
            if !processes::is_running(server)? {
                return Err(self.keeper.error("pgbouncer ended while it started"));
            }
            Ok(times() > before)
        })
    }

    /// Crashes it: `kill -9`. Clients and server see their connections end. Does nothing if it is not running.
    ///
    /// # Errors
    ///
    /// If it does not end within a minute.
    pub fn kill(&mut self) -> Result<(), Error> {
        let Some(server) = self.server else { return Ok(()) };
        self.keeper.signal("KILL", &[server])?;
        self.keeper.reap(server)?;
        self.server = None;
        Ok(())
    }

    /// The port on 127.0.0.1. It stays the same across restarts.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL of the admin console for `postgres`, which the setting `admin_users` must name.
    #[must_use]
    pub fn console(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/pgbouncer", self.port)
    }

    /// `postgres://USER@127.0.0.1:PORT/DATABASE`, with the user and the database of the server's URL.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its log, including earlier runs.
    ///
    /// # Errors
    ///
    /// If the log cannot be read.
    pub fn log(&self) -> Result<String, Error> {
        self.keeper.log()
    }

    /// The version, as in `PgBouncer 1.18.0`.
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
