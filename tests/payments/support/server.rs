//! A `payments` process with a folder and databases of its own.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;

use idem_servers::PgBouncer;
use tempfile::TempDir;

use super::postgres::Schemas;
use super::{Answer, Request, eventually};

/// Where the records are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backend {
    Sqlite,
    Postgres,
    /// Postgres behind a PgBouncer of the server's own, in transaction mode.
    PgBouncer,
}

/// The connections between PgBouncer and Postgres: a few handlers in their transactions, and room for the verbs.
const POOL_CONNECTIONS: u16 = 6;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contract {
    Transactional,
    AtMostOnce,
    AtLeastOnce,
}

impl Contract {
    pub(crate) const ALL: [Self; 3] = [Self::Transactional, Self::AtMostOnce, Self::AtLeastOnce];

    fn name(self) -> &'static str {
        match self {
            Self::Transactional => "transactional",
            Self::AtMostOnce => "at-most-once",
            Self::AtLeastOnce => "at-least-once",
        }
    }
}

/// A running server; killed when dropped, and its databases removed.
pub(crate) struct Server {
    process: Child,
    pub(crate) address: SocketAddr,
    folder: TempDir,
    args: Vec<String>,
    /// What there is in Postgres.
    schemas: Option<Arc<Schemas>>,
    _pooler: Option<PgBouncer>,
    contract: Contract,
}

impl Server {
    /// Starts a server on SQLite, with fresh databases and simulations enabled.
    pub(crate) fn start(contract: Contract, args: &[&str]) -> Self {
        Self::start_on(Backend::Sqlite, contract, args)
    }

    /// The same on any backend.
    pub(crate) fn start_on(backend: Backend, contract: Contract, args: &[&str]) -> Self {
        let folder = TempDir::new().unwrap();
        let mut all = vec!["--contract".to_owned(), contract.name().to_owned(), "--simulate".to_owned()];
        all.extend(args.iter().map(|&arg| arg.to_owned()));
        let schemas = (backend != Backend::Sqlite).then(|| Arc::new(Schemas::new()));
        let pooler = (backend == Backend::PgBouncer)
            .then(|| PgBouncer::start(&idem_servers::postgres_url(), POOL_CONNECTIONS).unwrap());
        if let Some(schemas) = &schemas {
            let url = pooler.as_ref().map_or_else(idem_servers::postgres_url, |pooler| pooler.url().to_owned());
            all.extend(schemas.arguments(&url));
            all.extend(pooler.iter().map(|_| "--pooler".to_owned()));
        }
        let (process, address) = spawn(folder.path(), &all);
        Self { process, address, folder, args: all, schemas, _pooler: pooler, contract }
    }

    /// Starts another server on the same databases; it must not outlive this one.
    pub(crate) fn replica(&self) -> Replica {
        let (process, address) = spawn(self.folder.path(), &self.args);
        Replica { process, address }
    }

    /// Starts it again on the same databases, after it has ended.
    pub(crate) fn start_again(&mut self) {
        (self.process, self.address) = spawn(self.folder.path(), &self.args);
    }

    /// The database that holds the records.
    pub(crate) fn store(&self) -> PathBuf {
        self.folder.path().join("payments.db")
    }

    /// Ends it at once, as a power cut would.
    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Asks it to end.
    pub(crate) fn terminate(&self) {
        let sent = Command::new("kill").args(["-TERM", &self.process.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    /// Awaits its end.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        eventually("the end of the server", || self.process.try_wait().unwrap())
    }

    pub(crate) fn send(&self, request: &Request) -> Answer {
        request.send(self.address)
    }

    /// How often money really moved for `acme`.
    pub(crate) fn effects(&self) -> u64 {
        let answer = self.send(&Request::get("/v1/ledger"));
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()["effects"].as_u64().unwrap()
    }

    /// How many records there are.
    pub(crate) fn records(&self) -> u64 {
        match &self.schemas {
            // There, the server itself only estimates.
            Some(schemas) => schemas.records(),
            None => self.send(&Request::get("/healthz")).json()["records"].as_u64().unwrap(),
        }
    }

    /// Waits until a first request has acquired its key, and nothing else is under way.
    pub(crate) fn await_running(&self) {
        eventually("the first request", || {
            let running = match (&self.schemas, self.contract) {
                (Some(schemas), Contract::Transactional) => schemas.transactions() == 1,
                _ => self.records() == 1,
            };
            running.then_some(())
        });
    }

    /// What there is in Postgres, for a server that is there.
    pub(crate) fn schemas(&self) -> Arc<Schemas> {
        Arc::clone(self.schemas.as_ref().unwrap())
    }
}

/// A second process on the databases of a [`Server`]; killed when dropped.
pub(crate) struct Replica {
    process: Child,
    pub(crate) address: SocketAddr,
}

impl Drop for Replica {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn spawn(folder: &Path, args: &[String]) -> (Child, SocketAddr) {
    let log = std::fs::File::options().create(true).append(true).open(folder.join("log")).unwrap();
    let mut process = Command::new(env!("CARGO_BIN_EXE_payments"))
        .args(["--listen", "127.0.0.1:0"])
        .args(args)
        .current_dir(folder)
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("listening on http://");
    let address = address.unwrap_or_else(|| {
        panic!("the server said {line:?}: {}", std::fs::read_to_string(folder.join("log")).unwrap())
    });
    (process, address.parse().unwrap())
}
