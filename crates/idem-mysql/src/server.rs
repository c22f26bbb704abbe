//! The server: its version, and what an acknowledged record survives on it.

use std::collections::HashMap;
use std::fmt;

use idem_core::{Durability, StoreError, StoreErrorKind};
use sqlx::Row as _;
use sqlx::mysql::MySqlRow;

/// The first release of each maintained series of MariaDB that does not lose writes in silence. Before, a transaction seemed to go on
/// after a deadlock (MDEV-36959), and an UPDATE that was killed could report success (MDEV-37198). Series in between are refused.
const OLDEST_MARIADB: [(u32, u32, u32); 4] = [(10, 11, 15), (11, 4, 9), (11, 8, 4), (12, 1, 2)];

/// The version that has what the store uses: `SKIP LOCKED`, `RANDOM_BYTES` and constraints that are checked.
const OLDEST_MYSQL: (u32, u32, u32) = (8, 0, 16);

/// A record holds a request's answer, 1 MiB unless the application allows more. Literals take two bytes for each.
const LEAST_PACKET: usize = 4 * 1024 * 1024;

/// Asks for the settings, those of them that the server has.
pub(crate) const SETTINGS: &str = "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version','innodb_flush_log_at_trx_commit',\
    'innodb_doublewrite','innodb_flush_method','log_bin','sync_binlog','read_only','sql_mode','max_allowed_packet','wsrep_on',\
    'innodb_snapshot_isolation')";

/// Asks for the settings of a session, those of them that the server has.
pub(crate) const SESSION_SETTINGS: &str = "SHOW SESSION VARIABLES WHERE Variable_name IN ('sql_mode','innodb_snapshot_isolation',\
    'transaction_isolation','tx_isolation')";

/// Counts the tables of a database whose writes no ROLLBACK takes back. The name of the database follows.
pub(crate) const OTHER_ENGINES: &str = "SELECT COUNT(*) FROM information_schema.tables WHERE table_type='BASE TABLE' AND \
    engine IN ('MyISAM','Aria','MEMORY','CSV','MERGE','MRG_MyISAM','ARCHIVE') AND table_schema=";

/// What an acknowledged record survives on this server, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DurabilityReport {
    /// What it survives.
    pub durability: Durability,
    /// The settings that make it less than [`Durability::Power`], each with advice.
    pub reasons: Vec<String>,
}

/// A sentence for a log at start-up.
impl fmt::Display for DurabilityReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.durability {
            Durability::Power => {
                formatter.write_str("acknowledged records survive the loss of power, if the disk honours syncs")?
            }
            Durability::Process => {
                formatter.write_str("acknowledged records of the last second are lost if the server ends")?
            }
            _ => formatter
                .write_str("acknowledged records survive the end of any process, and can be lost with power")?,
        }
        self.reasons.iter().try_for_each(|reason| write!(formatter, "; {reason}"))
    }
}

/// What [`MySqlStore::self_test`](crate::MySqlStore::self_test) found out.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SelfTestReport {
    /// What an acknowledged record survives.
    pub durability: DurabilityReport,
    /// What is weaker than it should be, each with advice; there should be nothing.
    pub warnings: Vec<String>,
}

/// Sentences for a log at start-up.
impl fmt::Display for SelfTestReport {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.durability.fmt(formatter)?;
        self.warnings.iter().try_for_each(|warning| write!(formatter, "; {warning}"))
    }
}

/// The report of [`MySqlStore::health`](crate::MySqlStore::health).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MySqlHealth {
    /// The server's version, as in `10.11.19-MariaDB-0+deb12u1`.
    pub version: String,
    /// About how many records there are, expired ones included, as InnoDB estimates it. Counting them would take minutes on a
    /// large table.
    pub records: u64,
    /// What an acknowledged record survives.
    pub durability: DurabilityReport,
}

/// The server's settings.
#[derive(Debug)]
pub(crate) struct Settings(HashMap<String, String>);

