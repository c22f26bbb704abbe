//! Measurements by other programs: `pgbench`, `redis-benchmark`, `wrk`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::process::Command;

use crate::contest::Sample;
use crate::error::Error;

/// What a program printed, or how it failed.
async fn output(command: &mut Command) -> Result<String, Error> {
    let program = command.as_std().get_program().to_string_lossy().into_owned();
    let output = command.output().await.map_err(|error| format!("{program}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        return Err(format!("{program}: {}\n{text}{}", output.status, String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(text)
}

/// The number that follows `label`.
pub(crate) fn number_after(text: &str, label: &str) -> Option<f64> {
    let rest = text.split_once(label)?.1.trim_start();
    rest.split(|character: char| !(character.is_ascii_digit() || character == '.')).next()?.parse().ok()
}

/// The path of a file of this crate.
pub(crate) fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// Builds a program of the workspace beside this one, and returns its path.
pub(crate) async fn built(package: &str, program: &str) -> Result<PathBuf, Error> {
    let folder = file("target");
    let mut build = Command::new("cargo");
    build.args(["build", "--release", "--quiet", "--package", package, "--bin", program, "--target-dir"]).arg(&folder);
    if !build.current_dir(file("..")).status().await?.success() {
        return Err(format!("{package} cannot be built").into());
    }
    Ok(folder.join("release").join(program))
}

/// One turn of `pgbench` with one of the scripts in `sql`.
pub(crate) async fn pgbench(port: u16, script: &str, clients: usize, turn: Duration) -> Result<Sample, Error> {
    let program = idem_servers::find_program("pgbench")
        .or_else(|| newest("/usr/lib/postgresql"))
        .ok_or("pgbench is missing; it comes with Debian's package postgresql")?;
    let folder = tempfile::tempdir()?;
    // pgbench takes whole seconds, and needs some of them to start many clients.
    let seconds = turn.as_secs_f64().ceil().max((clients / 64) as f64).max(1.0).to_string();
    let threads = clients.min(2).to_string();
    let mut command = Command::new(program);
    command.args(["-n", "-M", "prepared", "-h", "127.0.0.1", "-U", "postgres", "-p", &port.to_string()]);
    command.args(["-c", &clients.to_string(), "-j", &threads, "-T", &seconds, "--log", "-f"]);
    command.arg(file("sql").join(script)).arg("postgres").current_dir(folder.path());
    let text = output(&mut command).await?;
    let per_second = number_after(&text, "tps =").ok_or_else(|| format!("pgbench said no rate: {text}"))?;
    let mut times = crate::drive::histogram()?;
    for entry in std::fs::read_dir(folder.path())? {
        for line in std::fs::read_to_string(entry?.path())?.lines() {
            // Client, transaction, microseconds, …
            let micros: u64 =
                line.split(' ').nth(2).and_then(|word| word.parse().ok()).ok_or("pgbench's log has no times")?;
            times.saturating_record(micros * 1_000);
        }
    }
    Ok(Sample { per_second, ..crate::drive::sample(&times, turn) })
}

/// The program of the newest Postgres in Debian's folder.
fn newest(folder: &str) -> Option<PathBuf> {
    let versions = std::fs::read_dir(folder).ok()?.filter_map(Result::ok);
    let mut versions: Vec<(u32, PathBuf)> = versions
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path().join("bin/pgbench"))))
        .filter(|(_, program)| program.is_file())
        .collect();
    versions.sort();
    versions.pop().map(|(_, program)| program)
}

/// One turn of `redis-benchmark` with one command, and so many commands in flight on each connection.
pub(crate) async fn redis_benchmark(
    port: u16,
    clients: usize,
    in_flight: usize,
    keys: u64,
    requests: u64,
    words: &[&str],
) -> Result<Sample, Error> {
    let mut command = Command::new("redis-benchmark");
    command.args(["-p", &port.to_string(), "-c", &clients.to_string(), "-P", &in_flight.to_string()]);
    command.args(["-r", &keys.to_string(), "-n", &requests.to_string(), "--csv"]).args(words);
    let text = output(&mut command).await?;
    // "test","rps","avg_latency_ms","min_latency_ms","p50_latency_ms","p95_latency_ms","p99_latency_ms","max_latency_ms"
    let line = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
    let mut fields = line.rsplit(',').map(|field| field.trim_matches('"').parse::<f64>().ok());
    let mut from_the_end = |skipped: usize| fields.nth(skipped).flatten();
    let p99 = from_the_end(1);
    let p50 = from_the_end(1);
    let per_second = from_the_end(2).ok_or_else(|| format!("redis-benchmark said no rate: {text}"))?;
    Ok(Sample { per_second, p50: p50.map(|ms| ms * 1e3), p99: p99.map(|ms| ms * 1e3), cpu: None })
}

