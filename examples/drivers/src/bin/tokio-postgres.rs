//! A payment by tokio-postgres that is safe to repeat: its transaction also settles the run.
//!
//! `DATABASE_URL=… tokio-postgres ORDER AMOUNT`

use std::env;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use idem_core::engine::{Context, Idempotency, Operation, RunError, Settings};
use idem_core::{Fingerprint, Scope};
use idem_postgres::{PostgresConfig, PostgresStore};
use tokio_postgres::NoTls;

/// After a crash, the next run begins when the lease of the crashed one is over.
const LEASE: Duration = Duration::from_secs(3);
/// How long answers are kept, in seconds.
const RETENTION: i64 = 24 * 3600;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (Some(order), Some(amount), Ok(url)) = (env::args().nth(1), env::args().nth(2), env::var("DATABASE_URL"))
    else {
        return Err("usage: DATABASE_URL=postgres://USER@HOST/DATABASE tokio-postgres ORDER AMOUNT".into());
    };
    let store = Arc::new(PostgresStore::open(PostgresConfig::new(&url)).await?);
    let settle = store.settle_run_sql();
    let idempotency = Idempotency::at_least_once(store, Settings::new().lease(LEASE));
    let fingerprint = Fingerprint::of_bytes("pay", amount.as_bytes());
    let operation = Operation::new(Scope::new("acme", "pay"), order.parse()?, fingerprint);
    let amount = amount.parse()?;
    let paid = loop {
        let (url, settle) = (url.clone(), settle.clone());
        let run = move |context| async move {
            let paid = pay(&context, &url, &settle, amount).await;
            paid.map_err(|error| error.to_string())
        };
        match idempotency.run(operation.clone(), run).await {
            Err(RunError::InProgress { retry_after } | RunError::Backoff { retry_after }) => {
                tokio::time::sleep(retry_after).await;
            }
            paid => break paid?,
        }
    };
    println!("{}", paid.value);
    idempotency.shutdown(Duration::from_secs(10)).await?;
    Ok(())
}

async fn pay(context: &Context, url: &str, settle: &str, amount: i64) -> Result<String, Box<dyn Error + Send + Sync>> {
    let lease = context.lease().ok_or("the store could not protect the payment")?;
    let (mut client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    let transaction = client.transaction().await?;
    let insert = "INSERT INTO payments (amount) VALUES ($1) RETURNING id";
    let id: i64 = transaction.query_one(insert, &[&amount]).await?.get(0);
    let paid = format!("payment {id}");
    // `run` stores a value as JSON with status 200. Repeats get what is settled here.
    let (record, owner, body) =
        (lease.id.as_bytes().as_slice(), lease.owner.as_bytes().as_slice(), serde_json::to_vec(&paid)?);
    let (kind, status, headers) = ("completed", 200_i32, Vec::<&str>::new());
    // Fails if another run has the payment by now, and then nothing is committed.
    transaction.execute(settle, &[&record, &owner, &kind, &status, &headers, &headers, &body, &RETENTION]).await?;
    transaction.commit().await?;
    Ok(paid)
}
