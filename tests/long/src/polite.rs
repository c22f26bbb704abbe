//! `polite`: clients that respect `Retry-After`. curl and Python's urllib3 send a payment that takes 2 s, lose the first
//! connection after 0.3 s, and repeat it by their own rules. They must be done within 4 s, and the money must move once.

use std::io::{self, BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use idem_proxy::{Ended, Harm, Proxy};
use idem_servers::{Postgres, Redis};
use tokio::io::copy_bidirectional;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use crate::Error;
use crate::report::{Passed, Report, rounded};

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// A Python with urllib3 2.0 or later; Debian's package is `python3-urllib3`.
    #[arg(long, default_value = "python3")]
    python: String,
}

/// How long the handler takes, when the first connection is lost, and how long a client may take.
const HANDLER: Duration = Duration::from_secs(2);
const FIRST_CONNECTION: Duration = Duration::from_millis(300);
const LIMIT: Duration = Duration::from_secs(4);

const PAYMENT: &str = r#"{"amount":1250,"currency":"EUR","recipient":"alice"}"#;

/// The configuration that the README of `idem-http` recommends to clients.
const URLLIB3: &str = r#"
import sys, urllib3
url, key, tenant, simulate, body = sys.argv[1:]
retry = urllib3.Retry(total=5, backoff_factor=0.1, allowed_methods={"POST"}, status_forcelist={409, 503})
headers = {"Idempotency-Key": key, "Authorization": "Bearer " + tenant,
    "Content-Type": "application/json", "X-Simulate": simulate}
answer = urllib3.PoolManager(retries=retry).request("POST", url, body=body, headers=headers)
print(answer.status)
"#;

/// Resets the first connection and carries the others.
#[derive(Debug, Default)]
struct FirstIsLost(AtomicBool);

impl Harm for FirstIsLost {
    async fn carry(&self, client: &mut TcpStream, server: &mut TcpStream) -> io::Result<Ended> {
        let is_first = !self.0.swap(true, Ordering::SeqCst);
        let carrying = copy_bidirectional(client, server);
        if is_first {
            return timeout(FIRST_CONNECTION, carrying)
                .await
                .map_or(Ok(Ended::Reset), |done| done.map(|_| Ended::Closed));
        }
        carrying.await.map(|_| Ended::Closed)
    }
}

#[derive(Debug, Clone, Copy)]
enum Client {
    Curl,
    Urllib3,
}

impl Client {
    const ALL: [Self; 2] = [Self::Curl, Self::Urllib3];

    fn name(self) -> &'static str {
        match self {
            Self::Curl => "curl",
            Self::Urllib3 => "urllib3",
        }
    }

    fn command(self, options: &Options, url: &str, key: &str, tenant: &str) -> Command {
        let simulate = format!("delay-before={}", HANDLER.as_millis());
        match self {
            Self::Curl => {
                let mut curl = Command::new("curl");
                curl.args(["--silent", "--show-error", "--fail", "--retry", "5", "--retry-all-errors"]);
                curl.args(["--output", "/dev/null", "--write-out", "%{http_code}", "--data", PAYMENT]);
                for field in [
                    format!("Idempotency-Key: {key}"),
                    format!("Authorization: Bearer {tenant}"),
                    "Content-Type: application/json".to_owned(),
                    format!("X-Simulate: {simulate}"),
                ] {
                    curl.args(["--header", &field]);
                }
                curl.arg(url);
                curl
            }
            Self::Urllib3 => {
                let mut python = Command::new(&options.python);
                python.args(["-c", URLLIB3, url, key, tenant, &simulate, PAYMENT]);
                python
            }
        }
    }
}

/// A process of the example, killed when dropped.
struct Service {
    process: Child,
    port: u16,
}

