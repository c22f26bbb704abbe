//! Redis: `redis-benchmark` with hand-written scripts and commands, and the store, on one server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use idem_redis::{RedisConfig, RedisStore};
use idem_servers::{Redis, redis_command};

use super::crowd::CLIENTS;
use crate::contest::{Contestant, Sample, Spread, hold, per_second, say};
use crate::drive::driven;
use crate::error::Error;
use crate::judged::Goal;
use crate::outside::{number_after, redis_benchmark};
use crate::pace::Pace;
use crate::records::{DAY, Maker};
use crate::report::Report;
use crate::servers;

/// Keys that the hand-written settlement uses. They are fewer than a turn's settlements, so that they exist after a warm-up.
const KEYS: u64 = 10_000;

/// For how long a record by hand is kept, in milliseconds.
const LIFE: &str = "86400000";

const TOKEN: &str = "0123456789abcdef";

/// The hand-written contestants: name, way, requests in flight on each connection, and the least ratio of the store's rate to
/// theirs.
const BY_HAND: [(&str, Way, usize, f64); 4] = [
    ("hash scripts", Way::Scripts, 1, 1.6),
    ("hash scripts, 16 in flight", Way::Scripts, 16, 0.8),
    ("native commands", Way::Native, 1, 0.9),
    ("native commands, 16 in flight", Way::Native, 16, 0.6),
];

/// How it is done by hand.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// A hash for each key, and a script for each verb.
    Scripts,
    /// A string for each key, put there by a native command and replaced by a script.
    Native,
}

pub(crate) async fn run(server: &Redis, pace: Pace, report: &mut Report) -> Result<(), Error> {
    let scripts = Scripts::load(server.port())?;
    let store = RedisStore::open(RedisConfig::new(server.url())).await?;
    let maker = Maker::new(Arc::new(store));
    let mut contestants = scripts.by_hand(pace);
    contestants.push(driven("idem", CLIENTS, pace.turn, &Arc::default(), maker.cycles()));
    let outcome = hold("Redis: acquire and settle, 64 clients", pace.rounds, contestants).await?;
    for (name, _, _, least) in BY_HAND {
        let what = format!("Redis cycles/s against redis-benchmark, {name}");
        report.judge(&what, Goal::AtLeast(least), outcome.ratio("idem", name, per_second));
    }
    report.add(outcome);
    let mut times = Vec::new();
    for _ in 0..pace.rounds {
        times.push(server_time().await?);
    }
    if let Some(Spread { median, min, max }) = Spread::of(times) {
        report.note(format!("Redis: the server's time for a cycle is {median:.1} µs ({min:.1} to {max:.1})"));
    }
    Ok(())
}

/// How many cycles a second the server's one thread could do, by its own clock, if it only ran the store's commands.
pub(crate) async fn limits(pace: Pace, report: &mut Report) -> Result<(), Error> {
    let server = servers::redis()?;
    let scripts = Scripts::load(server.port())?;
    let mut contestants = scripts.by_hand(pace);
    contestants.push(Contestant::new("its commands alone", |_| async {
        Ok(Sample { per_second: 1e6 / server_time().await?, ..Sample::default() })
    }));
    let outcome = hold("Redis, at most: cycles, 64 clients", pace.rounds, contestants).await?;
    for (name, ..) in BY_HAND {
        say(&outcome, "its commands alone", name, ("rate", per_second));
    }
    report.add(outcome);
    Ok(())
}

/// How many microseconds a server with no other work spends on a cycle of the store, by its own clock.
async fn server_time() -> Result<f64, Error> {
    const CYCLES: u64 = 5_000;
    let server = servers::redis()?;
    let port = server.port();
    let maker = Maker::new(Arc::new(RedisStore::open(RedisConfig::new(format!("redis://127.0.0.1:{port}"))).await?));
    redis_command(port, &["CONFIG", "RESETSTAT"])?;
    let mut leases = Vec::new();
    for number in 0..CYCLES {
        leases.push(maker.acquire(number).await?);
    }
    let acquired = spent(port)?;
    redis_command(port, &["CONFIG", "RESETSTAT"])?;
    for lease in &leases {
        maker.store.settle(lease, &maker.settlement(), DAY).await?;
    }
    Ok((acquired + spent(port)?) / CYCLES as f64)
}

