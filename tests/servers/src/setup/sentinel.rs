//! The setup of a Redis primary, its replicas, and Sentinels that replace it.

use std::time::Duration;

use super::expect;
use crate::{Error, Reply};

/// The name under which the Sentinels know the group.
pub const SERVICE: &str = "idem";

/// The number of replicas.
pub const REPLICAS: usize = 2;

/// The number of Sentinels.
pub const SENTINELS: usize = 3;

/// The number of Sentinels that must agree.
pub const QUORUM: usize = 2;

/// The configuration of a Sentinel for a primary that counts as down after `down_after`. Sentinels that did not agree on a
/// leader try again after six times as long.
#[must_use]
pub fn watching(primary: (&str, u16), down_after: Duration) -> String {
    let ((host, port), milliseconds) = (primary, down_after.as_millis());
    format!(
        "sentinel monitor {SERVICE} {host} {port} {QUORUM}\nsentinel down-after-milliseconds {SERVICE} {milliseconds}\n\
         sentinel failover-timeout {SERVICE} {}\nsentinel parallel-syncs {SERVICE} 1\n",
        3 * milliseconds
    )
}

/// Fails unless the server that answers has this role and the links that belong to it.
///
/// # Errors
///
/// If that does not hold, or `ask` fails.
pub fn check_server(
    name: &str,
    is_primary: bool,
    primary_port: u16,
    ask: impl Fn(&[&str]) -> Result<Reply, Error>,
) -> Result<(), Error> {
    let info = ask(&["INFO", "replication"])?;
    let field = |field: &str| info.field(field).unwrap_or("missing");
    if !is_primary {
        expect(format!("the role of {name}"), field("role"), "slave")?;
        expect(format!("the primary of {name}"), field("master_port"), &primary_port.to_string())?;
        return expect(format!("the link of {name} to its primary"), field("master_link_status"), "up");
    }
    expect(format!("the role of {name}"), field("role"), "master")?;
    let slots = (0..REPLICAS).filter_map(|index| info.field(&format!("slave{index}")));
    expect("the number of replicas online", slots.filter(|line| line.contains("state=online")).count(), REPLICAS)
}

/// Fails unless the Sentinel that answers knows the primary, all replicas and all other Sentinels, and all are up.
///
/// # Errors
///
/// If that does not hold, or `ask` fails.
pub fn check_sentinel(
    name: &str,
    primary_port: u16,
    ask: impl Fn(&[&str]) -> Result<Reply, Error>,
) -> Result<(), Error> {
    let known = |about: &str| ask(&["SENTINEL", about, SERVICE]);
    let master = known("MASTER")?;
    expect(format!("the flags of the primary in {name}"), value(&master, "flags"), "master")?;
    let (replicas, others) = (known("REPLICAS")?, known("SENTINELS")?);
    expect(format!("the number of replicas in {name}"), replicas.items().len(), REPLICAS)?;
    for replica in replicas.items() {
        expect(format!("the flags of a replica in {name}"), value(replica, "flags"), "slave")?;
        expect(format!("the link of a replica in {name}"), value(replica, "master-link-status"), "ok")?;
        let upstream = value(replica, "master-port");
        expect(format!("the primary of a replica in {name}"), upstream, &primary_port.to_string())?;
    }
    expect(format!("the number of other Sentinels in {name}"), others.items().len(), SENTINELS - 1)?;
    others
        .items()
        .iter()
        .try_for_each(|other| expect(format!("the flags of a Sentinel in {name}"), value(other, "flags"), "sentinel"))
}

/// Finds a value in a reply of a Sentinel, in which names and values alternate.
fn value<'a>(reply: &'a Reply, name: &str) -> &'a str {
    let mut pairs = reply.items().chunks_exact(2);
    pairs.find(|pair| pair[0].text() == Some(name)).and_then(|pair| pair[1].text()).unwrap_or_default()
}
