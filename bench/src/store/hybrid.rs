//! A replay by Redis in front of Postgres, compared with Redis alone.

use std::sync::Arc;
use std::time::Duration;

use idem_hybrid::{HybridConfig, HybridStore};
use idem_postgres::{PostgresConfig, PostgresStore};
use idem_redis::{RedisConfig, RedisFastStore, RedisStore};
use idem_servers::{Postgres, Redis};

use super::crowd::{CLIENTS, crowd, replays};
use crate::contest::{hold, p50};
use crate::drive::driven;
use crate::error::Error;
use crate::judged::Goal;
use crate::pace::Pace;
use crate::records::Maker;
use crate::report::Report;

pub(crate) async fn run(postgres: &Postgres, redis: &Redis, pace: Pace, report: &mut Report) -> Result<(), Error> {
    let durable = PostgresStore::open(PostgresConfig::new(postgres.url()).schema("behind")).await?;
    let fast = RedisFastStore::new(RedisConfig::new(redis.url()).key_prefix("front:"))?;
    let hybrid = HybridStore::new(Arc::new(durable), Arc::new(fast), HybridConfig::new());
    let alone = RedisStore::open(RedisConfig::new(redis.url()).key_prefix("alone:")).await?;
    let makers = [("hybrid", Maker::new(Arc::new(hybrid.clone()))), ("Redis", Maker::new(Arc::new(alone)))];
    for (_, maker) in &makers {
        maker.fill(replays(pace)).await?;
    }
    for clients in [1, CLIENTS] {
        let contestants = makers
            .iter()
            .map(|(name, maker)| driven(name, clients, pace.turn, &Arc::default(), maker.replays(replays(pace))));
        let name = format!("Redis in front of Postgres: replay, {}", crowd(clients));
        let outcome = hold(&name, pace.rounds, contestants.collect()).await?;
        let what = format!("hybrid replay p50 against Redis alone, {}", crowd(clients));
        report.judge(&what, Goal::AtMost(1.15), outcome.ratio("hybrid", "Redis", p50));
        report.add(outcome);
    }
    // Copies are written in the background, and must not meet servers that have ended.
    tokio::time::sleep(Duration::from_millis(100)).await;
    report.note(format!("hybrid: {:?}", hybrid.metrics()));
    Ok(())
}