impl Settings {
    pub(crate) fn of(rows: &[MySqlRow]) -> Result<Self, sqlx::Error> {
        let text = |row: &MySqlRow, column| {
            let bytes: Vec<u8> = row.try_get_unchecked(column)?;
            Ok::<_, sqlx::Error>(String::from_utf8_lossy(&bytes).into_owned())
        };
        rows.iter()
            .map(|row| Ok((text(row, 0)?.to_ascii_lowercase(), text(row, 1)?)))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    fn value(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    fn is_on(&self, name: &str) -> bool {
        matches!(self.value(name).to_ascii_uppercase().as_str(), "ON" | "1")
    }

    pub(crate) fn is_mariadb(&self) -> bool {
        self.version().contains("MariaDB")
    }

    pub(crate) fn version(&self) -> &str {
        self.value("version")
    }

    pub(crate) fn max_packet(&self) -> usize {
        self.value("max_allowed_packet").parse().unwrap_or(usize::MAX)
    }

    /// Refuses a server that lacks what the store uses, or that takes no writes.
    pub(crate) fn expect_suitable(&self) -> Result<(), StoreError> {
        let version = self.version();
        let needed = match self.is_mariadb() {
            true if !is_sound_mariadb(numbers(version)) => {
                "MariaDB 10.11.15, 11.4.9, 11.8.4 or 12.1.2, or a later release of these series or a newer series: others lose writes \
                 in silence (MDEV-36959, MDEV-37198)"
            }
            false if numbers(version) < OLDEST_MYSQL => "MySQL 8.0.16 or later",
            _ => "",
        };
        if !needed.is_empty() {
            let message = format!("the server has version {version}; the store needs {needed}");
            return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
        }
        // MariaDB 12 has more values than ON and OFF.
        if !matches!(self.value("read_only").to_ascii_uppercase().as_str(), "" | "OFF" | "0") {
            let message = "the server has read_only set: it is a replica; connect to the primary";
            return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
        }
        Ok(())
    }

    pub(crate) fn durability(&self) -> DurabilityReport {
        let mut reasons = Vec::new();
        let flush = self.value("innodb_flush_log_at_trx_commit");
        if !matches!(flush, "1" | "3") {
            let done = if flush == "0" { "written once a second" } else { "not synced" };
            reasons.push(format!("innodb_flush_log_at_trx_commit is {flush}: commits are {done}; set it to 1"));
        }
        if self.is_on("log_bin") && self.value("sync_binlog") != "1" {
            let sync = self.value("sync_binlog");
            reasons.push(format!(
                "sync_binlog is {sync}: after a loss of power the server rolls back what its binary log lacks; set it to 1"
            ));
        }
        let doublewrite = self.value("innodb_doublewrite");
        let is_safe = self.is_on("innodb_doublewrite") || doublewrite.eq_ignore_ascii_case("DETECT_AND_RECOVER");
        if !doublewrite.is_empty() && !is_safe {
            reasons.push(format!(
                "innodb_doublewrite is {doublewrite}: a page that is torn by a loss of power may not be repaired; set it to ON"
            ));
        }
        let method = self.value("innodb_flush_method").to_ascii_lowercase();
        if matches!(method.as_str(), "nosync" | "littlesync") {
            reasons.push(format!("innodb_flush_method is {method}: files are not synced to the disk"));
        }
        let durability = match flush {
            // The end of the server's process loses them.
            "0" => Durability::Process,
            _ if reasons.is_empty() => Durability::Power,
            _ => Durability::Crash,
        };
        DurabilityReport { durability, reasons }
    }

    /// Whether the server has `innodb_snapshot_isolation`, on or off.
    pub(crate) fn has_snapshot_isolation(&self) -> bool {
        self.0.contains_key("innodb_snapshot_isolation")
    }

    /// Whether a transaction at the session's isolation level keeps the snapshot of its first read.
    fn keeps_snapshot(&self) -> bool {
        let level = [self.value("transaction_isolation"), self.value("tx_isolation")].concat().to_ascii_uppercase();
        !level.contains("COMMITTED")
    }

    /// What is weaker than it should be. `session` has the settings of handlers' sessions. So many tables of the database are not
    /// transactional.
    pub(crate) fn warnings(&self, session: &Self, tables: i64) -> Vec<String> {
        let mut warnings = Vec::new();
        if tables > 0 {
            warnings.push(format!(
                "{tables} tables of the database have an engine without transactions, such as MyISAM or Aria: ROLLBACK keeps what a \
                 handler has written there, and a repeat writes it again; use InnoDB for tables that handlers write"
            ));
        }
        if !session.value("sql_mode").contains("STRICT_") {
            warnings.push(
                "sql_mode of the application's pool is not strict: the server cuts business values that do not fit, without an \
                 error; add STRICT_TRANS_TABLES"
                    .into(),
            );
        }
        let packet = self.max_packet();
        if packet < LEAST_PACKET {
            warnings.push(format!(
                "max_allowed_packet is {packet} bytes: an answer takes twice its size, so that one of 1 MiB cannot be kept; set \
                 it to at least {LEAST_PACKET}"
            ));
        }
        if session.is_on("innodb_snapshot_isolation") && session.keeps_snapshot() {
            warnings.push(
                "innodb_snapshot_isolation is ON in the application's pool: a handler that reads at REPEATABLE READ, and runs until its lease is renewed, \
                 cannot be settled (error 1020), and neither can its repeats; set it to OFF there, or let these sessions use READ \
                 COMMITTED"
                    .into(),
            );
        }
        if self.is_on("wsrep_on") {
            warnings.push("the server is part of a Galera cluster, on which idem-mysql was not tried".into());
        }
        warnings
    }
}

fn is_sound_mariadb((major, minor, patch): (u32, u32, u32)) -> bool {
    let of_series = OLDEST_MARIADB.into_iter().find(|oldest| (oldest.0, oldest.1) == (major, minor));
    let newest = OLDEST_MARIADB.into_iter().next_back();
    of_series.or(newest).is_some_and(|oldest| (major, minor, patch) >= oldest)
}

/// The numbers of a version, as in `10.11.19-MariaDB`. Old servers put `5.5.5-` before that.
fn numbers(version: &str) -> (u32, u32, u32) {
    let version = version.strip_prefix("5.5.5-").unwrap_or(version);
    let mut numbers = version.split(['.', '-']).map_while(|number| number.parse().ok());
    let mut next = || numbers.next().unwrap_or(0);
    (next(), next(), next())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(&str, &str)]) -> Settings {
        Settings(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn a_server_that_is_too_old_or_a_replica_is_refused() {
        let refused = ["10.10.7", "5.5.5-10.6.25", "10.11.14", "11.4.8", "11.5.2", "11.8.3", "12.0.2", "12.1.1"];
        let refused = refused.map(|version| format!("{version}-MariaDB-log"));
        for version in refused.iter().map(String::as_str).chain(["8.0.15", "5.7.44", ""]) {
            assert!(settings(&[("version", version)]).expect_suitable().is_err(), "{version}");
        }
        let sound = ["5.5.5-10.11.15", "10.11.19", "11.4.9", "11.8.4", "12.1.2", "12.2.1", "13.0.1"];
        let sound = sound.map(|version| format!("{version}-MariaDB-0+deb12u2"));
        for version in sound.iter().map(String::as_str).chain(["8.0.16", "8.4.0"]) {
            assert!(settings(&[("version", version)]).expect_suitable().is_ok(), "{version}");
            for value in ["ON", "1", "NO_LOCK"] {
                assert!(
                    settings(&[("version", version), ("read_only", value)]).expect_suitable().is_err(),
                    "{version}"
                );
            }
            assert!(settings(&[("version", version), ("read_only", "OFF")]).expect_suitable().is_ok(), "{version}");
        }
    }

    #[test]
    fn each_setting_that_may_lose_commits_is_named() {
        let safe = [
            ("innodb_flush_log_at_trx_commit", "1"),
            ("log_bin", "ON"),
            ("sync_binlog", "1"),
            ("innodb_doublewrite", "ON"),
        ];
        assert_eq!(settings(&safe).durability().durability, Durability::Power);
        let unsafe_settings = [
            ("innodb_flush_log_at_trx_commit", "2"),
            ("sync_binlog", "0"),
            ("innodb_doublewrite", "OFF"),
            ("innodb_doublewrite", "DETECT_ONLY"),
            ("innodb_flush_method", "nosync"),
        ];
        for (name, value) in unsafe_settings {
            let mut pairs: Vec<_> = safe.into_iter().filter(|(other, _)| *other != name).collect();
            pairs.push((name, value));
            let report = settings(&pairs).durability();
            assert_eq!(report.durability, Durability::Crash, "{name}");
            assert_eq!(report.reasons.len(), 1, "{report}");
            assert!(report.to_string().contains(name), "{report}");
        }
    }
}
