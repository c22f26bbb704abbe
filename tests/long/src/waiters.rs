//! `waiters`: thousands of duplicates wait for one key in each of two processes. It measures how often they ask the store, how
//! soon all have the answer, and how much memory they take.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use idem_core::engine::{Idempotency, Operation, Ran, RunError, Settings};
use idem_core::{Fingerprint, IdempotencyKey, IdempotencyStore, MemoryStore, Scope};
use idem_hybrid::{HybridConfig, HybridStore};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_redis::{RedisConfig, RedisFastStore, RedisStore};
use idem_servers::{Postgres, Redis};
use idem_sqlite::{SqliteConfig, SqliteStore};
use idem_testkit::{Faults, Verb};
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::Error;
use crate::report::{Passed, Report, rounded};

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// How many duplicates wait in each process.
    #[arg(long, value_delimiter = ',', default_values_t = [1_000, 10_000])]
    waiters: Vec<usize>,
    /// How long the store's calls are counted while they wait, in seconds.
    #[arg(long, default_value_t = 5)]
    seconds: u64,
}

/// The most questions of a process per second while they wait, and at the settlement.
const MOST_PER_SECOND: f64 = 5.0;
const MOST_AT_SETTLEMENT: u64 = 2;

/// The time limit until all wait, and until all have their answers.
const PATIENCE: Duration = Duration::from_secs(60);

/// Stands for a process: an engine and a store whose calls are counted.
struct Process {
    engine: Idempotency,
    calls: Faults,
}

impl Process {
    fn new(store: Arc<dyn IdempotencyStore>, waiters: usize) -> Result<Self, Error> {
        let calls = Faults::default();
        let (places, runs) = (waiters.try_into()?, (2 * waiters).try_into()?);
        let settings = Settings::new()
            .max_waiters(places)
            .max_waiters_per_key(places)
            .max_running(runs)
            // All duplicates ask at once when they arrive.
            .store_timeout(Duration::from_secs(20));
        Ok(Self { engine: Idempotency::at_least_once(Arc::new(calls.wrap(store)), settings), calls })
    }

    fn questions(&self) -> u64 {
        self.calls.calls(Verb::Acquire) + self.calls.calls(Verb::Peek)
    }
}

pub(crate) async fn run(options: &Options) -> Result<Passed, Error> {
    let (postgres, redis) = (Postgres::start()?, Redis::start()?);
    let mut report = Report::new("waiters", postgres.version());
    let folder = std::env::temp_dir().join(format!("idem-waiters-{}", uuid::Uuid::new_v4()));
    std::fs::create_dir(&folder)?;
    for &waiters in &options.waiters {
        for store in ["memory", "sqlite", "postgres", "redis", "hybrid"] {
            let stores = stores(store, &postgres.url(), &redis.url(), &folder).await?;
            let processes = stores.into_iter().map(|store| Process::new(store, waiters));
            let processes = processes.collect::<Result<Vec<_>, _>>()?;
            wait_for_one(options, &mut report, store, waiters, &processes).await?;
        }
    }
    std::fs::remove_dir_all(&folder)?;
    Ok(report.finish())
}

/// Opens the store twice, as two processes do.
async fn stores(
    name: &str,
    postgres: &str,
    redis: &str,
    folder: &Path,
) -> Result<Vec<Arc<dyn IdempotencyStore>>, Error> {
    let mut stores: Vec<Arc<dyn IdempotencyStore>> = Vec::new();
    let memory = Arc::new(MemoryStore::new(1_000.try_into()?));
    for _ in 0..2 {
        stores.push(match name {
            "memory" => memory.clone(),
            "sqlite" => {
                let url = format!("sqlite://{}", folder.join("records.db").display());
                Arc::new(SqliteStore::open(SqliteConfig::new(url)).await?)
            }
            "postgres" => Arc::new(PostgresStore::open(PostgresConfig::new(postgres)).await?),
            "redis" => Arc::new(RedisStore::open(RedisConfig::new(redis)).await?),
            _ => {
                let durable = Arc::new(PostgresStore::open(PostgresConfig::new(postgres)).await?);
                let fast = Arc::new(RedisFastStore::new(RedisConfig::new(redis).key_prefix("fast:"))?);
                Arc::new(HybridStore::new(durable, fast, HybridConfig::new()))
            }
        });
    }
    Ok(stores)
}

