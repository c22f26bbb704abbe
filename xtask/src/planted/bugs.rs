//! The bugs, and who has to notice each.

/// One bug.
pub(super) struct Bug {
    /// As `planted!` has it.
    pub(super) name: &'static str,
    /// The suites that are to notice it, by their names.
    pub(super) suites: &'static [&'static str],
    /// Whether tests may wait for ever because of it.
    pub(super) hangs: bool,
}

const fn bug(name: &'static str, suites: &'static [&'static str]) -> Bug {
    Bug { name, suites, hangs: false }
}

/// All of them. A new one joins by its line here.
pub(super) const BUGS: &[Bug] = &[
    bug("no-owner-check-in-settle", &["machine", "memory", "postgres", "redis"]),
    bug("no-owner-check-in-renew", &["machine", "memory", "postgres", "redis"]),
    bug("no-owner-check-in-checkpoint", &["machine", "memory", "postgres", "redis"]),
    bug("lease-equal-to-retention", &["machine", "memory", "postgres", "redis", "system"]),
    bug("release-on-5xx", &["http", "sockets"]),
    bug("application-clock-for-expiry", &["postgres"]),
    bug("acquire-without-its-loop", &["postgres-races"]),
    bug("scope-left-out-of-the-id", &["identity", "axum", "actix"]),
    bug("numbers-through-f64", &["fingerprint", "http", "sockets"]),
    bug("set-cookie-stored", &["http", "actix", "sockets"]),
    bug("answer-before-the-commit", &["axum", "actix", "sqlite-engine"]),
    bug("fail-open-on-a-store-error", &["engine", "axum", "system"]),
    bug("redis-miss-trusted", &["hybrid", "hybrid-front", "hybrid-lies"]),
    bug("no-evalsha-fallback", &["redis-scripts"]),
    bug("no-task-of-its-own", &["engine", "axum", "actix", "system"]),
    bug("cancelled-begin-returned-to-the-pool", &["postgres-sweep"]),
    bug("waiter-does-not-look-again", &["engine", "axum"]),
    bug("oversized-body-runs-again", &["http", "axum", "actix", "sockets"]),
    bug("fast-lock-outlives-its-owner", &["hybrid-front", "hybrid-lies"]),
    bug("attempt-does-not-grow", &["machine", "memory", "postgres", "redis"]),
    bug("renewal-revives-a-settled-record", &["machine", "memory", "postgres", "redis"]),
    bug("fingerprint-not-compared", &["machine", "memory", "postgres", "redis"]),
    bug("downstream-key-of-the-attempt", &["engine"]),
    bug("secret-ignored", &["identity"]),
    bug("tombstone-without-its-status", &["http", "axum", "actix"]),
    bug("answer-before-the-settlement", &["engine", "axum"]),
    bug("rejection-keeps-its-writes", &["http", "axum"]),
    bug("purge-takes-what-is-live", &["postgres"]),
    bug("commit-over-somebody-elses-record", &["postgres-transactions"]),
    bug("guard-without-its-lock", &["postgres-guard"]),
    bug("unconfirmed-look", &["postgres-standby"]),
    bug("lost-answer-counts-as-nothing", &["postgres-lost"]),
    bug("key-ends-with-its-lease", &["redis-records"]),
    bug("unreadable-record-counts-as-none", &["redis-records"]),
    bug("copy-outlives-its-record", &["hybrid-front", "hybrid-lies"]),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::command::workspace;
    use crate::planted::suites::SUITES;

    /// Every name that stands in a `planted!` of the published crates.
    fn planted(folder: &Path, names: &mut BTreeSet<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                planted(&path, names);
            } else if path.extension().is_some_and(|extension| extension == "rs")
                && !path.ends_with("idem-core/src/planted.rs")
            {
                names.extend(names_in(&fs::read_to_string(path).unwrap()));
            }
        }
    }

    /// In the order of a macro's words the name is the first string of lower-case words with hyphens.
    fn names_in(text: &str) -> Vec<String> {
        let is_name = |word: &&str| {
            word.contains('-')
                && word.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-' || byte.is_ascii_digit())
        };
        let first = |part: &str| part.split('"').skip(1).step_by(2).find(is_name).map(str::to_owned);
        let texts = |part: &str| {
            let lines = part.lines().filter(|line| line.trim_end().ends_with("\":"));
            lines.filter_map(first).collect::<Vec<_>>()
        };
        let calls = text.split("planted!(").skip(1);
        calls.flat_map(|call| texts(call).into_iter().chain(first(call))).collect()
    }

    #[test]
    fn every_bug_that_is_planted_is_in_the_table_and_the_other_way_round() {
        let mut names = BTreeSet::new();
        for entry in fs::read_dir(workspace().join("crates")).unwrap() {
            planted(&entry.unwrap().path().join("src"), &mut names);
        }
        assert!(names.remove("next-format"), "a version to come, and no bug");
        let table: BTreeSet<String> = BUGS.iter().map(|bug| bug.name.to_owned()).collect();
        assert_eq!(names, table);
        assert_eq!(table.len(), BUGS.len(), "a bug is there twice");
    }

    #[test]
    fn every_suite_is_one_and_notices_something() {
        let named: BTreeSet<&str> = BUGS.iter().flat_map(|bug| bug.suites.iter().copied()).collect();
        assert_eq!(named, SUITES.iter().map(|suite| suite.name).collect());
        assert!(BUGS.iter().all(|bug| !bug.suites.is_empty()));
    }
}