impl Service {
    fn start(args: &[String], folder: &std::path::Path) -> Result<Self, Error> {
        // `cargo xtask long` has built it in the same folder as this program.
        let program = std::env::current_exe()?.with_file_name("payments");
        let mut process = Command::new(&program)
            .args(["--listen", "127.0.0.1:0", "--simulate"])
            .args(args)
            .current_dir(folder)
            .env("RUST_LOG", "error")
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{}: {error}; run this by `cargo xtask long`", program.display()))?;
        let mut line = String::new();
        BufReader::new(process.stdout.take().ok_or("payments has no output")?).read_line(&mut line)?;
        match line.trim().rsplit_once(':').and_then(|(_, port)| port.parse().ok()) {
            Some(port) => Ok(Self { process, port }),
            None => {
                process.kill()?;
                Err(format!("payments said {line:?}").into())
            }
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub(crate) async fn run(options: &Options) -> Result<Passed, Error> {
    for (program, args) in
        [("curl", ["--version"].as_slice()), (&options.python, &["-c", "import urllib3; print(urllib3.__version__)"])]
    {
        let output = Command::new(program).args(args).output().map_err(|error| format!("{program}: {error}"))?;
        if !output.status.success() {
            return Err(format!("{program} says {}; install it", String::from_utf8_lossy(&output.stderr)).into());
        }
        println!("{program}: {}", String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default());
    }
    let (postgres, redis) = (Postgres::start()?, Redis::start()?);
    let (postgres_url, redis_url) = (postgres.url(), redis.url());
    let mut report = Report::new("polite", postgres.version());
    let leased = ["at-most-once", "at-least-once"].as_slice();
    let all = ["transactional", "at-most-once", "at-least-once"].as_slice();
    let ledger = ["--ledger", "sqlite://ledger.db"].as_slice();
    let stores: [(&str, Vec<&str>, &[&str]); 7] = [
        ("memory", [&["--store", "memory:"], ledger].concat(), leased),
        ("sqlite", vec![], all),
        ("postgres", vec!["--store", &postgres_url], all),
        ("own-pool", vec!["--store", &postgres_url, "--own-pool"], &["transactional"]),
        ("joined", vec!["--store", &postgres_url, "--join"], &["transactional"]),
        ("redis", [&["--store", &redis_url, "--dangerous-accept-store-loss"], ledger].concat(), leased),
        ("hybrid", vec!["--store", &postgres_url, "--cache", &redis_url], all),
    ];
    for (store, args, contracts) in stores {
        for contract in contracts {
            // `--dangerous-accept-store-loss` belongs to at-most-once.
            let is_refused = |arg: &&str| *contract == "at-least-once" && *arg == "--dangerous-accept-store-loss";
            let args = args.iter().filter(|arg| !is_refused(arg)).copied().chain(["--contract", contract]);
            let args: Vec<String> = args.map(str::to_owned).collect();
            try_clients(options, &mut report, &format!("{store}, {contract}"), &args).await?;
        }
    }
    Ok(report.finish())
}

/// Runs both clients at once, each with its own key and proxy.
async fn try_clients(options: &Options, report: &mut Report, cell: &str, args: &[String]) -> Result<(), Error> {
    let folder = std::env::temp_dir().join(format!("idem-polite-{}", uuid::Uuid::new_v4()));
    std::fs::create_dir(&folder)?;
    let service = Service::start(args, &folder)?;
    let mut running = Vec::new();
    for client in Client::ALL {
        let proxy: Proxy<FirstIsLost> = Proxy::to_port(service.port).await?;
        let url = format!("http://127.0.0.1:{}/v1/payments", proxy.port());
        let (key, tenant) = (uuid::Uuid::new_v4().to_string(), uuid::Uuid::new_v4().to_string());
        let mut command = client.command(options, &url, &key, &tenant);
        let process = tokio::task::spawn_blocking(move || {
            let start = Instant::now();
            let output = command.output();
            (output, start.elapsed(), proxy)
        });
        running.push((client, tenant, process));
    }
    for (client, tenant, running) in running {
        let (output, took, _proxy) = running.await?;
        let output = output?;
        let name = format!("{cell}, {}", client.name());
        let status = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        report.fact(&name, rounded(took.as_secs_f64(), 1));
        let errors = String::from_utf8_lossy(&output.stderr);
        report.expect(status == "201", format!("{name}: status {status:?}; {errors}"));
        report.expect(took <= LIMIT, format!("{name}: done after {took:?}"));
        let ledger = format!("http://127.0.0.1:{}/v1/ledger", service.port);
        let bearer = format!("Authorization: Bearer {tenant}");
        let ledger = Command::new("curl").args(["--silent", "--header", &bearer, &ledger]).output()?;
        let effects = serde_json::from_slice::<serde_json::Value>(&ledger.stdout)?["effects"].as_i64();
        report.expect(effects == Some(1), format!("{name}: {effects:?} effects"));
    }
    drop(service);
    std::fs::remove_dir_all(&folder)?;
    Ok(())
}
