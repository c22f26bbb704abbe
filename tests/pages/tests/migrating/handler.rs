use axum::Json;
use axum::http::{HeaderMap, StatusCode};
use idem_axum::IdempotentTransaction;
use idem_sqlite::SqliteTransaction;

async fn pay(
    headers: HeaderMap,
    mut transaction: IdempotentTransaction<SqliteTransaction>,
    Json(amount): Json<i64>,
) -> Result<(StatusCode, String), StatusCode> {
    let failed = |_| StatusCode::INTERNAL_SERVER_ERROR;
    // The form in which your table holds keys: here, text without the quotation marks of the header.
    let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok()).unwrap_or_default().trim_matches('"');
    let known = sqlx::query_as::<_, (i64, String)>("SELECT amount, answer FROM old_keys WHERE key = ?").bind(key);
    if let Some((old_amount, answer)) = known.fetch_optional(&mut **transaction).await.map_err(failed)? {
        // The layer stores this answer too, so that it is found without the old table from now on.
        return if old_amount == amount { Ok((StatusCode::CREATED, answer)) } else { Err(StatusCode::UNPROCESSABLE_ENTITY) };
    }
    let insert = sqlx::query("INSERT INTO payments (amount) VALUES (?)").bind(amount);
    insert.execute(&mut **transaction).await.map_err(failed)?;
    Ok((StatusCode::CREATED, "paid".to_owned()))
}
