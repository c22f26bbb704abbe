//! What the services may do in a store: their login, and their privileges. Each of these is taken away for a while.

use std::time::Duration;

use idem_servers::redis_command;
use sqlx::{Connection, PgConnection};
use tokio::time::sleep;

use crate::Error;
use crate::world::{PASSWORD, USER};

/// How the services cannot log in any more. Sessions do not end by that.
const LOCK_OUT: [&str; 2] = ["ALTER ROLE payments NOLOGIN", "ALTER ROLE payments PASSWORD 'second'"];
const LET_IN: &str = "ALTER ROLE payments LOGIN PASSWORD 'first'";
const END_SESSIONS: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'payments'";

/// What is taken away, and how it is given back. The services own all of it, and so have it without being granted anything;
/// everybody may call functions unless somebody says otherwise.
const PRIVILEGES: [[&str; 2]; 3] = [
    ["REVOKE ALL ON ALL TABLES IN SCHEMA idem FROM payments", "GRANT ALL ON ALL TABLES IN SCHEMA idem TO payments"],
    [
        "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA idem FROM PUBLIC, payments",
        "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA idem TO PUBLIC, payments",
    ],
    ["REVOKE ALL ON SCHEMA idem FROM payments", "GRANT ALL ON SCHEMA idem TO payments"],
];

/// The same of the user of Redis.
const RULES: [&[&str]; 3] = [&["-evalsha", "-eval"], &["-@write"], &["resetkeys"]];
const ALL_RULES: [&str; 2] = ["+@all", "allkeys"];

/// Says how often somebody was turned away.
pub(super) async fn rotate_postgres(
    postgres: &idem_servers::Postgres,
    way: usize,
    lasts: Duration,
) -> Result<u64, Error> {
    let before = refusals(postgres)?;
    tell(postgres, LOCK_OUT[way % LOCK_OUT.len()]).await?;
    tell(postgres, END_SESSIONS).await?;
    sleep(lasts).await;
    tell(postgres, LET_IN).await?;
    Ok(refusals(postgres)? - before)
}

/// Says how often somebody was turned away.
pub(super) async fn revoke_postgres(
    postgres: &idem_servers::Postgres,
    way: usize,
    lasts: Duration,
) -> Result<u64, Error> {
    let before = refusals(postgres)?;
    let [revoke, grant] = PRIVILEGES[way % PRIVILEGES.len()];
    tell(postgres, revoke).await?;
    sleep(lasts).await;
    tell(postgres, grant).await?;
    Ok(refusals(postgres)? - before)
}

async fn tell(postgres: &idem_servers::Postgres, sql: &'static str) -> Result<(), Error> {
    sqlx::raw_sql(sql).execute(&mut PgConnection::connect(&postgres.url()).await?).await?;
    Ok(())
}

/// As its log counts them.
fn refusals(postgres: &idem_servers::Postgres) -> Result<u64, Error> {
    const SIGNS: [&str; 3] = ["password authentication failed", "is not permitted to log in", "permission denied"];
    let log = postgres.log()?;
    Ok(SIGNS.iter().map(|sign| log.matches(sign).count() as u64).sum())
}

/// Says how often somebody was turned away.
pub(super) async fn rotate_redis(port: u16, lasts: Duration) -> Result<u64, Error> {
    redis_command(port, &["ACL", "LOG", "RESET"])?;
    redis_command(port, &["ACL", "SETUSER", USER, "resetpass", ">second"])?;
    redis_command(port, &["CLIENT", "KILL", "USER", USER])?;
    sleep(lasts).await;
    redis_command(port, &["ACL", "SETUSER", USER, "resetpass", &format!(">{PASSWORD}")])?;
    refusals_of_redis(port)
}

/// Says how often somebody was turned away.
pub(super) async fn revoke_redis(port: u16, way: usize, lasts: Duration) -> Result<u64, Error> {
    redis_command(port, &["ACL", "LOG", "RESET"])?;
    redis_command(port, &[&["ACL", "SETUSER", USER], RULES[way % RULES.len()]].concat())?;
    sleep(lasts).await;
    redis_command(port, &[&["ACL", "SETUSER", USER][..], &ALL_RULES].concat())?;
    refusals_of_redis(port)
}

/// Those that are alike are one entry.
fn refusals_of_redis(port: u16) -> Result<u64, Error> {
    Ok(redis_command(port, &["ACL", "LOG"])?.items().len() as u64)
}
