//! Makes PgBouncer refuse clients.

use std::time::Duration;

use idem_servers::PgBouncer;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, PgConnection};
use tokio::time::sleep;

use crate::Error;

/// Disconnects all clients and refuses new ones. The console counts as a client, but is always admitted.
const FILL: [&str; 3] = ["SET max_client_conn = 1", "KILL postgres", "RESUME postgres"];
const EMPTY: &str = "SET max_client_conn = 500";

/// Fills PgBouncer for a while and returns the number of refused clients.
pub(super) async fn fill(pooler: &PgBouncer, lasts: Duration) -> Result<u64, Error> {
    // The console rejects session settings that it does not know.
    let options: PgConnectOptions = pooler.console().parse()?;
    let mut console = options.extra_float_digits(None).connect().await?;
    let before = refusals(pooler)?;
    for command in FILL {
        tell(&mut console, command).await?;
    }
    sleep(lasts).await;
    tell(&mut console, EMPTY).await?;
    Ok(refusals(pooler)? - before)
}

async fn tell(console: &mut PgConnection, command: &'static str) -> Result<(), Error> {
    sqlx::raw_sql(command).execute(console).await.map_err(|error| format!("{command}: {error}"))?;
    Ok(())
}

fn refusals(pooler: &PgBouncer) -> Result<u64, Error> {
    Ok(pooler.log()?.matches("no more connections allowed").count() as u64)
}
