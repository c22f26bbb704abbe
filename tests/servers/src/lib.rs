//! Real servers for tests. Private servers are [`Postgres`], [`PgBouncer`], [`PostgresPair`] (a primary with a standby),
//! [`Redis`], [`RedisSentinel`] (a group with Sentinels), [`RedisCluster`],
//! [`MariaDb`], [`DynamoDb`] (emulators), [`Nats`], [`RabbitMq`] and [`Prometheus`].
//!
//! Each server has its own folder and port, and both are gone when its value is dropped. It does not outlive the process that
//! started it, however that process ends: a small shell waits for the end of a pipe that only this process holds.
//!
//! Tests that share a server take [`postgres_url`], [`pgbouncer_url`], [`redis_url`], [`redis_sentinel_url`] and
//! [`redis_cluster_url`]; `cargo xtask test` starts these servers. Tests that stop, kill or pause a server start their own:
//!
//! ```no_run
//! # fn main() -> Result<(), idem_servers::Error> {
//! let mut postgres = idem_servers::Postgres::start()?;
//! println!("{} at {}", postgres.version(), postgres.url());
//! postgres.kill()?;
//! postgres.start_again()?;
//! # Ok(())
//! # }
//! ```

mod account;
mod broker;
mod clock;
mod container;
mod dynamodb;
mod error;
mod keeper;
mod mariadb;
mod nats;
mod pgbouncer;
mod port;
mod postgres;
mod processes;
mod programs;
mod prometheus;
mod rabbitmq;
mod redis;
mod server;
pub mod setup;
mod upstream;

pub use clock::Clock;
pub use dynamodb::DynamoDb;
pub use error::Error;
pub use mariadb::MariaDb;
pub use nats::Nats;
pub use pgbouncer::PgBouncer;
pub use postgres::{Postgres, PostgresPair, PostgresTemplate};
pub use programs::find as find_program;
pub use prometheus::{Prometheus, promtool};
pub use rabbitmq::RabbitMq;
pub use redis::redis_expire_sooner;
pub use redis::{ClusterPrimary, Redis, RedisAddress, RedisCluster, RedisSentinel, Reply, redis_command};

/// The environment variable with the URL of the server that all tests share.
pub const POSTGRES_VARIABLE: &str = "IDEM_TEST_POSTGRES";

/// The environment variable with the path of a [`PostgresTemplate`], which private servers copy.
pub const TEMPLATE_VARIABLE: &str = "IDEM_TEST_POSTGRES_TEMPLATE";

/// The environment variable with the URL of the shared server's database behind PgBouncer.
pub const PGBOUNCER_VARIABLE: &str = "IDEM_TEST_PGBOUNCER";

/// The environment variable with the URL of the Redis server that all tests share.
pub const REDIS_VARIABLE: &str = "IDEM_TEST_REDIS";

/// The environment variable with the URL of the Sentinels that all tests share.
pub const REDIS_SENTINEL_VARIABLE: &str = "IDEM_TEST_REDIS_SENTINEL";

/// The environment variable with the URL of the Redis Cluster that all tests share.
pub const REDIS_CLUSTER_VARIABLE: &str = "IDEM_TEST_REDIS_CLUSTER";

/// The URL of the Postgres server that all tests of a run share.
///
/// # Panics
///
/// If no server was started for this run: a test that needs one never passes without it.
#[must_use]
pub fn postgres_url() -> String {
    shared(POSTGRES_VARIABLE)
}

/// The URL of the shared server's database through PgBouncer, in transaction mode with a pool of two connections.
///
/// # Panics
///
/// If no server was started for this run: a test that needs one never passes without it.
#[must_use]
pub fn pgbouncer_url() -> String {
    shared(PGBOUNCER_VARIABLE)
}

/// The URL of the Redis server that all tests of a run share. They share its keys too, so each test needs its own key prefix.
///
/// # Panics
///
/// If no server was started for this run: a test that needs one never passes without it.
#[must_use]
pub fn redis_url() -> String {
    shared(REDIS_VARIABLE)
}

/// The URL of the Sentinels that all tests of a run share, in the form of [`RedisSentinel::url`].
///
/// A test that makes them replace their primary starts its own.
///
/// # Panics
///
/// If no Sentinels were started for this run: a test that needs them never passes without them.
#[must_use]
pub fn redis_sentinel_url() -> String {
    shared(REDIS_SENTINEL_VARIABLE)
}

/// The URL of the Redis Cluster that all tests of a run share, in the form of [`RedisCluster::url`].
///
/// A test that moves its slots or replaces its primaries starts its own.
///
/// # Panics
///
/// If no cluster was started for this run: a test that needs one never passes without it.
#[must_use]
pub fn redis_cluster_url() -> String {
    shared(REDIS_CLUSTER_VARIABLE)
}

fn shared(variable: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| {
        panic!(
            "{variable} is not set: run `cargo xtask test`, or `cargo xtask with-servers cargo test -p {}`",
            // Cargo sets it for the running test, so that the advice can be copied.
            std::env::var("CARGO_PKG_NAME").unwrap_or_else(|_| "<crate>".into())
        )
    })
}
