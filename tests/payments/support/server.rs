//! A `payments` process in a folder of its own.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use tempfile::TempDir;

use super::{Answer, Request, eventually};

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

/// A running server; killed when dropped, and its folder removed.
pub(crate) struct Server {
    process: Child,
    pub(crate) address: SocketAddr,
    folder: TempDir,
    args: Vec<String>,
}

impl Server {
    /// Starts a server with fresh databases and simulations enabled.
    pub(crate) fn start(contract: Contract, args: &[&str]) -> Self {
        let folder = TempDir::new().unwrap();
        let mut all = vec!["--contract".to_owned(), contract.name().to_owned(), "--simulate".to_owned()];
        all.extend(args.iter().map(|&arg| arg.to_owned()));
        let (process, address) = spawn(folder.path(), &all);
        Self { process, address, folder, args: all }
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
        self.send(&Request::get("/healthz")).json()["records"].as_u64().unwrap()
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
