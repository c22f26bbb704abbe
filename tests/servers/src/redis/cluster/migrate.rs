//! Moves a slot to another node.

use std::time::Instant;

use super::{Reply, id_of, own_view};
use crate::Error;
use crate::keeper::PATIENCE;
use crate::redis::group::Group;
use crate::redis::node::Node;
use crate::server::Server;

/// Keys per batch: so few that clients find keys on both sides.
const BATCH: &str = "10";

/// The time limit of the target for a batch, in milliseconds.
const TIMEOUT_MS: &str = "5000";

/// Moves a slot by "Live reconfiguration" of the specification of Redis Cluster.
pub(super) fn migrate(nodes: &Group, slot: u16, from: &Node, to: &Node) -> Result<(), Error> {
    let (from_id, to_id, slot) = (id_of(from)?, id_of(to)?, slot.to_string());
    let set = |node: &Node, words: &[&str]| node.ask(&[&["CLUSTER", "SETSLOT", &slot], words].concat());
    // The target first: it must know before clients are redirected to it.
    set(to, &["IMPORTING", &from_id])?;
    set(from, &["MIGRATING", &to_id])?;
    move_keys(&slot, from, to)?;
    // The target first again: if the migration stops here, the slot has an owner.
    set(to, &["NODE", &to_id])?;
    set(from, &["NODE", &to_id])?;
    for node in nodes.up().filter(|node| ![from.port(), to.port()].contains(&node.port())) {
        // A replica learns it from its primary.
        if own_view(node)?.is("master") {
            set(node, &["NODE", &to_id])?;
        }
    }
    Ok(())
}

fn move_keys(slot: &str, from: &Node, to: &Node) -> Result<(), Error> {
    let (start, port) = (Instant::now(), to.port().to_string());
    loop {
        let keys = from.ask(&["CLUSTER", "GETKEYSINSLOT", slot, BATCH])?;
        if keys.items().is_empty() {
            return Ok(());
        }
        if start.elapsed() > PATIENCE {
            return Err(Error::failed(format!("the keys of slot {slot} did not move within {} s", PATIENCE.as_secs())));
        }
        let words = ["MIGRATE", "127.0.0.1", &port, "", "0", TIMEOUT_MS, "KEYS"].map(str::as_bytes);
        let keys = keys.items().iter().filter_map(|key| match key {
            Reply::Bytes(key) => Some(key.as_slice()),
            _ => None,
        });
        from.ask(&words.into_iter().chain(keys).collect::<Vec<_>>())?;
    }
}