/// The keys of requests over HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keys {
    /// A new key for each request.
    Fresh,
    /// A thousand keys, repeatedly.
    Few,
}

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Page {
    /// The route of the servers of these contests.
    Pay,
    /// The page of `payments` that moves money.
    Payments,
}

impl Page {
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Pay => "/pay",
            Self::Payments => "/v1/payments",
        }
    }

    pub(crate) fn body(self) -> &'static str {
        match self {
            Self::Pay => r#"{"amount":1000,"currency":"EUR","account":"acc_000001","memo":"hello"}"#,
            Self::Payments => r#"{"amount":1250,"currency":"EUR","recipient":"alice"}"#,
        }
    }
}

/// Lets a server see the few keys for the first time. Some keys may repeat before their first answer.
pub(crate) async fn warm_up(port: u16, connections: usize) -> Result<(), Error> {
    output(&mut wrk_command(Page::Pay, port, connections, Keys::Few, Duration::from_secs(1))).await.map(drop)
}

/// One turn of `wrk` against a server, by its port and process. An answer without success is an error.
pub(crate) async fn wrk(
    page: Page,
    port: u16,
    process: u32,
    connections: usize,
    keys: Keys,
    turn: Duration,
) -> Result<Sample, Error> {
    let before = processor_time(process)?;
    let text = output(&mut wrk_command(page, port, connections, keys, turn)).await?;
    let took = processor_time(process)? - before;
    for failure in ["Non-2xx", "Socket errors"] {
        if let Some(line) = text.lines().find(|line| line.contains(failure)) {
            return Err(format!("wrk: {}", line.trim()).into());
        }
    }
    let per_second = number_after(&text, "Requests/sec:").ok_or_else(|| format!("wrk said no rate: {text}"))?;
    let requests = text.lines().find_map(|line| line.trim().split_once(" requests in ")?.0.parse::<f64>().ok());
    let percentile = |label: &str| {
        let line = text.lines().find(|line| line.trim_start().starts_with(label))?;
        let word = line.split_whitespace().nth(1)?;
        let (number, unit) = word.split_at(word.find(|character: char| character.is_alphabetic())?);
        let micros = match unit {
            "us" => 1.0,
            "ms" => 1e3,
            "s" => 1e6,
            _ => return None,
        };
        Some(number.parse::<f64>().ok()? * micros)
    };
    Ok(Sample { per_second, p50: percentile("50%"), p99: percentile("99%"), cpu: requests.map(|number| took / number) })
}

/// The processor time of all threads of a process, in microseconds.
fn processor_time(process: u32) -> Result<f64, Error> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name, in parentheses, may hold anything; the times are the 14th and the 15th field.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace();
    let ticks: Result<Vec<u64>, _> = fields.skip(11).take(2).map(str::parse).collect();
    let ticks: u64 = ticks?.iter().sum();
    Ok(ticks as f64 * 1e6 / rustix::param::clock_ticks_per_second() as f64)
}

fn wrk_command(page: Page, port: u16, connections: usize, keys: Keys, turn: Duration) -> Command {
    let keys = if keys == Keys::Fresh { "fresh" } else { "few" };
    let seconds = format!("{}s", turn.as_secs_f64().ceil().max(1.0));
    let mut command = Command::new("wrk");
    command.args(["-t2", "-c", &connections.to_string(), "-d", &seconds, "--latency", "-s"]);
    command.arg(file("lua/keys.lua")).arg(format!("http://127.0.0.1:{port}"));
    command
        .env("PAGE", page.path())
        .env("BODY", page.body())
        .env("KEYS", keys)
        .env("RUN", uuid::Uuid::new_v4().simple().to_string());
    command
}
