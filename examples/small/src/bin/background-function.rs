//! An import without HTTP, on SQLite: a file that is imported again changes nothing.
//!
//! Each line is an operation, and its order number is the key. So an import that was interrupted can be started again, and two
//! imports at once import each line once.
//!
//! ```sh
//! printf 'order-1,1250\norder-2,300\n' | cargo run -p small --bin background-function -- shop.db
//! ```

use std::env;
use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use idem_core::engine::{Idempotency, Operation, RunError, Settings};
use idem_core::{Fingerprint, Scope};
use idem_sqlite::{SqliteConfig, SqliteStore, SqliteTransaction};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let file = env::args().nth(1).ok_or("name the database, as in: background-function shop.db")?;
    let store = SqliteStore::open(SqliteConfig::new(format!("sqlite://{file}"))).await?;
    let table = "CREATE TABLE IF NOT EXISTS orders (number TEXT NOT NULL, amount INTEGER NOT NULL)";
    sqlx::raw_sql(table).execute(store.pool()).await?;
    // A repeat waits for the first run, up to ten seconds.
    let settings = Settings::new().wait(Duration::from_secs(10)).max_wait(Duration::from_secs(10));
    let idempotency = Idempotency::transactional(Arc::new(store), settings);

    let (mut imported, mut known) = (0, 0);
    for line in io::stdin().lines() {
        let line = line?;
        let (number, amount) = line.split_once(',').ok_or_else(|| format!("{line:?} is not NUMBER,AMOUNT"))?;
        let amount: i64 = amount.parse().map_err(|_| format!("{line:?} has no whole amount"))?;
        match import(&idempotency, number, amount).await {
            Ok(true) => imported += 1,
            Ok(false) => known += 1,
            Err(RunError::Mismatch) => eprintln!("{number} was imported with another amount, and stays as it is"),
            Err(error) => return Err(error.into()),
        }
    }
    println!("{imported} imported, {known} imported before");
    idempotency.shutdown(Duration::from_secs(25)).await?;
    Ok(())
}

/// Imports an order, and returns whether it ran now.
async fn import(idempotency: &Idempotency, number: &str, amount: i64) -> Result<bool, RunError<String>> {
    // A key has up to 255 characters of visible ASCII.
    let key = number.parse().map_err(|error| RunError::Failed(format!("{number:?} cannot be a key: {error}")))?;
    let fingerprint = Fingerprint::of_bytes("import", amount.to_string().as_bytes());
    let operation = Operation::new(Scope::new("shop", "import"), key, fingerprint);
    let number = number.to_owned();
    let run = idempotency.run(operation, move |context| async move {
        // The order commits together with the record of its import, or not at all.
        let mut transaction = context.transaction::<SqliteTransaction>().map_err(|error| error.to_string())?;
        let insert = sqlx::query("INSERT INTO orders (number, amount) VALUES (?, ?)").bind(number).bind(amount);
        insert.execute(&mut **transaction).await.map(drop).map_err(|error| error.to_string())
    });
    Ok(!run.await?.replayed)
}
