//! Messages of a broker: the id of the message and what it changes commit together.

use sqlx::{Connection as _, SqliteConnection};

/// The tables: ids of handled messages, and business data.
pub const TABLES: &str = "
    CREATE TABLE handled_messages (id TEXT NOT NULL PRIMARY KEY);
    CREATE TABLE stock (item TEXT NOT NULL PRIMARY KEY, count INTEGER NOT NULL)";

/// Handles a message. Returns whether it was new. Acknowledge it to the broker afterwards, in either case.
///
/// The broker needs no answer, so nothing else is stored.
///
/// # Errors
/// When the database could not answer. Do not acknowledge the message: the broker delivers it again.
pub async fn deliver(connection: &mut SqliteConnection, id: &str, item: &str) -> Result<bool, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    let insert = sqlx::query("INSERT INTO handled_messages (id) VALUES (?) ON CONFLICT DO NOTHING").bind(id);
    let is_new = insert.execute(&mut *transaction).await?.rows_affected() == 1;
    if is_new {
        let update = sqlx::query("UPDATE stock SET count = count - 1 WHERE item = ?").bind(item);
        update.execute(&mut *transaction).await?;
    }
    transaction.commit().await?;
    Ok(is_new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_message_counts_once() {
        let mut connection = SqliteConnection::connect("sqlite::memory:").await.unwrap();
        sqlx::raw_sql(TABLES).execute(&mut connection).await.unwrap();
        sqlx::raw_sql("INSERT INTO stock VALUES ('pen', 7)").execute(&mut connection).await.unwrap();
        assert!(deliver(&mut connection, "m-1", "pen").await.unwrap());
        assert!(!deliver(&mut connection, "m-1", "pen").await.unwrap());
        let count = sqlx::query_scalar::<_, i64>("SELECT count FROM stock").fetch_one(&mut connection).await.unwrap();
        assert_eq!(count, 6);
    }
}
