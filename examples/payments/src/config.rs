//! The command line.

use std::net::SocketAddr;

use clap::{Parser, ValueEnum};

/// A payments API that survives retries: the same Idempotency-Key moves money once.
///
/// Every flag can also be set by the environment variable that is named with it.
#[derive(Debug, Clone, Parser)]
#[command(name = "payments", version)]
pub(crate) struct Config {
    /// Address to listen on; port 0 takes a free one.
    #[arg(long, env = "PAYMENTS_LISTEN", default_value = "127.0.0.1:8080")]
    pub(crate) listen: SocketAddr,
    /// Where the idempotency records are, and under the transactional contract the payments too.
    #[arg(long, env = "PAYMENTS_STORE", default_value = "sqlite://payments.db")]
    pub(crate) store: String,
    /// What is promised across a crash.
    #[arg(long, env = "PAYMENTS_CONTRACT", value_enum, default_value_t = ContractName::Transactional)]
    pub(crate) contract: ContractName,
    /// Where the payments are under the other contracts.
    #[arg(long, env = "PAYMENTS_LEDGER", default_value = "sqlite://ledger.db")]
    pub(crate) ledger: String,
    /// How long a crashed request can hold its key.
    #[arg(long, env = "PAYMENTS_LEASE_MS", default_value_t = 30_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) lease_ms: u64,
    /// How long answers are kept.
    #[arg(long, env = "PAYMENTS_RETENTION_S", default_value_t = 24 * 60 * 60, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) retention_s: u64,
    /// How long a duplicate waits for the first answer when the client does not say.
    #[arg(long, env = "PAYMENTS_WAIT_MS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=30_000))]
    pub(crate) wait_ms: u64,
    /// The largest request body in bytes.
    #[arg(long, env = "PAYMENTS_BODY_LIMIT", default_value_t = 1024 * 1024)]
    pub(crate) body_limit: usize,
    /// The largest answer that is stored, in bytes.
    #[arg(long, env = "PAYMENTS_STORED_LIMIT", default_value_t = 1024 * 1024)]
    pub(crate) stored_limit: usize,
    /// Obey the request header X-Simulate, for tests.
    #[arg(long, env = "PAYMENTS_SIMULATE", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) simulate: bool,
}

/// The contracts by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ContractName {
    /// Payment, ledger row and answer commit in one transaction.
    Transactional,
    /// A crash makes the outcome unknown; nothing runs twice.
    AtMostOnce,
    /// A crash makes the next retry run again.
    AtLeastOnce,
}
