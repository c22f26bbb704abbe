//! An id that the client chooses, as in `PUT /orders/{id}`: the resource itself is the record.

use sqlx::SqliteConnection;

/// The table.
pub const TABLE: &str = "CREATE TABLE orders (id TEXT NOT NULL PRIMARY KEY, item TEXT NOT NULL)";

/// What a PUT finds.
#[derive(Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "an HTTP handler maps each to a status")]
pub enum Put {
    /// 201: the order is new.
    Created,
    /// 200: it exists, and is the same. A repeat gets this.
    Unchanged,
    /// 409: another order has this id.
    Conflict,
}

/// Puts an order.
///
/// # Errors
/// When the database could not answer. Repeat it.
pub async fn put_order(connection: &mut SqliteConnection, id: &str, item: &str) -> Result<Put, sqlx::Error> {
    let insert = sqlx::query("INSERT INTO orders (id, item) VALUES (?, ?) ON CONFLICT DO NOTHING");
    if insert.bind(id).bind(item).execute(&mut *connection).await?.rows_affected() == 1 {
        return Ok(Put::Created);
    }
    let stored = sqlx::query_scalar::<_, String>("SELECT item FROM orders WHERE id = ?").bind(id);
    let stored = stored.fetch_one(connection).await?;
    Ok(if stored == item { Put::Unchanged } else { Put::Conflict })
}

#[cfg(test)]
mod tests {
    use sqlx::Connection as _;

    use super::*;

    #[tokio::test]
    async fn an_order_is_made_once() {
        let mut connection = SqliteConnection::connect("sqlite::memory:").await.unwrap();
        sqlx::raw_sql(TABLE).execute(&mut connection).await.unwrap();
        for expected in [Put::Created, Put::Unchanged] {
            assert_eq!(put_order(&mut connection, "5f0a", "pen").await.unwrap(), expected);
        }
        assert_eq!(put_order(&mut connection, "5f0a", "ink").await.unwrap(), Put::Conflict);
    }
}
