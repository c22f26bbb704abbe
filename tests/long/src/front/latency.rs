//! `latency`: the time of a first request, a replay and a concurrent duplicate, for Postgres, Redis, and both together.
//!
//! The stores take turns, so that a slow machine slows all of them.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use idem_core::{Acquire, AcquireOutcome, FastStore, IdempotencyStore, OwnerOutcome, OwnerToken, Settlement};
use idem_hybrid::{HybridConfig, HybridStore};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_redis::{RedisConfig, RedisFastStore, RedisStore};
use idem_servers::Redis;
use serde_json::json;

use crate::Error;
use crate::database::Database;
use crate::records::{DAY, Maker, each, response};
use crate::report::{Passed, Report, percentile, rounded};

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// How many turns each store has.
    #[arg(long, default_value_t = 10)]
    rounds: u64,
    /// How many operations each store runs per turn.
    #[arg(long, default_value = "2000")]
    operations: NonZeroU64,
    /// How many operations run concurrently.
    #[arg(long, default_value_t = 16)]
    clients: u64,
}

/// The measured steps of an operation.
const STEPS: [&str; 3] = ["first request", "concurrent duplicate", "replay"];

/// Durations of steps in milliseconds, by store and step.
type Times = BTreeMap<(&'static str, &'static str), Vec<f64>>;

struct Contestant {
    name: &'static str,
    store: Arc<dyn IdempotencyStore>,
    /// The cache to which settled records are copied after the answer.
    fast: Option<Arc<dyn FastStore>>,
}

pub(crate) async fn run(options: &Options) -> Result<Passed, Error> {
    let database = Database::start(&[]).await?;
    let redis = Redis::start()?;
    println!("{} ({}): a first request is acquire and settle", redis.version(), redis.origin());
    let postgres = |schema: &str| PostgresStore::open(PostgresConfig::new(database.url()).schema(schema));
    let in_front = RedisConfig::new(redis.url()).key_prefix("front:").timeout(Duration::from_secs(1));
    let fast: Arc<dyn FastStore> = Arc::new(RedisFastStore::new(in_front)?);
    let config = HybridConfig::new().patience(Duration::from_secs(2));
    let hybrid = HybridStore::new(Arc::new(postgres("behind").await?), Arc::clone(&fast), config);
    let contestants = [
        Contestant { name: "hybrid", store: Arc::new(hybrid), fast: Some(fast) },
        Contestant { name: "postgres", store: Arc::new(postgres("alone").await?), fast: None },
        Contestant {
            name: "redis",
            store: Arc::new(RedisStore::open(RedisConfig::new(redis.url()).key_prefix("alone:")).await?),
            fast: None,
        },
    ];
    let maker = Maker::new(postgres("alone").await?, DAY, 512);
    let times = Mutex::new(Times::new());
    let all = options.operations.get();
    // The first turn warms up.
    for round in 0..=options.rounds {
        for contestant in &contestants {
            let numbers = round * all..(round + 1) * all;
            each(numbers, options.clients as usize, |number| {
                operate(contestant, &maker, number, (round > 0).then_some(&times))
            })
            .await?;
        }
    }
    let mut times = times.into_inner().unwrap_or_else(PoisonError::into_inner);
    times.values_mut().for_each(|times| times.sort_by(f64::total_cmp));
    let mut report = Report::new("latency", database.version());
    for step in STEPS {
        for share in [0.5, 0.99] {
            let of = |store| times.get(&(store, step)).map_or(0.0, |times| percentile(times, share));
            let [hybrid, postgres, redis] = ["hybrid", "postgres", "redis"].map(of);
            let name = format!("{step} p{:.0}", share * 100.0);
            report.fact(
                &name,
                json!({
                    "hybrid_ms": rounded(hybrid, 3),
                    "postgres_ms": rounded(postgres, 3),
                    "redis_ms": rounded(redis, 3),
                    "to_postgres": rounded(hybrid / postgres, 2),
                    "to_redis": rounded(hybrid / redis, 2),
                }),
            );
            report.expect(hybrid > 0.0 && postgres > 0.0 && redis > 0.0, format!("{name} was not measured"));
        }
    }
    Ok(report.finish())
}

/// Runs one operation, and repeats its request while it runs and once it is settled.
async fn operate(
    contestant: &Contestant,
    maker: &Maker,
    number: u64,
    times: Option<&Mutex<Times>>,
) -> Result<(), Error> {
    let Contestant { name, store, fast } = contestant;
    let took = |step: &'static str, began: Instant| {
        if let Some(times) = times {
            let mut times = times.lock().unwrap_or_else(PoisonError::into_inner);
            times.entry((*name, step)).or_default().push(began.elapsed().as_secs_f64() * 1_000.0);
        }
    };
    let request = maker.request(number);
    let repeat = Acquire { owner: OwnerToken::random(), ..request.clone() };
    let began = Instant::now();
    let AcquireOutcome::Acquired(lease) = store.acquire(&request).await? else {
        return Err(format!("{name}: record {number} was there already").into());
    };
    let acquired = began.elapsed();
    let duplicate = Instant::now();
    match store.acquire(&repeat).await? {
        AcquireOutcome::InProgress { .. } => took("concurrent duplicate", duplicate),
        other => return Err(format!("{name}: a duplicate of {number} got {other:?}").into()),
    }
    let settling = Instant::now();
    let settled = store.settle(&lease, &Settlement::Completed(response(512, "")), DAY).await?;
    if settled != OwnerOutcome::Applied {
        return Err(format!("{name}: the lease of {number} was lost").into());
    }
    took("first request", settling.checked_sub(acquired).unwrap_or(settling));
    if let Some(fast) = fast {
        // Wait for the copy, because its replay is measured.
        while fast.get(&request.id, None).await?.bytes.is_none_or(|bytes| bytes.is_empty()) {
            tokio::task::yield_now().await;
        }
    }
    let replaying = Instant::now();
    match store.acquire(&repeat).await? {
        AcquireOutcome::Replay(_) => took("replay", replaying),
        other => return Err(format!("{name}: a repeat of {number} got {other:?}").into()),
    }
    Ok(())
}