async fn wait_for_one(
    options: &Options,
    report: &mut Report,
    store: &str,
    waiters: usize,
    processes: &[Process],
) -> Result<(), Error> {
    let key = IdempotencyKey::new(uuid::Uuid::new_v4().to_string())?;
    let scope = Scope::new("acme", "POST /v1/payments");
    let operation = Operation::new(scope, key, Fingerprint::of_bytes("pay", b"1250")).wait(Duration::from_secs(30));
    let (began, has_begun) = oneshot::channel();
    let released = Arc::new(Notify::new());
    let first = tokio::spawn({
        let (engine, operation, released) = (processes[0].engine.clone(), operation.clone(), Arc::clone(&released));
        async move {
            let run = |_| async move {
                let _ = began.send(());
                released.notified().await;
                Ok::<_, String>(1250)
            };
            engine.run(operation, run).await
        }
    });
    has_begun.await?;
    let (memory, came) = (resident_kib()?, Instant::now());
    let mut waiting = JoinSet::new();
    for process in processes {
        for _ in 0..waiters {
            let (engine, operation) = (process.engine.clone(), operation.clone());
            waiting.spawn(async move {
                let answer: Result<Ran<i64>, RunError<String>> =
                    engine.run(operation, |_| async { Err("it ran twice".to_owned()) }).await;
                (answer, Instant::now())
            });
        }
    }
    let all = waiters * processes.len();
    while processes.iter().map(|process| process.engine.waiting()).sum::<usize>() < all {
        if came.elapsed() > PATIENCE {
            return Err(format!("{store}: {all} duplicates do not wait after {PATIENCE:?}").into());
        }
        sleep(Duration::from_millis(10)).await;
    }
    let name = |what: &str| format!("{store}, {waiters} waiters in each of two processes, {what}");
    report.fact(&name("ms until all wait"), came.elapsed().as_millis() as u64);
    let per_waiter = resident_kib()?.saturating_sub(memory) as f64 / all as f64;
    report.fact(&name("KiB for each"), rounded(per_waiter, 1));
    let questions = || processes.iter().map(Process::questions).collect::<Vec<_>>();
    let before = questions();
    sleep(Duration::from_secs(options.seconds)).await;
    for (number, (before, after)) in before.into_iter().zip(questions()).enumerate() {
        let per_second = (after - before) as f64 / options.seconds as f64;
        report.fact(&name(&format!("questions a second of process {number}")), rounded(per_second, 1));
        report.expect(per_second <= MOST_PER_SECOND, name(&format!("{per_second} questions a second")));
    }
    let (before, settled) = (questions(), Instant::now());
    released.notify_one();
    let mut last = settled;
    while let Some(answered) = waiting.join_next().await {
        let (answer, at) = answered?;
        match answer {
            Ok(Ran { value: 1250, replayed: true, .. }) => last = last.max(at),
            other => report.expect(false, name(&format!("an answer is {other:?}"))),
        }
    }
    let first = first.await?;
    report.expect(matches!(first, Ok(Ran { value: 1250, .. })), name(&format!("the first answer is {first:?}")));
    report.fact(&name("ms until the last has its answer"), (last - settled).as_millis() as u64);
    for (number, (before, after)) in before.into_iter().zip(questions()).enumerate() {
        report.fact(&name(&format!("questions at the settlement of process {number}")), after - before);
        report.expect(
            after - before <= MOST_AT_SETTLEMENT,
            name(&format!("{} questions at the settlement", after - before)),
        );
    }
    Ok(())
}

/// The resident memory of this process, in KiB.
fn resident_kib() -> Result<u64, Error> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS in /proc/self/status")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse()?)
}
