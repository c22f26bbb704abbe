//! An idempotency key: the client names the operation, and every repeat gets the first answer.

use idem_core::engine::{Idempotency, Operation, RunError};
use idem_core::{Fingerprint, Scope};
use idem_sqlite::SqliteTransaction;

/// The table.
pub const TABLE: &str = "CREATE TABLE payments (id INTEGER PRIMARY KEY, amount INTEGER NOT NULL)";

/// Pays, and returns the id of the payment: the same for every repeat, whatever else has been paid since.
///
/// # Errors
/// [`RunError`]; among others, `Mismatch` if the key was used for another amount.
pub async fn pay(idempotency: &Idempotency, key: &str, amount: i64) -> Result<i64, RunError<String>> {
    let key = key.parse().map_err(|error| RunError::Failed(format!("{error}")))?;
    let fingerprint = Fingerprint::of_bytes("pay", amount.to_string().as_bytes());
    let operation = Operation::new(Scope::new("acme", "pay"), key, fingerprint);
    let paid = idempotency.run(operation, move |context| async move {
        let mut transaction = context.transaction::<SqliteTransaction>().map_err(|error| error.to_string())?;
        let insert = sqlx::query("INSERT INTO payments (amount) VALUES (?)").bind(amount);
        let inserted = insert.execute(&mut **transaction).await.map_err(|error| error.to_string())?;
        Ok(inserted.last_insert_rowid())
    });
    Ok(paid.await?.value)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use idem_core::engine::Settings;
    use idem_sqlite::{SqliteConfig, SqliteStore};

    use super::*;

    #[tokio::test]
    async fn a_payment_is_made_once_and_its_repeat_gets_its_id() {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite://{}", folder.path().join("payments.db").display());
        let store = SqliteStore::open(SqliteConfig::new(url)).await.unwrap();
        sqlx::raw_sql(TABLE).execute(store.pool()).await.unwrap();
        let idempotency = Idempotency::transactional(Arc::new(store), Settings::new());
        let first = pay(&idempotency, "order-4711", 1250).await.unwrap();
        assert_ne!(pay(&idempotency, "order-4712", 1250).await.unwrap(), first);
        assert_eq!(pay(&idempotency, "order-4711", 1250).await.unwrap(), first);
        assert!(matches!(pay(&idempotency, "order-4711", 1).await, Err(RunError::Mismatch)));
    }
}
