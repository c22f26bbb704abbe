//! Processes of the payments example, each behind its own proxies.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use idem_faults::{Cell, Store};
use idem_proxy::{Network, Proxy};
use idem_servers::Clock;

use crate::Error;
use crate::process::signal;
use crate::world::{LEASE, PASSWORD, USER};

/// How long a service may take to start or to stop.
const PATIENCE: Duration = Duration::from_secs(40);

/// A place for a service. Its processes come and go, and its port stays the same.
#[derive(Debug)]
pub(crate) struct Service {
    process: Option<Child>,
    is_actix: bool,
    args: Vec<String>,
    folder: PathBuf,
    name: String,
    program: PathBuf,
    /// The next version: a patched build that writes records in another format.
    next: PathBuf,
    /// The clock of this service.
    pub(crate) clock: Clock,
    pub(crate) to_service: Proxy<Network>,
    pub(crate) to_postgres: Option<Proxy<Network>>,
    pub(crate) to_redis: Option<Proxy<Network>>,
    pub(crate) to_mariadb: Option<Proxy<Network>>,
}

/// Where the real servers listen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ports {
    pub(crate) postgres: Option<u16>,
    pub(crate) redis: Option<u16>,
    pub(crate) mariadb: Option<u16>,
}

impl Service {
    pub(crate) async fn start(
        cell: Cell,
        number: usize,
        ports: Ports,
        folder: &Path,
        next: &Path,
    ) -> Result<Self, Error> {
        let to_postgres = proxy(ports.postgres).await?;
        let to_redis = proxy(ports.redis).await?;
        let to_mariadb = proxy(ports.mariadb).await?;
        let mut args: Vec<String> =
            ["--listen", "127.0.0.1:0", "--simulate", "--contract", cell.contract.name()].map(str::to_owned).to_vec();
        args.extend(["--lease-ms".to_owned(), LEASE.as_millis().to_string()]);
        let postgres = to_postgres
            .as_ref()
            .map(|proxy| format!("postgres://{USER}:{PASSWORD}@127.0.0.1:{}/postgres", proxy.port()));
        let redis = to_redis.as_ref().map(|proxy| format!("redis://{USER}:{PASSWORD}@127.0.0.1:{}", proxy.port()));
        let mariadb =
            to_mariadb.as_ref().map(|proxy| format!("mysql://{USER}:{PASSWORD}@127.0.0.1:{}/test", proxy.port()));
        if cell.store == Store::Pooled {
            args.push("--pooler".to_owned());
        }
        if cell.store == Store::OwnPool {
            args.push("--own-pool".to_owned());
        }
        if cell.store == Store::Joined {
            args.push("--join".to_owned());
        }
        if cell.store == Store::SettledByHandler {
            args.push("--settle-in-handler".to_owned());
        }
        let stores = match cell.store {
            Store::Postgres
            | Store::OwnPool
            | Store::Joined
            | Store::SettledByHandler
            | Store::Pooled
            | Store::Hybrid => [("--store", postgres), ("--cache", redis)],
            Store::Redis => [("--store", redis), ("--cache", None)],
            Store::MariaDb => [("--store", mariadb), ("--cache", None)],
        };
        for (flag, url) in stores {
            args.extend(url.into_iter().flat_map(|url| [flag.to_owned(), url]));
        }
        if !cell.commits_both() {
            let ledger = folder.join("ledger.db");
            args.extend(["--ledger".to_owned(), format!("sqlite://{}", ledger.display())]);
        }
        let to_service = Proxy::to_port(0).await?;
        let name = format!("service-{number}");
        let clock = Clock::new(&folder.join(format!("{name}.clock")))?;
        // `cargo xtask faults` has built it in the same folder as this program.
        let program = std::env::current_exe()?.with_file_name("payments");
        let mut service = Self {
            process: None,
            is_actix: number % 2 == 1,
            args,
            folder: folder.to_owned(),
            name,
            program,
            next: next.to_owned(),
            clock,
            to_service,
            to_postgres,
            to_redis,
            to_mariadb,
        };
        service.launch()?;
        Ok(service)
    }

    /// The log of all its processes.
    pub(crate) fn log(&self) -> Result<String, Error> {
        Ok(String::from_utf8_lossy(&std::fs::read(self.log_file())?).into_owned())
    }

    fn log_file(&self) -> PathBuf {
        self.folder.join(format!("{}.log", self.name))
    }

    /// Starts a process and retries for a while, because the servers that it needs may still be starting.
    pub(crate) fn launch(&mut self) -> Result<(), Error> {
        let give_up_at = Instant::now() + PATIENCE;
        loop {
            match self.try_launch() {
                Ok(()) => return Ok(()),
                Err(error) if Instant::now() > give_up_at => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        }
    }

    fn try_launch(&mut self) -> Result<(), Error> {
        let program = &self.program;
        let log = File::options().create(true).append(true).open(self.log_file())?;
        let mut process = Command::new(program)
            .args(&self.args)
            .args(["--framework", if self.is_actix { "actix" } else { "axum" }])
            .current_dir(&self.folder)
            .envs(self.clock.environment())
            // Only the next version reads it.
            .env("IDEM_PLANTED_BUG", "next-format")
            .env("RUST_LOG", "warn")
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .map_err(|error| format!("{}: {error}; run this by `cargo xtask faults`", program.display()))?;
        let mut line = String::new();
        BufReader::new(process.stdout.take().ok_or("no output")?).read_line(&mut line)?;
        let port = line.trim().rsplit_once(':').and_then(|(_, port)| port.parse().ok());
        let Some(port) = port else {
            process.kill()?;
            process.wait()?;
            return Err(format!("{} could not start; it says why in {}", self.name, self.folder.display()).into());
        };
        self.to_service.lead_to(port);
        self.process = Some(process);
        Ok(())
    }

    pub(crate) fn kill(&mut self) -> Result<(), Error> {
        if let Some(mut process) = self.process.take() {
            process.kill()?;
            process.wait()?;
        }
        Ok(())
    }

    /// Stops it and starts the other framework in its place.
    pub(crate) fn replace(&mut self) -> Result<(), Error> {
        self.stop()?;
        self.is_actix = !self.is_actix;
        self.launch()
    }

    /// Stops it and starts the next version in its place, permanently.
    pub(crate) fn upgrade(&mut self) -> Result<(), Error> {
        self.stop()?;
        self.program.clone_from(&self.next);
        self.launch()
    }

    fn stop(&mut self) -> Result<(), Error> {
        self.signal("TERM")?;
        if let Some(mut process) = self.process.take() {
            let give_up_at = Instant::now() + PATIENCE;
            while process.try_wait()?.is_none() {
                if Instant::now() > give_up_at {
                    process.kill()?;
                    return Err(format!("{} did not stop within {PATIENCE:?}", self.name).into());
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        Ok(())
    }

    pub(crate) fn pause(&self) -> Result<(), Error> {
        self.signal("STOP")
    }

    pub(crate) fn resume(&self) -> Result<(), Error> {
        self.signal("CONT")
    }

    fn signal(&self, name: &str) -> Result<(), Error> {
        let Some(process) = &self.process else { return Err(format!("{} is not running", self.name).into()) };
        signal(process, name)
    }
}

async fn proxy(upstream: Option<u16>) -> Result<Option<Proxy<Network>>, Error> {
    match upstream {
        Some(port) => Ok(Some(Proxy::to_port(port).await?)),
        None => Ok(None),
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}
