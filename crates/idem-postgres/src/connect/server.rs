//! What the server is, and what an acknowledged record survives on it.

use std::fmt;

use idem_core::{Durability, StoreError, StoreErrorKind};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use crate::error::store_error;
use crate::sql::rows;

/// The oldest supported server. 14 is the first that can notice a client's end in the middle of a statement.
const OLDEST: i32 = 140_000;

/// The query for the server's version and settings, whose columns are read below in this order.
pub(crate) const SETTINGS: &str = "SELECT pg_catalog.current_setting('server_version'), \
    pg_catalog.current_setting('server_version_num')::INTEGER, \
    pg_catalog.strpos(pg_catalog.version(), 'linux') OPERATOR(pg_catalog.>) 0, \
    pg_catalog.current_setting('server_encoding'), \
    pg_catalog.current_setting('fsync') OPERATOR(pg_catalog.=) 'on', \
    pg_catalog.current_setting('full_page_writes') OPERATOR(pg_catalog.=) 'on', \
    pg_catalog.current_setting('synchronous_commit'), pg_catalog.current_setting('synchronous_standby_names'), \
    (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_replication)";

/// What is known about the server from the first connection to it.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) durability: DurabilityReport,
    /// `client_connection_check_interval` needs a system call that not every operating system has.
    pub(crate) notices_closed_clients: bool,
}

/// What an acknowledged record survives on this server, and the settings that say so.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DurabilityReport {
    /// What an acknowledged record survives on the server itself.
    pub level: Durability,
    /// Whether the server syncs to the disk at all.
    pub fsync: bool,
    /// Whether pages that were torn by a power cut can be repaired.
    pub full_page_writes: bool,
    /// When a commit is acknowledged: `on`, `off`, `local`, `remote_write` or `remote_apply`.
    pub synchronous_commit: String,
    /// The replicas that have to acknowledge a commit, as `synchronous_standby_names` says; empty when none.
    pub synchronous_standbys: String,
    /// How many connections receive the write-ahead log now: those of replicas, backups and logical subscribers.
    pub replication_connections: u64,
}

impl DurabilityReport {
    /// Whether an acknowledged record is on another machine as well, so that it survives the loss of this one.
    #[must_use]
    pub fn survives_failover(&self) -> bool {
        let replicas_are_awaited = matches!(self.synchronous_commit.as_str(), "on" | "remote_write" | "remote_apply");
        replicas_are_awaited && !self.synchronous_standbys.is_empty()
    }

    /// From columns of [`SETTINGS`].
    pub(crate) fn of(row: &PgRow) -> Result<Self, sqlx::Error> {
        let connections: i64 = row.try_get(8)?;
        let settings = (row.try_get(6)?, row.try_get(7)?);
        Ok(Self::new(row.try_get(4)?, row.try_get(5)?, settings, connections.unsigned_abs()))
    }

    fn new(
        fsync: bool,
        full_page_writes: bool,
        (synchronous_commit, synchronous_standbys): (String, String),
        replication_connections: u64,
    ) -> Self {
        let level = match synchronous_commit.as_str() {
            // Acknowledged before it is written anywhere: the death of the server alone loses it.
            "off" => Durability::Process,
            _ if fsync && full_page_writes => Durability::Power,
            _ => Durability::Crash,
        };
        Self { level, fsync, full_page_writes, synchronous_commit, synchronous_standbys, replication_connections }
    }
}

