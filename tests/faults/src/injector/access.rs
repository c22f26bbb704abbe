//! Takes logins and privileges in a store away from the services for a while.

use std::time::Duration;

use idem_servers::redis_command;
use sqlx::{Connection, PgConnection};
use tokio::time::{Instant, sleep};

use crate::Error;
use crate::world::{PASSWORD, USER};

/// Two ways to lock the services out. Neither ends existing sessions.
const LOCK_OUT: [&str; 2] = ["ALTER ROLE payments NOLOGIN", "ALTER ROLE payments PASSWORD 'second'"];
const LET_IN: &str = "ALTER ROLE payments LOGIN PASSWORD 'first'";
const END_SESSIONS: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'payments'";

/// Privileges to revoke, each with the statement that grants it back. The services own these objects, so they need no initial
/// grant. Every role may call functions by default.
const PRIVILEGES: [[&str; 2]; 3] = [
    ["REVOKE ALL ON ALL TABLES IN SCHEMA idem FROM payments", "GRANT ALL ON ALL TABLES IN SCHEMA idem TO payments"],
    [
        "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA idem FROM PUBLIC, payments",
        "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA idem TO PUBLIC, payments",
    ],
    ["REVOKE ALL ON SCHEMA idem FROM payments", "GRANT ALL ON SCHEMA idem TO payments"],
];

/// Rights of the Redis user to take away.
const RULES: [&[&str]; 3] = [&["-evalsha", "-eval"], &["-@write"], &["resetkeys"]];
const ALL_RULES: [&str; 2] = ["+@all", "allkeys"];

/// Ends the sessions of the services on MariaDB. Returns how many there were.
pub(super) async fn end_mariadb_sessions(mariadb: &idem_servers::MariaDb) -> Result<u64, Error> {
    let mut connection = sqlx::MySqlConnection::connect(&mariadb.url()).await?;
    let sessions: Vec<i64> =
        sqlx::query_scalar("SELECT CAST(id AS SIGNED) FROM information_schema.processlist WHERE user = 'payments'")
            .fetch_all(&mut connection)
            .await?;
    let mut ended = 0;
    for session in sessions {
        // It may have ended meanwhile.
        let kill = sqlx::raw_sql(sqlx::AssertSqlSafe(format!("KILL {session}"))).execute(&mut connection).await;
        ended += u64::from(kill.is_ok());
    }
    Ok(ended)
}

/// Locks the services out of Postgres for a while. Returns the number of refusals.
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

/// Revokes a privilege in Postgres for a while. Returns the number of refusals.
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

/// Counts the refusals in the log of Postgres.
fn refusals(postgres: &idem_servers::Postgres) -> Result<u64, Error> {
    const SIGNS: [&str; 3] = ["password authentication failed", "is not permitted to log in", "permission denied"];
    let log = postgres.log()?;
    Ok(SIGNS.iter().map(|sign| log.matches(sign).count() as u64).sum())
}

/// How much longer than planned Redis may refuse. Services whose breaker is open ask it again only after up to 10 s, and a
/// fault that no service met would show nothing.
const LONGEST_WAIT: Duration = Duration::from_secs(15);

/// Changes the services' password in Redis for a while. Returns the number of refusals.
pub(super) async fn rotate_redis(port: u16, lasts: Duration) -> Result<u64, Error> {
    redis_command(port, &["ACL", "LOG", "RESET"])?;
    redis_command(port, &["ACL", "SETUSER", USER, "resetpass", ">second"])?;
    redis_command(port, &["CLIENT", "KILL", "USER", USER])?;
    let stayed = stay_until_refused(port, lasts).await;
    redis_command(port, &["ACL", "SETUSER", USER, "resetpass", &format!(">{PASSWORD}")])?;
    stayed?;
    refusals_of_redis(port)
}

/// Takes rights from the services' user of Redis for a while. Returns the number of refusals.
pub(super) async fn revoke_redis(port: u16, way: usize, lasts: Duration) -> Result<u64, Error> {
    redis_command(port, &["ACL", "LOG", "RESET"])?;
    redis_command(port, &[&["ACL", "SETUSER", USER], RULES[way % RULES.len()]].concat())?;
    let stayed = stay_until_refused(port, lasts).await;
    redis_command(port, &[&["ACL", "SETUSER", USER][..], &ALL_RULES].concat())?;
    stayed?;
    refusals_of_redis(port)
}

/// Waits for the planned time, and then until Redis has refused something, within [`LONGEST_WAIT`].
async fn stay_until_refused(port: u16, planned: Duration) -> Result<(), Error> {
    sleep(planned).await;
    let over = Instant::now() + LONGEST_WAIT;
    while refusals_of_redis(port)? == 0 && Instant::now() < over {
        sleep(Duration::from_millis(200)).await;
    }
    Ok(())
}

/// Counts the refusals in the ACL log of Redis, which merges similar ones into one entry.
fn refusals_of_redis(port: u16) -> Result<u64, Error> {
    Ok(redis_command(port, &["ACL", "LOG"])?.items().len() as u64)
}
