//! Causes the faults of the schedule, one after the other.

mod access;
mod pooler;
mod squatter;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use idem_faults::{Fault, Kind, Known, Planned};
use idem_proxy::{Network, Proxy, Weather};
use idem_servers::redis_command;
use sqlx::{Connection, Row};
use tokio::time::sleep;

use crate::Error;
use crate::service::Service;
use crate::world::{LEASE, Servers, World};

/// Replaces every value by garbage and keeps its TTL.
const GARBLE: &str = "
local count = 0
for _, key in ipairs(redis.call('KEYS', '*')) do
  local left = redis.call('PTTL', key)
  redis.call('SET', key, 'garbage ' .. count)
  if left > 0 then redis.call('PEXPIRE', key, left) end
  count = count + 1
end
return count";

/// How much longer a network fault waits, at most, until it harms a connection.
const HARMLESS: Duration = Duration::from_secs(4);

/// How long clients send nothing before a stall.
const HUSH: Duration = Duration::from_millis(400);

/// Which faults were caused, and which of them did harm.
#[derive(Debug, Default)]
pub(crate) struct Caused {
    /// How often, by kind.
    pub(crate) faults: BTreeMap<Kind, u64>,
    /// How often each kind did harm, for the kinds where that can be counted.
    pub(crate) harmed: BTreeMap<Kind, u64>,
    /// What the checker must know besides the answers, except the keys whose handler began.
    pub(crate) known: Known,
}

/// Causes all planned faults in turn, and undoes the last one too.
pub(crate) async fn follow(
    planned: &[Planned],
    world: &World,
    servers: &mut Servers,
    services: &mut [Service],
) -> Result<Caused, Error> {
    let mut caused = Caused::default();
    let started = world.started;
    for Planned { at, fault } in planned {
        sleep(at.saturating_sub(started.elapsed())).await;
        let began = started.elapsed();
        cause(fault, world, servers, services, &mut caused)
            .await
            .map_err(|error| format!("{} at {:.1} s: {error}", fault.kind, at.as_secs_f64()))?;
        let span = (began, started.elapsed());
        match fault.kind {
            // `stall` records its own span.
            Kind::StallPostgres(_) | Kind::StallRedis(_) | Kind::StallMariaDb(_) => {}
            _ => caused.known.losses.push(span),
        }
        if fault.kind == Kind::ShiftPostgres {
            caused.known.jumps.push(span);
        }
        *caused.faults.entry(fault.kind).or_default() += 1;
    }
    Ok(caused)
}

async fn cause(
    fault: &Fault,
    world: &World,
    servers: &mut Servers,
    services: &mut [Service],
    caused: &mut Caused,
) -> Result<(), Error> {
    if let Kind::StallPostgres(_) | Kind::StallRedis(_) | Kind::StallMariaDb(_) = fault.kind {
        return stall(fault, world, servers, services, &mut caused.known).await;
    }
    let pooler = servers.pooler.as_mut();
    let mut harm = |times: u64| *caused.harmed.entry(fault.kind).or_default() += times;
    let service = services.get_mut(fault.service).ok_or("there is no such service")?;
    let (postgres, redis, mariadb) = (servers.postgres.as_mut(), servers.redis.as_mut(), servers.mariadb.as_mut());
    let (no_postgres, no_redis, no_mariadb) = ("there is no Postgres", "there is no Redis", "there is no MariaDB");
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
        Kind::RotatePostgres => {
            harm(access::rotate_postgres(postgres.ok_or(no_postgres)?, fault.way, fault.lasts).await?);
        }
        Kind::RevokePostgres => {
            harm(access::revoke_postgres(postgres.ok_or(no_postgres)?, fault.way, fault.lasts).await?);
        }
        Kind::SquatLocks => harm(squatter::squat(postgres.ok_or(no_postgres)?.port(), fault.lasts).await?),
        Kind::RotateRedis => harm(access::rotate_redis(redis.ok_or(no_redis)?.port(), fault.lasts).await?),
        Kind::RevokeRedis => harm(access::revoke_redis(redis.ok_or(no_redis)?.port(), fault.way, fault.lasts).await?),
        Kind::FillPooler => harm(pooler::fill(pooler.ok_or("there is no PgBouncer")?, fault.lasts).await?),
        Kind::KillPooler => {
            let pooler = pooler.ok_or("there is no PgBouncer")?;
            pooler.kill()?;
            sleep(fault.lasts).await;
            tokio::task::block_in_place(|| pooler.start_again())?;
        }
        Kind::KillMariaDb => {
            let mariadb = mariadb.ok_or(no_mariadb)?;
            mariadb.kill()?;
            sleep(fault.lasts).await;
            tokio::task::block_in_place(|| mariadb.start_again())?;
        }
        Kind::EndMariaDbSessions => harm(access::end_mariadb_sessions(mariadb.ok_or(no_mariadb)?).await?),
        Kind::ToMariaDb(_) => harm(blow(fault, service.to_mariadb.as_ref().ok_or(no_mariadb)?).await),
        Kind::ToService(_) => harm(blow(fault, &service.to_service).await),
        Kind::ToPostgres(_) => harm(blow(fault, service.to_postgres.as_ref().ok_or(no_postgres)?).await),
        Kind::ToRedis(_) => harm(blow(fault, service.to_redis.as_ref().ok_or(no_redis)?).await),
        Kind::StallPostgres(_) | Kind::StallRedis(_) | Kind::StallMariaDb(_) => {}
    }
    Ok(())
}

