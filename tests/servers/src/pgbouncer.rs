//! A private PgBouncer.

use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::account::Account;
use crate::keeper::{self, Keeper};
use crate::upstream::Upstream;
use crate::{Error, port, processes, programs};

/// A PgBouncer in front of a Postgres server, in transaction mode, with the defaults of its version for everything that
/// a client could notice.
///
/// It listens on a free port of 127.0.0.1 and asks nobody for a password. It is gone when the value is dropped, or when
/// its process ends in whatever way.
#[derive(Debug)]
pub struct PgBouncer {
    // Before the folder, which the keeper removes itself.
    _keeper: Keeper,
    _folder: TempDir,
    url: String,
    version: String,
    origin: String,
}

impl PgBouncer {
    /// Starts one in front of the server with this URL (`postgres://user:password@host:port/database`).
    ///
    /// `pool_size` is the number of connections to the server for each database. Every client acts as the user in the
    /// URL, whatever name it gives. `sslmode` in the URL becomes `server_tls_sslmode`; other parameters are left aside.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] if this machine has no `pgbouncer`; otherwise an error with its log if it does not listen
    /// within a minute. The server behind is not asked for anything.
    pub fn start(postgres: &str, pool_size: u16) -> Result<PgBouncer, Error> {
        let upstream = Upstream::parse(postgres)?;
        let program = programs::find("pgbouncer").ok_or_else(|| Error::Missing {
            what: "`pgbouncer` is neither on PATH nor in /usr/sbin".into(),
            advice: "install it (Debian's package is pgbouncer)".into(),
        })?;
        /// Somebody else may take the port before PgBouncer does.
        const ATTEMPTS: usize = 5;
        let mut attempt = 1;
        loop {
            match PgBouncer::start_once(&program, &upstream, pool_size) {
                Err(Error::Failed { log, .. }) if attempt < ATTEMPTS && log.contains("in use") => attempt += 1,
                result => return result,
            }
        }
    }

    fn start_once(program: &Path, upstream: &Upstream, pool_size: u16) -> Result<PgBouncer, Error> {
        let folder = TempDir::with_prefix("idem-pgbouncer-").map_err(Error::io("make a temporary folder"))?;
        let account = Account::for_owner_of(folder.path())?;
        let port = port::free()?;
        let configuration = folder.path().join("pgbouncer.ini");
        std::fs::write(&configuration, configure(upstream, port, pool_size)).map_err(Error::io("write a file"))?;
        if let Some(account) = account {
            account.own(&configuration)?;
        }
        // What other signals mean differs between its versions.
        let mut keeper = Keeper::start(account, folder.path(), keeper::KILL, [program.into(), configuration.into()])?;
        let server = keeper.start_server()?;
        // Its own word, as somebody else may answer on the port.
        let listens = format!("listening on 127.0.0.1:{port}");
        keeper.wait_until("did not listen", || {
            if !processes::is_running(server)? {
                return Err(keeper.error("pgbouncer ended while it started"));
            }
            Ok(std::fs::read_to_string(folder.path().join("log")).unwrap_or_default().contains(&listens))
        })?;
        let output = Command::new(program).arg("--version").output().map_err(Error::io("run pgbouncer --version"))?;
        Ok(PgBouncer {
            _keeper: keeper,
            _folder: folder,
            url: format!("postgres://{}@127.0.0.1:{port}/{}", upstream.user, upstream.database),
            version: String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned(),
            origin: program.display().to_string(),
        })
    }

    /// `postgres://USER@127.0.0.1:PORT/DATABASE`, with the user and the database of the server's URL.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// As in `PgBouncer 1.18.0`.
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

/// There is no `ignore_startup_parameters` and nothing else that helps a client: what works here has to work behind a
/// PgBouncer that knows nothing of the application. Without a socket, a port that is taken is an error and not a warning.
fn configure(upstream: &Upstream, port: u16, pool_size: u16) -> String {
    format!(
        "[databases]\n{}\n\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n\
         auth_type = any\npool_mode = transaction\ndefault_pool_size = {pool_size}\nmax_client_conn = 500\n{}\n",
        upstream.databases(),
        upstream.encryption()
    )
}
