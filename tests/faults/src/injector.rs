//! Causes the faults of the schedule, one after the other.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use idem_faults::{Fault, Kind, Planned, Proxy, Weather};
use idem_servers::redis_command;
use sqlx::{Connection, Row};
use tokio::time::sleep;

use crate::Error;
use crate::service::Service;
use crate::world::Servers;

/// Every value becomes garbage, and stays as long as what it was.
const GARBLE: &str = "
local count = 0
for _, key in ipairs(redis.call('KEYS', '*')) do
  local left = redis.call('PTTL', key)
  redis.call('SET', key, 'garbage ' .. count)
  if left > 0 then redis.call('PEXPIRE', key, left) end
  count = count + 1
end
return count";

/// What was caused, and whether it was noticed by anyone.
#[derive(Debug, Default)]
pub(crate) struct Caused {
    /// How often, by kind.
    pub(crate) faults: BTreeMap<Kind, u64>,
    /// Connections and answers that came to harm, by the kind of weather.
    pub(crate) harmed: BTreeMap<Kind, u64>,
}

/// Follows the schedule to its end. Everything is well again then.
pub(crate) async fn follow(
    planned: &[Planned],
    started: Instant,
    servers: &mut Servers,
    services: &mut [Service],
) -> Result<Caused, Error> {
    let mut caused = Caused::default();
    for Planned { at, fault } in planned {
        sleep(at.saturating_sub(started.elapsed())).await;
        cause(fault, servers, services, &mut caused)
            .await
            .map_err(|error| format!("{} at {:.1} s: {error}", fault.kind, at.as_secs_f64()))?;
        *caused.faults.entry(fault.kind).or_default() += 1;
    }
    Ok(caused)
}

async fn cause(
    fault: &Fault,
    servers: &mut Servers,
    services: &mut [Service],
    caused: &mut Caused,
) -> Result<(), Error> {
    let service = services.get_mut(fault.service).ok_or("there is no such service")?;
    let (postgres, redis) = (servers.postgres.as_mut(), servers.redis.as_mut());
    let (no_postgres, no_redis) = ("there is no Postgres", "there is no Redis");
    match fault.kind {
        Kind::KillService => {
            service.kill()?;
            sleep(fault.lasts).await;
            tokio::task::block_in_place(|| service.launch())?;
        }
        Kind::PauseService => {
            service.pause()?;
            sleep(fault.lasts).await;
            service.resume()?;
        }
        Kind::ReplaceService => tokio::task::block_in_place(|| service.replace())?,
        Kind::UpgradeService => tokio::task::block_in_place(|| service.upgrade())?,
        Kind::ShiftService => {
            service.clock.shift(fault.ahead)?;
            sleep(fault.lasts).await;
            service.clock.shift(0)?;
        }
        Kind::KillPostgres => {
            let postgres = postgres.ok_or(no_postgres)?;
            postgres.kill()?;
            sleep(fault.lasts).await;
            tokio::task::block_in_place(|| postgres.start_again())?;
        }
        Kind::RestartPostgres => {
            let postgres = postgres.ok_or(no_postgres)?;
            tokio::task::block_in_place(|| postgres.restart())?;
        }
        Kind::EndSessions => {
            let mut connection = sqlx::PgConnection::connect(&postgres.ok_or(no_postgres)?.url()).await?;
            let sql = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                       WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()";
            sqlx::raw_sql(sql).execute(&mut connection).await?;
        }
        Kind::FillPostgres => {
            let postgres = postgres.ok_or(no_postgres)?;
            tokio::task::block_in_place(|| postgres.fill_disk())?;
            sleep(fault.lasts).await;
            tokio::task::block_in_place(|| postgres.make_room())?;
        }
        Kind::ShiftPostgres => {
            let postgres = postgres.ok_or(no_postgres)?;
            postgres.shift_clock(fault.ahead)?;
            let ahead = seconds_ahead(&postgres.url()).await?;
            sleep(fault.lasts).await;
            postgres.shift_clock(0)?;
            if (ahead - fault.ahead as f64).abs() > 1.0 {
                return Err(format!("its clock was {ahead} s ahead, and not {} s", fault.ahead).into());
            }
        }
        Kind::KillRedis => {
            let redis = redis.ok_or(no_redis)?;
            redis.kill()?;
            sleep(fault.lasts).await;
            tokio::task::block_in_place(|| redis.start_again())?;
        }
        Kind::PauseRedis => {
            let redis = redis.ok_or(no_redis)?;
            redis.pause()?;
            sleep(fault.lasts).await;
            redis.resume()?;
        }
        Kind::RestartRedis => {
            let redis = redis.ok_or(no_redis)?;
            tokio::task::block_in_place(|| redis.restart())?;
        }
        Kind::FillRedis => {
            let port = redis.ok_or(no_redis)?.port();
            redis_command(port, &["CONFIG", "SET", "maxmemory", "1"])?;
            sleep(fault.lasts).await;
            redis_command(port, &["CONFIG", "SET", "maxmemory", "0"])?;
        }
        Kind::FlushRedis => drop(redis_command(redis.ok_or(no_redis)?.port(), &["FLUSHALL"])?),
        Kind::GarbleRedis => drop(redis_command(redis.ok_or(no_redis)?.port(), &["EVAL", GARBLE, "0"])?),
        Kind::ToService(_) => blow(fault, &service.to_service, caused).await,
        Kind::ToPostgres(_) => blow(fault, service.to_postgres.as_ref().ok_or(no_postgres)?, caused).await,
        Kind::ToRedis(_) => blow(fault, service.to_redis.as_ref().ok_or(no_redis)?, caused).await,
    }
    Ok(())
}

/// How far the clock of Postgres is ahead of that of this machine.
async fn seconds_ahead(url: &str) -> Result<f64, Error> {
    let mut connection = sqlx::PgConnection::connect(url).await?;
    let sql = "SELECT extract(epoch FROM clock_timestamp())::DOUBLE PRECISION";
    let theirs: f64 = sqlx::query(sql).fetch_one(&mut connection).await?.try_get(0)?;
    Ok(theirs - SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64())
}

async fn blow(fault: &Fault, proxy: &Proxy, caused: &mut Caused) {
    let before = proxy.harmed();
    proxy.weather(fault.weather);
    sleep(fault.lasts.max(Duration::from_millis(300))).await;
    proxy.weather(Weather::Clear);
    *caused.harmed.entry(fault.kind).or_default() += proxy.harmed() - before;
}