/// What stands still in a stall.
#[derive(Debug, Clone, Copy)]
enum Stalled {
    /// The server, with all its processes.
    Server,
    /// All traffic between all services and the store.
    AllServices,
    /// All traffic between one service and the store.
    OneService(usize),
}

/// Stalls a store, which afterwards executes what it was sent meanwhile.
async fn stall(
    fault: &Fault,
    world: &World,
    servers: &mut Servers,
    services: &[Service],
    known: &mut Known,
) -> Result<(), Error> {
    let stalled = [Stalled::Server, Stalled::AllServices, Stalled::OneService(fault.service)][fault.way % 3];
    let held = |service: usize| match stalled {
        Stalled::Server => false,
        Stalled::AllServices => true,
        Stalled::OneService(one) => one == service,
    };
    let proxies = || {
        let held = services.iter().enumerate().filter(|(number, _)| held(*number));
        held.filter_map(|(_, service)| match fault.kind {
            Kind::StallPostgres(_) => service.to_postgres.as_ref(),
            Kind::StallMariaDb(_) => service.to_mariadb.as_ref(),
            _ => service.to_redis.as_ref(),
        })
    };
    let is_server = matches!(stalled, Stalled::Server);
    // Wait until no request is in flight. Requests that first arrive during the stall then use idle connections, and the store
    // executes them later.
    let began = world.started.elapsed();
    world.hush.store(true, Ordering::Relaxed);
    sleep(HUSH).await;
    if is_server {
        tokio::task::block_in_place(|| freeze(servers, fault.kind, true))?;
    }
    proxies().for_each(|proxy| proxy.weather(Weather::BlackHole));
    let stands = world.started.elapsed();
    world.hush.store(false, Ordering::Relaxed);
    sleep(fault.lasts).await;
    known.stalls.push((stands, world.started.elapsed()));
    known.losses.push((began, stands));
    if is_server {
        tokio::task::block_in_place(|| freeze(servers, fault.kind, false))?;
    }
    proxies().for_each(|proxy| proxy.weather(Weather::Clear));
    // The calm is kept even if the schedule is late.
    sleep(fault.kind.calm(LEASE)).await;
    Ok(())
}

fn freeze(servers: &mut Servers, kind: Kind, is_frozen: bool) -> Result<(), Error> {
    let missing = "there is no such store";
    match kind {
        Kind::StallPostgres(_) => {
            let postgres = servers.postgres.as_mut().ok_or(missing)?;
            if is_frozen { postgres.freeze()? } else { postgres.thaw()? }
        }
        Kind::StallMariaDb(_) => {
            let mariadb = servers.mariadb.as_mut().ok_or(missing)?;
            if is_frozen { mariadb.freeze()? } else { mariadb.thaw()? }
        }
        _ => {
            let redis = servers.redis.as_mut().ok_or(missing)?;
            if is_frozen { redis.pause()? } else { redis.resume()? }
        }
    }
    Ok(())
}

/// How far the clock of Postgres is ahead of the clock of this machine, in seconds.
async fn seconds_ahead(url: &str) -> Result<f64, Error> {
    let mut connection = sqlx::PgConnection::connect(url).await?;
    let sql = "SELECT extract(epoch FROM clock_timestamp())::DOUBLE PRECISION";
    let theirs: f64 = sqlx::query(sql).fetch_one(&mut connection).await?.try_get(0)?;
    Ok(theirs - SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64())
}

/// Applies the weather of a fault and returns how often it did harm.
async fn blow(fault: &Fault, proxy: &Proxy<Network>) -> u64 {
    let before = proxy.harmed();
    proxy.weather(fault.weather);
    sleep(fault.lasts.max(Duration::from_millis(300))).await;
    // Services avoid a cache that has just failed for a while, so the weather stays until a connection meets it.
    let give_up_at = Instant::now() + HARMLESS;
    let is_met = || matches!(fault.weather, Weather::Delay(_)) || proxy.harmed() > before;
    while !is_met() && Instant::now() < give_up_at {
        sleep(Duration::from_millis(20)).await;
    }
    proxy.weather(Weather::Clear);
    proxy.harmed() - before
}
