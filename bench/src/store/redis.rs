//! Redis: `redis-benchmark` with hand-written scripts, and the store, on one server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use idem_redis::{RedisConfig, RedisStore};
use idem_servers::{Redis, redis_command};

use super::crowd::CLIENTS;
use crate::contest::{Contestant, Sample, hold, per_second, say};
use crate::drive::driven;
use crate::error::Error;
use crate::judged::Goal;
use crate::outside::{number_after, redis_benchmark};
use crate::pace::Pace;
use crate::records::Maker;
use crate::report::Report;
use crate::servers;

/// Keys that the hand-written settlement finds. Fewer than a turn has settlements, so that they are there after a warm-up.
const KEYS: u64 = 10_000;

/// What is in flight on a connection that waits for each answer, and on one that does not.
const IN_FLIGHT: [(&str, usize); 2] = [("by hand", 1), ("by hand, 16 in flight", 16)];

pub(crate) async fn run(server: &Redis, pace: Pace, report: &mut Report) -> Result<(), Error> {
    let scripts = Scripts::load(server.port())?;
    let store = RedisStore::open(RedisConfig::new(server.url())).await?;
    let maker = Maker::new(Arc::new(store));
    let mut contestants = scripts.by_hand(pace);
    contestants.push(driven("idem", CLIENTS, pace.turn, &Arc::default(), maker.cycles()));
    let outcome = hold("Redis: acquire and settle, 64 clients", pace.rounds, contestants).await?;
    for ((name, in_flight), least) in IN_FLIGHT.into_iter().zip([1.5, 0.8]) {
        let what = format!("Redis cycles/s against redis-benchmark, {in_flight} in flight per connection");
        report.judge(&what, Goal::AtLeast(least), outcome.ratio("idem", name, per_second));
    }
    report.add(outcome);
    Ok(())
}

/// How many cycles a second the server's one thread could do if it did nothing but the project's scripts, by its own clock.
pub(crate) async fn limits(pace: Pace, report: &mut Report) -> Result<(), Error> {
    let server = servers::redis()?;
    let port = server.port();
    let scripts = Scripts::load(port)?;
    let maker = Maker::new(Arc::new(RedisStore::open(RedisConfig::new(server.url())).await?));
    let mut contestants = scripts.by_hand(pace);
    let mut idem = driven("idem", CLIENTS, pace.turn, &Arc::default(), maker.cycles());
    contestants.push(Contestant::new("the scripts alone", move |number| {
        let turn = (idem.turn)(number);
        async move {
            redis_command(port, &["CONFIG", "RESETSTAT"])?;
            turn.await?;
            let statistics = redis_command(port, &["INFO", "commandstats"])?;
            let script =
                statistics.text().and_then(|text| text.split_once("cmdstat_evalsha:")).map_or("", |(_, rest)| rest);
            let number = |label| number_after(script, label).ok_or("Redis said no time of its scripts");
            // A cycle is two of them.
            Ok(Sample { per_second: number("calls=")? / number("usec=")? * 1e6 / 2.0, ..Sample::default() })
        }
    }));
    let outcome = hold("Redis, at most: cycles, 64 clients", pace.rounds, contestants).await?;
    for (name, _) in IN_FLIGHT {
        say(&outcome, "the scripts alone", name, ("rate", per_second));
    }
    report.add(outcome);
    Ok(())
}

/// The hand-written scripts, by the digests that the server knows them by.
struct Scripts {
    port: u16,
    acquire: String,
    settle: String,
}

impl Scripts {
    fn load(port: u16) -> Result<Self, Error> {
        let load = |source: &str| {
            let reply = redis_command(port, &["SCRIPT", "LOAD", source])?;
            reply.text().map(str::to_owned).ok_or_else(|| Error::from("Redis did not load a script"))
        };
        let (acquire, settle) =
            (load(include_str!("../../lua/acquire.lua"))?, load(include_str!("../../lua/settle.lua"))?);
        Ok(Self { port, acquire, settle })
    }

    fn by_hand(&self, pace: Pace) -> Vec<Contestant<'_>> {
        let by_hand = |(name, in_flight)| {
            let known = Arc::new(AtomicU64::new(0));
            Contestant::new(name, move |_| self.cycles(in_flight, pace.turn, Arc::clone(&known)))
        };
        IN_FLIGHT.into_iter().map(by_hand).collect()
    }

    /// One after the other for half of the turn each. `known` is how many requests of a turn the machine has shown to manage.
    async fn cycles(&self, in_flight: usize, turn: Duration, known: Arc<AtomicU64>) -> Result<Sample, Error> {
        let requests = known.load(Ordering::Relaxed).max(KEYS);
        let fingerprint = "f".repeat(32);
        let answer = "x".repeat(512);
        // As many keys as there can be, so that hardly one comes twice.
        let acquire =
            ["EVALSHA", &self.acquire, "1", "hand:__rand_int__", &fingerprint, "0123456789abcdef", "86400000"];
        let acquired = redis_benchmark(self.port, CLIENTS, in_flight, 999_999_999_999, requests, &acquire).await?;
        let fill = ["EVALSHA", &self.acquire, "1", "few:__rand_int__", &fingerprint, "0123456789abcdef", "86400000"];
        if known.load(Ordering::Relaxed) == 0 {
            redis_benchmark(self.port, CLIENTS, 16, KEYS, KEYS * 10, &fill).await?;
        }
        let settle = ["EVALSHA", &self.settle, "1", "few:__rand_int__", "0123456789abcdef", &answer, "86400000"];
        let settled = redis_benchmark(self.port, CLIENTS, in_flight, KEYS, requests, &settle).await?;
        let half = turn.as_secs_f64() / 2.0;
        known.store((acquired.per_second.min(settled.per_second) * half) as u64, Ordering::Relaxed);
        // A cycle takes the time of both.
        let per_second = 1.0 / (1.0 / acquired.per_second + 1.0 / settled.per_second);
        let sum = |one: Option<f64>, other: Option<f64>| Some(one? + other?);
        Ok(Sample { per_second, p50: sum(acquired.p50, settled.p50), ..Sample::default() })
    }
}