/// One sentence for a log at start-up.
impl fmt::Display for DurabilityReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let on = |setting| if setting { "on" } else { "off" };
        write!(
            formatter,
            "fsync={}, full_page_writes={}, synchronous_commit={}, synchronous_standby_names='{}': ",
            on(self.fsync),
            on(self.full_page_writes),
            self.synchronous_commit,
            self.synchronous_standbys,
        )?;
        formatter.write_str(match self.level {
            Durability::Power => "an acknowledged record survives crashes and the loss of power",
            Durability::Crash => {
                "an acknowledged record survives the death of any process, but not the loss of power: after one, the \
                 last operations may run again, and the database may be damaged; set fsync and full_page_writes to on"
            }
            _ => {
                "an acknowledged record may be lost when the server dies, and its operation then runs again; set \
                 synchronous_commit to on for this user or database"
            }
        })?;
        match (self.survives_failover(), self.replication_connections) {
            (true, 0) => formatter
                .write_str(", and the loss of the primary; no replica is connected, and commits wait until one is"),
            (true, _) => formatter.write_str(", and the loss of the primary"),
            (false, 0) => write!(formatter, "; {MAY_LOSE}"),
            (false, connected) => write!(
                formatter,
                "; replication connections: {connected}, and no commit waits for any of them: {MAY_LOSE}; set \
                 synchronous_standby_names, and synchronous_commit to on"
            ),
        }
    }
}

const MAY_LOSE: &str =
    "a failover to a replica may lose the last records, and with them the business writes of the same transactions";

/// Refuses a server that cannot hold records; returns what is known about one that can.
pub(crate) async fn examine(connection: &mut PgConnection) -> Result<Server, StoreError> {
    let what = "ask what the server is";
    let found = rows(connection, what, format!("{SETTINGS}, pg_catalog.pg_is_in_recovery()")).await?;
    let row = found.first().ok_or_else(|| StoreError::new(StoreErrorKind::Corrupt, format!("could not {what}")))?;
    let failed = |error| store_error(what, error);
    let refuse = |message: String| Err(StoreError::new(StoreErrorKind::Misconfigured, message));
    if row.try_get(9).map_err(failed)? {
        return refuse("this server is a replica, which takes no records; name the primary".to_owned());
    }
    let version: String = row.try_get(0).map_err(failed)?;
    if row.try_get::<i32, _>(1).map_err(failed)? < OLDEST {
        return refuse(format!("Postgres {version} is too old for idem-postgres, which needs 14 or newer"));
    }
    let encoding: String = row.try_get(3).map_err(failed)?;
    if encoding != "UTF8" {
        return refuse(format!("the database has the encoding {encoding}, and idem-postgres needs one in UTF8"));
    }
    let notices_closed_clients = row.try_get(2).map_err(failed)?;
    Ok(Server { durability: DurabilityReport::of(row).map_err(failed)?, notices_closed_clients })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(fsync: bool, full_page_writes: bool, commit: &str, standbys: &str) -> DurabilityReport {
        DurabilityReport::new(fsync, full_page_writes, (commit.to_owned(), standbys.to_owned()), 0)
    }

    #[test]
    fn the_settings_say_what_a_record_survives() {
        for (fsync, pages, commit, level) in [
            (true, true, "on", Durability::Power),
            (true, true, "local", Durability::Power),
            (true, true, "off", Durability::Process),
            (false, true, "on", Durability::Crash),
            (true, false, "remote_apply", Durability::Crash),
        ] {
            let report = report(fsync, pages, commit, "");
            assert_eq!(report.level, level, "{report}");
            assert!(!report.survives_failover());
            assert!(report.to_string().contains(&format!("synchronous_commit={commit}")), "{report}");
        }
    }

    #[test]
    fn only_a_commit_that_waits_for_a_replica_survives_a_failover() {
        assert!(report(true, true, "on", "ANY 1 (*)").survives_failover());
        assert!(!report(true, true, "local", "ANY 1 (*)").survives_failover());
        assert!(!report(true, true, "remote_apply", "").survives_failover());
    }

    #[test]
    fn replicas_that_nobody_waits_for_are_pointed_out() {
        let with = |connections, report: DurabilityReport| {
            DurabilityReport { replication_connections: connections, ..report }.to_string()
        };
        assert!(with(2, report(true, true, "on", "")).contains("replication connections: 2, and no commit waits"));
        assert!(with(2, report(true, true, "local", "ANY 1 (*)")).contains("no commit waits"));
        assert!(with(0, report(true, true, "on", "ANY 1 (*)")).contains("no replica is connected"));
        assert!(with(1, report(true, true, "on", "ANY 1 (*)")).ends_with("and the loss of the primary"));
    }
}
