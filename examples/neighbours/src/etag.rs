//! `ETag` and `If-Match`: a change applies only to the version that the client has seen (RFC 9110, section 13.1.1).

use sqlx::SqliteConnection;

/// The table.
pub const TABLE: &str = "CREATE TABLE pages (id INTEGER PRIMARY KEY, text TEXT NOT NULL, version INTEGER NOT NULL)";

/// Changes a page. Returns whether it had this version; if not, the answer is 412.
///
/// A repeat of a change that succeeded gets 412 as well: the client has to read the page to learn whether its change is there.
///
/// # Errors
/// When the database could not answer. Repeat it.
pub async fn change_page(
    connection: &mut SqliteConnection,
    id: i64,
    if_match: i64,
    text: &str,
) -> Result<bool, sqlx::Error> {
    let update = sqlx::query("UPDATE pages SET text = ?, version = version + 1 WHERE id = ? AND version = ?");
    let updated = update.bind(text).bind(id).bind(if_match).execute(connection).await?;
    Ok(updated.rows_affected() == 1)
}

#[cfg(test)]
mod tests {
    use sqlx::Connection as _;

    use super::*;

    #[tokio::test]
    async fn a_version_is_changed_once() {
        let mut connection = SqliteConnection::connect("sqlite::memory:").await.unwrap();
        sqlx::raw_sql(TABLE).execute(&mut connection).await.unwrap();
        sqlx::raw_sql("INSERT INTO pages VALUES (1, 'draft', 1)").execute(&mut connection).await.unwrap();
        assert!(change_page(&mut connection, 1, 1, "final").await.unwrap());
        assert!(!change_page(&mut connection, 1, 1, "final").await.unwrap(), "the repeat gets 412");
    }
}
