//! The stores, compared with hand-written code for the same servers.

mod by_hand;
mod crowd;
mod dynamodb;
mod hybrid;
mod mariadb;
mod postgres;
mod redis;
mod sqlite;

pub(crate) use self::crowd::replays;
pub(crate) use self::dynamodb::{client as dynamodb_client, run as run_dynamodb};
pub(crate) use self::mariadb::{TABLE as MARIADB_BY_HAND, run as run_mariadb};
pub(crate) use self::postgres::Contestants as PostgresContestants;
pub(crate) use self::redis::{limits as redis_limits, run as run_redis};
pub(crate) use self::sqlite::limits as sqlite_limits;
use crate::error::Error;
use crate::pace::Pace;
use crate::report::Report;
use crate::servers;

pub(crate) async fn run(pace: Pace, report: &mut Report) -> Result<(), Error> {
    let postgres = servers::postgres()?;
    report.note(format!("{} with {}", postgres.version(), postgres.origin()));
    postgres::run(&postgres, pace, report).await?;
    let redis = servers::redis()?;
    report.note(format!("{} with {}", redis.version(), redis.origin()));
    run_redis(&redis, pace, report).await?;
    hybrid::run(&postgres, &redis, pace, report).await?;
    drop((postgres, redis));
    let mariadb = servers::mariadb()?;
    report.note(format!("{} with {}", mariadb.version(), mariadb.origin()));
    run_mariadb(&mariadb, pace, report).await?;
    drop(mariadb);
    sqlite::run(pace, report).await
}
