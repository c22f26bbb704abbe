//! Runs the conformance suites of the stores, and the tests of Postgres's hostile role, on this machine against servers in
//! containers.

use std::path::Path;

use idem_servers::{
    PGBOUNCER_VARIABLE, POSTGRES_VARIABLE, REDIS_CLUSTER_VARIABLE, REDIS_SENTINEL_VARIABLE, REDIS_VARIABLE,
};
use tokio::process::Command;

use crate::Error;
use crate::servers::Servers;

/// The packages and their tests. Tests that need a private server start it as a process of this machine; `cargo xtask test` and
/// `cargo xtask conformance` run those.
const SUITES: [(&str, &[&str]); 4] = [
    ("idem-postgres", &["conformance::"]),
    ("idem-postgres", &["roles::"]),
    ("idem-redis", &["conformance::", "--skip", "the_store_follows_the_model"]),
    ("idem-hybrid", &["conformance::"]),
];

/// Runs all suites one after the other, even if one fails.
pub(crate) async fn run(servers: &Servers) -> Result<(), Error> {
    let variables = [
        (POSTGRES_VARIABLE, format!("postgres://postgres@{}/postgres", servers.postgres.socket(5432).await?)),
        (PGBOUNCER_VARIABLE, format!("postgres://postgres@{}/postgres", servers.narrow_pgbouncer.socket(5432).await?)),
        (REDIS_VARIABLE, format!("redis://{}", servers.redis.socket(6379).await?)),
        (REDIS_SENTINEL_VARIABLE, servers.sentinel.url().to_owned()),
        (REDIS_CLUSTER_VARIABLE, servers.cluster.url().to_owned()),
    ];
    for (variable, url) in &variables {
        println!("{variable}={url}");
    }
    println!("Postgres: {}", servers.postgres.output_of(&["postgres", "--version"]).await?);
    println!("Redis: {}", servers.redis.output_of(&["redis-server", "--version"]).await?);
    let mut failed = Vec::new();
    for (package, tests) in SUITES {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["test", "-p", package, "--test", "store", "--"]).args(tests);
        cargo.current_dir(Path::new(env!("CARGO_MANIFEST_DIR"))).envs(variables.iter().cloned()).kill_on_drop(true);
        println!("> cargo test -p {package} --test store -- {}", tests.join(" "));
        if !cargo.status().await?.success() {
            failed.push(format!("{package} {}", tests.join(" ")));
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join(", ").into()) }
}
