//! A unique constraint: the data itself says what is a duplicate.

use sqlx::SqliteConnection;

/// The table. One account has one address.
pub const TABLE: &str = "CREATE TABLE accounts (address TEXT NOT NULL PRIMARY KEY, name TEXT NOT NULL)";

/// Signs up. Returns whether the account is new.
///
/// A repeat cannot tell whether it was the first, and another person's account with this address looks the same.
///
/// # Errors
/// When the database could not answer. Repeat it.
pub async fn sign_up(connection: &mut SqliteConnection, address: &str, name: &str) -> Result<bool, sqlx::Error> {
    let insert = sqlx::query("INSERT INTO accounts (address, name) VALUES (?, ?) ON CONFLICT DO NOTHING");
    let inserted = insert.bind(address).bind(name).execute(connection).await?;
    Ok(inserted.rows_affected() == 1)
}

#[cfg(test)]
mod tests {
    use sqlx::Connection as _;

    use super::*;

    #[tokio::test]
    async fn an_account_is_made_once() {
        let mut connection = SqliteConnection::connect("sqlite::memory:").await.unwrap();
        sqlx::raw_sql(TABLE).execute(&mut connection).await.unwrap();
        assert!(sign_up(&mut connection, "zoe@example.org", "Zoe").await.unwrap());
        assert!(!sign_up(&mut connection, "zoe@example.org", "Zoe").await.unwrap());
    }
}
