//! Examines the servers: whether they can hold records, and how durably.

use std::collections::HashMap;

use idem_core::{StoreError, StoreErrorKind};
#[cfg(feature = "deadpool")]
use tokio::time::timeout_at;

use crate::durability::{DurabilityReport, NodeDurability};
use crate::error::Phase;
use crate::info::{Info, served_by};
#[cfg(feature = "deadpool")]
use crate::pool;
use crate::transport::Transport;

/// The oldest supported version: 7.0 is the first whose scripts can return custom errors.
const OLDEST: (u32, u32) = (7, 0);

/// Refuses servers that cannot hold records, and reports the durability of the others.
pub(crate) async fn examine(
    transport: &Transport,
    min_replicas: u32,
    allow_eviction: bool,
) -> Result<DurabilityReport, StoreError> {
    let primaries = primaries(transport, Phase::Opening).await?;
    primaries.iter().try_for_each(fits)?;
    #[cfg(feature = "deadpool")]
    if let Some(pool) = transport.pool() {
        // Bounded, because the application may use all connections.
        let told = timeout_at(transport.deadline(), pool::databases(pool)).await;
        if let Some((named, selected)) = told.unwrap_or_default()
            && named != selected
        {
            return Err(refused(format!(
                "a connection of the pool is in database {selected}, and the pool's URL names {named}, which the store \
                 selects before each use; name the database in the URL, and do not leave a connection in another one"
            )));
        }
    }
    let report = report(transport, &primaries, min_replicas).await;
    refuse_eviction(&report, allow_eviction)?;
    Ok(report)
}

fn fits(primary: &Info) -> Result<(), StoreError> {
    if primary.text("role") != "master" {
        return Err(refused("this server is a replica, which takes no records; name the primary, or its Sentinels"));
    }
    if primary.version_number() < OLDEST {
        let version = primary.text("redis_version");
        return Err(refused(format!("Redis {version} is too old for idem-redis, which needs 7.0 or newer")));
    }
    // Its scripts would truncate the times in records, which would then count as absent.
    if primary.text("arch_bits") == "32" {
        return Err(refused(
            "this server is a build for 32 bits, whose scripts cannot hold times; use one for 64 bits",
        ));
    }
    Ok(())
}

pub(crate) fn refuse_eviction(report: &DurabilityReport, allow_eviction: bool) -> Result<(), StoreError> {
    let evicting = report.primaries.iter().find(|primary| primary.eviction != "noeviction");
    match evicting {
        Some(primary) if !allow_eviction => Err(refused(format!(
            "maxmemory-policy is {}, so Redis would evict live records when its memory is full, and their operations \
             would run again; set it to noeviction (CONFIG SET maxmemory-policy noeviction, and in redis.conf)",
            primary.eviction
        ))),
        _ => Ok(()),
    }
}

fn refused(message: impl Into<String>) -> StoreError {
    StoreError::new(StoreErrorKind::Misconfigured, message)
}

/// The `INFO` of every primary.
pub(crate) async fn primaries(transport: &Transport, phase: Phase) -> Result<Vec<Info>, StoreError> {
    let what = "ask what the server is";
    let answers =
        transport.ask_all(redis::cmd("INFO").arg("everything")).await.map_err(|failure| failure.of(what, phase))?;
    let infos = answers.into_iter().map(Info::read).collect::<Result<Vec<_>, _>>()?;
    // In a Cluster, the driver asks only the servers that it has reached so far.
    if infos.iter().any(|info| info.text("redis_mode") == "cluster") {
        if !transport.is_cluster() {
            return Err(refused("this server is part of a Cluster; write redis+cluster:// for its URL"));
        }
        let slots =
            transport.ask_all(redis::cmd("CLUSTER").arg("SLOTS")).await.map_err(|failure| failure.of(what, phase))?;
        let served = served_by(slots.into_iter().next().unwrap_or_default())?;
        if infos.len() < served {
            let message = format!("{} of {served} primaries of the Cluster did not answer", served - infos.len());
            return Err(StoreError::new(StoreErrorKind::Unavailable, message));
        }
    }
    Ok(infos)
}

pub(crate) async fn report(transport: &Transport, primaries: &[Info], min_replicas: u32) -> DurabilityReport {
    let append_sync = setting(transport, "appendfsync").await;
    let snapshots = setting(transport, "save").await;
    let primary = |info: &Info| NodeDurability {
        appends: info.text("aof_enabled") == "1",
        append_sync: append_sync.clone(),
        snapshots: snapshots.clone(),
        eviction: info.text("maxmemory_policy").to_owned(),
        replicas: info.text("connected_slaves").parse().unwrap_or_default(),
    };
    DurabilityReport { min_replicas, primaries: primaries.iter().map(primary).collect() }
}

/// A setting that all primaries share; `None` when they differ, or when a server does not reveal it.
async fn setting(transport: &Transport, name: &str) -> Option<String> {
    let answers = transport.ask_all(redis::cmd("CONFIG").arg("GET").arg(name)).await.ok()?;
    let mut values = answers.into_iter().map(|answer| {
        let settings: HashMap<String, String> = redis::from_redis_value(answer).ok()?;
        settings.into_values().next()
    });
    let first = values.next().flatten()?;
    values.all(|value| value.as_ref() == Some(&first)).then_some(first)
}

#[cfg(test)]
mod tests {
    use redis::Value;

    use super::*;

    #[test]
    fn a_server_whose_scripts_cannot_hold_times_is_refused() {
        let server = |bits| {
            let info = format!("redis_version:7.0.15\r\narch_bits:{bits}\r\nrole:master\r\n");
            Info::read(Value::BulkString(info.into_bytes())).unwrap()
        };
        assert!(fits(&server(64)).is_ok());
        assert!(fits(&server(32)).unwrap_err().to_string().contains("64 bits"));
    }
}
