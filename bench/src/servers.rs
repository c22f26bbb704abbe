//! The servers of a run.

use idem_servers::{MariaDb, Postgres, Redis};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection};

use crate::error::Error;

/// Fully durable, as a production server is. The larger values allow many connections, and keep checkpoints from falling into
/// some turns only.
const POSTGRES: [&str; 4] =
    ["max_connections=400", "shared_buffers=1GB", "max_wal_size=16GB", "checkpoint_timeout=30min"];

/// A cache has no persistence, and neither has its rival.
const REDIS: [&str; 4] = ["--save", "", "--appendonly", "no"];

pub(crate) fn postgres() -> Result<Postgres, Error> {
    let server = Postgres::start_with(&POSTGRES)?;
    println!("{} ({}), {}", server.version(), server.origin(), POSTGRES.join(", "));
    Ok(server)
}

/// As durable as Postgres is, by its defaults.
pub(crate) fn mariadb() -> Result<MariaDb, Error> {
    let server = MariaDb::start_with(&["--innodb-buffer-pool-size=1G"])?;
    println!("{} ({}), a buffer pool of 1 GiB", server.version(), server.origin());
    Ok(server)
}

pub(crate) fn redis() -> Result<Redis, Error> {
    let server = Redis::start_with(&REDIS)?;
    println!("{} ({}), without persistence", server.version(), server.origin());
    Ok(server)
}

/// A connection that belongs to no store.
pub(crate) async fn connect(server: &Postgres) -> Result<PgConnection, Error> {
    Ok(server.url().parse::<PgConnectOptions>()?.disable_statement_logging().connect().await?)
}

pub(crate) async fn run(connection: &mut PgConnection, sql: &str) -> Result<(), Error> {
    // One statement at a time, because VACUUM and CHECKPOINT cannot be in a transaction with others.
    for statement in sql.split(";\n").filter(|statement| !statement.trim().is_empty()) {
        sqlx::raw_sql(AssertSqlSafe(statement.to_owned())).execute(&mut *connection).await?;
    }
    Ok(())
}
