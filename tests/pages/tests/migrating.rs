//! The handler of `docs/migrating.md` finds keys from before the move.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use idem_axum::IdempotencyLayer;
use idem_sqlite::{SqliteConfig, SqliteStore};
use tower::ServiceExt as _;

mod handler {
    include!("migrating/handler.rs");

    pub(crate) fn route() -> axum::routing::MethodRouter {
        axum::routing::post(pay)
    }
}

#[test]
fn the_page_shows_this_handler() {
    let page = include_str!("../../../docs/migrating.md");
    assert!(page.contains(&format!("```rust\n{}```", include_str!("migrating/handler.rs"))));
}

#[tokio::test]
async fn a_key_from_before_the_move_gets_its_old_answer() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", folder.path().join("payments.db").display());
    let store = SqliteStore::open(SqliteConfig::new(url)).await.unwrap();
    let tables = "CREATE TABLE payments (amount INTEGER NOT NULL);
        CREATE TABLE old_keys (key TEXT NOT NULL PRIMARY KEY, amount INTEGER NOT NULL, answer TEXT NOT NULL);
        INSERT INTO old_keys VALUES ('k-old', 1250, 'paid last week')";
    sqlx::raw_sql(tables).execute(store.pool()).await.unwrap();
    let layer = IdempotencyLayer::transactional(Arc::new(store.clone())).single_tenant();
    let app = Router::new().route("/payments", handler::route().route_layer(layer));
    let pay = async |key: &str, amount: &str| {
        let request =
            Request::post("/payments").header("idempotency-key", key).header("content-type", "application/json");
        let answer = app.clone().oneshot(request.body(Body::from(amount.to_owned())).unwrap()).await.unwrap();
        let status = answer.status().as_u16();
        let body = axum::body::to_bytes(answer.into_body(), 1024).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    };
    for key in ["k-old", "\"k-old\""] {
        assert_eq!(pay(key, "1250").await, (201, "paid last week".to_owned()), "{key}");
    }
    sqlx::raw_sql("DELETE FROM old_keys").execute(store.pool()).await.unwrap();
    assert_eq!(pay("k-old", "1250").await, (201, "paid last week".to_owned()), "the layer has it now");
    assert_eq!(pay("k-new", "1250").await, (201, "paid".to_owned()));
    let payments: i64 = sqlx::query_scalar("SELECT count(*) FROM payments").fetch_one(store.pool()).await.unwrap();
    assert_eq!(payments, 1);
}
