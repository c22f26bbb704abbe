//! What an acknowledged record survives, and the settings that say so.

use std::fmt;

use idem_core::Durability;

/// What an acknowledged record survives on these servers.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DurabilityReport {
    /// How many replicas have a change before it is acknowledged.
    pub min_replicas: u32,
    /// Every primary: one, or those of a Cluster.
    pub primaries: Vec<NodeDurability>,
}

/// How one primary keeps its data.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeDurability {
    /// Whether changes are appended to a file (`appendonly`).
    pub appends: bool,
    /// When that file is synced to the disk (`appendfsync`): `always`, `everysec` or `no`. `None` when the server does not
    /// say, as many hosted ones do not.
    pub append_sync: Option<String>,
    /// When snapshots are taken (`save`), empty for never. `None` when the server does not say.
    pub snapshots: Option<String>,
    /// What happens when the memory is full (`maxmemory-policy`).
    pub eviction: String,
    /// How many replicas are connected.
    pub replicas: u32,
}

impl NodeDurability {
    fn level(&self) -> Durability {
        match self.append_sync.as_deref() {
            _ if !self.appends => Durability::Process,
            Some("always") => Durability::Power,
            _ => Durability::Crash,
        }
    }
}

impl DurabilityReport {
    /// What an acknowledged record survives on the weakest primary. This does not cover a failover: see
    /// [`survives_failover`](Self::survives_failover).
    #[must_use]
    pub fn level(&self) -> Durability {
        self.primaries.iter().map(NodeDurability::level).min().unwrap_or(Durability::Process)
    }

    /// Whether an acknowledged record is on a replica as well.
    #[must_use]
    pub fn survives_failover(&self) -> bool {
        self.min_replicas > 0
    }
}

/// One sentence for a log at start-up.
impl fmt::Display for DurabilityReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Of many primaries, the weakest counts.
        if let Some(node) = self.primaries.iter().min_by_key(|node| node.level()) {
            let unknown = |setting: &Option<String>| setting.clone().unwrap_or_else(|| "unknown".to_owned());
            write!(
                formatter,
                "appendonly={}, appendfsync={}, save='{}', maxmemory-policy={}, {} replicas connected, min_replicas={}: ",
                if node.appends { "yes" } else { "no" },
                unknown(&node.append_sync),
                unknown(&node.snapshots),
                node.eviction,
                node.replicas,
                self.min_replicas,
            )?;
        }
        formatter.write_str(match self.level() {
            Durability::Power => "an acknowledged record survives crashes and the loss of power",
            Durability::Crash => {
                "an acknowledged record survives an orderly restart; when the server dies or power is lost, operations that \
                 were not synced yet may run again, with appendfsync=everysec about those of the last second; set \
                 appendfsync to always"
            }
            _ => {
                "an acknowledged record may be lost when the server restarts, and its operation then runs again; set \
                 appendonly to yes"
            }
        })?;
        formatter.write_str(if self.survives_failover() {
            "; a failover to a replica that has acknowledged it keeps it"
        } else {
            "; a failover to a replica loses what had not reached it, and those operations run again; see min_replicas"
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(appends: bool, append_sync: Option<&str>) -> NodeDurability {
        NodeDurability {
            appends,
            append_sync: append_sync.map(str::to_owned),
            snapshots: None,
            eviction: "noeviction".to_owned(),
            replicas: 0,
        }
    }

    #[test]
    fn the_weakest_primary_says_what_a_record_survives() {
        let level = |primaries: &[NodeDurability]| {
            let report = DurabilityReport { min_replicas: 0, primaries: primaries.to_vec() };
            assert!(!report.survives_failover());
            (report.level(), report.to_string())
        };
        let always = node(true, Some("always"));
        assert_eq!(level(std::slice::from_ref(&always)).0, Durability::Power);
        assert_eq!(level(&[always.clone(), node(true, Some("everysec"))]).0, Durability::Crash);
        assert_eq!(level(&[node(true, None)]).0, Durability::Crash);
        let (weakest, said) = level(&[always, node(false, None)]);
        assert_eq!(weakest, Durability::Process);
        assert!(said.contains("appendonly=no, appendfsync=unknown"), "{said}");
        assert_eq!(level(&[]).0, Durability::Process);
    }
}
