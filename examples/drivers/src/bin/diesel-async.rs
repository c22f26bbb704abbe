//! A payment by diesel-async that is safe to repeat: its transaction also settles the run.
//!
//! `DATABASE_URL=… diesel-async ORDER AMOUNT`

#![expect(missing_docs, reason = "the macro of diesel makes public items")]

use std::env;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use diesel::ExpressionMethods as _;
use diesel::sql_types::{Array, BigInt, Binary, Integer, Text};
use diesel_async::scoped_futures::ScopedFutureExt as _;
use diesel_async::{AsyncConnection as _, AsyncPgConnection, RunQueryDsl as _};
use idem_core::engine::{Context, Idempotency, Operation, RunError, Settings};
use idem_core::{Fingerprint, Scope};
use idem_postgres::{PostgresConfig, PostgresStore};

diesel::table! {
    payments (id) {
        id -> BigInt,
        amount -> BigInt,
    }
}

/// After a crash, the next run begins when the lease of the crashed one is over.
const LEASE: Duration = Duration::from_secs(3);
/// How long answers are kept, in seconds.
const RETENTION: i64 = 24 * 3600;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (Some(order), Some(amount), Ok(url)) = (env::args().nth(1), env::args().nth(2), env::var("DATABASE_URL"))
    else {
        return Err("usage: DATABASE_URL=postgres://USER@HOST/DATABASE diesel-async ORDER AMOUNT".into());
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
    let mut connection = AsyncPgConnection::establish(url).await?;
    connection
        .transaction(|connection| {
            async move {
                let insert = diesel::insert_into(payments::table).values(payments::columns::amount.eq(amount));
                let id: i64 = insert.returning(payments::columns::id).get_result(connection).await?;
                let paid = format!("payment {id}");
                // `run` stores a value as JSON with status 200. Repeats get what is settled here.
                let no_headers = Vec::<String>::new();
                let settle = diesel::sql_query(settle)
                    .bind::<Binary, _>(lease.id.as_bytes().as_slice())
                    .bind::<Binary, _>(lease.owner.as_bytes().as_slice())
                    .bind::<Text, _>("completed")
                    .bind::<Integer, _>(200)
                    .bind::<Array<Text>, _>(&no_headers)
                    .bind::<Array<Text>, _>(&no_headers)
                    .bind::<Binary, _>(serde_json::to_vec(&paid)?)
                    .bind::<BigInt, _>(RETENTION);
                // Fails if another run has the payment by now, and then nothing is committed.
                settle.execute(connection).await?;
                Ok(paid)
            }
            .scope_boxed()
        })
        .await
}
