//! The stores beside what is written by hand for the same servers.

mod hybrid;
mod postgres;
mod redis;
mod sqlite;

pub(crate) use self::redis::limits as redis_limits;
pub(crate) use self::sqlite::limits as sqlite_limits;
use crate::report::Report;
use crate::{Error, Pace, servers};

/// Clients at once, unless a contest says otherwise.
const CLIENTS: usize = 64;

/// How many clients, in words.
fn crowd(clients: usize) -> String {
    if clients == 1 { "1 client".to_owned() } else { format!("{clients} clients") }
}

/// Settled records for replays.
fn replays(pace: Pace) -> u64 {
    if pace.quick { 10_000 } else { 100_000 }
}

pub(crate) async fn run(pace: Pace, report: &mut Report) -> Result<(), Error> {
    let postgres = servers::postgres()?;
    report.note(format!("{} with {}", postgres.version(), postgres.origin()));
    postgres::run(&postgres, pace, report).await?;
    let redis = servers::redis()?;
    report.note(format!("{} with {}", redis.version(), redis.origin()));
    redis::run(&redis, pace, report).await?;
    hybrid::run(&postgres, &redis, pace, report).await?;
    drop((postgres, redis));
    sqlite::run(pace, report).await
}