/// Microseconds of all commands since the last reset. A script's time includes that of its commands.
fn spent(port: u16) -> Result<f64, Error> {
    let statistics = redis_command(port, &["INFO", "commandstats"])?;
    let of = |command: &str| {
        let rest = statistics.text()?.split_once(&format!("cmdstat_{command}:"))?.1;
        number_after(rest, "usec=")
    };
    let scripts: Vec<f64> = ["evalsha", "eval"].into_iter().filter_map(of).collect();
    let native = ["set", "time", "pexpiretime"].into_iter().filter_map(of);
    match if scripts.is_empty() { native.sum() } else { scripts.iter().sum() } {
        0.0 => Err("Redis said no time of its commands".into()),
        spent => Ok(spent),
    }
}

/// The hand-written scripts, by the digests that the server knows them by.
struct Scripts {
    port: u16,
    acquire: String,
    settle: String,
    replace: String,
}

impl Scripts {
    fn load(port: u16) -> Result<Self, Error> {
        let load = |source: &str| {
            let reply = redis_command(port, &["SCRIPT", "LOAD", source])?;
            reply.text().map(str::to_owned).ok_or_else(|| Error::from("Redis did not load a script"))
        };
        Ok(Self {
            port,
            acquire: load(include_str!("../../lua/acquire.lua"))?,
            settle: load(include_str!("../../lua/settle.lua"))?,
            replace: load(include_str!("../../lua/replace.lua"))?,
        })
    }

    fn by_hand(&self, pace: Pace) -> Vec<Contestant<'_>> {
        let by_hand = |(name, way, in_flight, _)| {
            let known = Arc::new(AtomicU64::new(0));
            Contestant::new(name, move |_| self.cycles(way, in_flight, pace.turn, Arc::clone(&known)))
        };
        BY_HAND.into_iter().map(by_hand).collect()
    }

    /// Acquires and then settles, each for half of the turn. `known` is how many requests the machine has managed in that time.
    async fn cycles(&self, way: Way, in_flight: usize, turn: Duration, known: Arc<AtomicU64>) -> Result<Sample, Error> {
        let requests = known.load(Ordering::Relaxed).max(KEYS);
        let fingerprint = "f".repeat(32);
        let (answer, value) = ("x".repeat(512), format!("{TOKEN}{fingerprint}in_progress"));
        let acquire = |key| match way {
            Way::Scripts => vec!["EVALSHA", &self.acquire, "1", key, &fingerprint, TOKEN, LIFE],
            Way::Native => vec!["SET", key, &value, "NX", "GET", "PX", LIFE],
        };
        let (hand, few) = match way {
            Way::Scripts => ("hand:__rand_int__", "few:__rand_int__"),
            Way::Native => ("native:__rand_int__", "native-few:__rand_int__"),
        };
        // From so many keys that hardly one comes twice.
        let acquired =
            redis_benchmark(self.port, CLIENTS, in_flight, 999_999_999_999, requests, &acquire(hand)).await?;
        if known.load(Ordering::Relaxed) == 0 {
            redis_benchmark(self.port, CLIENTS, 16, KEYS, KEYS * 10, &acquire(few)).await?;
        }
        let script = match way {
            Way::Scripts => &self.settle,
            Way::Native => &self.replace,
        };
        let settle = ["EVALSHA", script, "1", few, TOKEN, &answer, LIFE];
        let settled = redis_benchmark(self.port, CLIENTS, in_flight, KEYS, requests, &settle).await?;
        let half = turn.as_secs_f64() / 2.0;
        known.store((acquired.per_second.min(settled.per_second) * half) as u64, Ordering::Relaxed);
        // A cycle takes the time of both.
        let per_second = 1.0 / (1.0 / acquired.per_second + 1.0 / settled.per_second);
        let sum = |one: Option<f64>, other: Option<f64>| Some(one? + other?);
        Ok(Sample { per_second, p50: sum(acquired.p50, settled.p50), ..Sample::default() })
    }
}
