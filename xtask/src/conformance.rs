//! `cargo xtask conformance`: checks stores against the state machine for longer than a test run.

use std::error::Error;

use crate::command::{self, cargo};
use crate::servers::Servers;

/// The common prefix of the state-machine tests.
const TESTS: &str = "the_store_follows_the_model";

/// How many cases, and which store.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Number of random sequences of verbs for each setup of a store (`IDEM_CASES`).
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(1..))]
    cases: u32,
    /// The store to test. Default: redis and postgres.
    #[arg(long, value_enum)]
    store: Option<Store>,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Store {
    Redis,
    Postgres,
    Sqlite,
    Hybrid,
    All,
}

/// Runs the state-machine tests of the stores, with the servers that tests share.
pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let packages: &[&str] = match options.store {
        None => &["idem-redis", "idem-postgres"],
        Some(Store::Redis) => &["idem-redis"],
        Some(Store::Postgres) => &["idem-postgres"],
        Some(Store::Sqlite) => &["idem-sqlite"],
        Some(Store::Hybrid) => &["idem-hybrid"],
        Some(Store::All) => &["idem-redis", "idem-postgres", "idem-sqlite", "idem-hybrid"],
    };
    let servers = Servers::start()?;
    println!("{} sequences of verbs each", options.cases);
    for package in packages {
        let mut tests = cargo(&["test", "-p", package, "--test", "store", "--", TESTS]);
        command::run(servers.announce(tests.env("IDEM_CASES", options.cases.to_string())))?;
    }
    Ok(())
}
