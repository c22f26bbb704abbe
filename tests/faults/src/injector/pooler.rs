//! A PgBouncer that takes no more clients.

use std::time::Duration;

use idem_servers::PgBouncer;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, PgConnection};
use tokio::time::sleep;

use crate::Error;

/// Turns away those that it has, and all that come. Its console counts as one client itself, and is let in all the same.
const FILL: [&str; 3] = ["SET max_client_conn = 1", "KILL postgres", "RESUME postgres"];
const EMPTY: &str = "SET max_client_conn = 500";

/// Says how often somebody was turned away.
pub(super) async fn fill(pooler: &PgBouncer, lasts: Duration) -> Result<u64, Error> {
    // It takes no settings of a session that it does not know.
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
