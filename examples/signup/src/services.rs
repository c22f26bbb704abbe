//! Two pretended services in one: they keep what they made by its idempotency key, in memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};

/// What was made, by its key.
type Made = State<Arc<Mutex<HashMap<String, Thing>>>>;

struct Thing {
    what: String,
    /// Also if it was taken back before it was made: then it is never made.
    is_taken_back: bool,
}

pub(crate) fn router() -> Router {
    Router::new()
        .route("/{what}", post(make))
        .route("/made-by", delete(take_back))
        .route("/made", get(standing))
        .with_state(Arc::default())
}

/// Serves on a free port, and returns the URL.
pub(crate) async fn serve(router: Router) -> std::io::Result<String> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    tokio::spawn(axum::serve(listener, router).into_future());
    Ok(url)
}

/// What stands, in the order of the alphabet.
async fn standing(State(made): Made) -> Json<Vec<String>> {
    let made = made.lock().unwrap_or_else(PoisonError::into_inner);
    let mut standing: Vec<_> =
        made.values().filter(|thing| !thing.is_taken_back).map(|thing| thing.what.clone()).collect();
    standing.sort_unstable();
    Json(standing)
}

async fn make(
    State(made): Made,
    Path(what): Path<String>,
    headers: HeaderMap,
    Json(body): Json<Value>,
) -> Result<Json<Value>, StatusCode> {
    let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok()).ok_or(StatusCode::BAD_REQUEST)?;
    if what == "mails" && !body["to"].as_str().is_some_and(|address| address.contains('@')) {
        return Err(StatusCode::UNPROCESSABLE_ENTITY);
    }
    let mut made = made.lock().unwrap_or_else(PoisonError::into_inner);
    let thing = made.entry(key.to_owned()).or_insert(Thing { what: what.clone(), is_taken_back: false });
    if thing.is_taken_back { Err(StatusCode::GONE) } else { Ok(Json(json!({ "id": format!("{what}-{}", &key[..8]) }))) }
}

#[derive(Deserialize)]
struct ByKey {
    key: String,
}

async fn take_back(State(made): Made, Query(ByKey { key }): Query<ByKey>) -> Json<Value> {
    let mut made = made.lock().unwrap_or_else(PoisonError::into_inner);
    made.entry(key).or_insert(Thing { what: "nothing".to_owned(), is_taken_back: true }).is_taken_back = true;
    Json(Value::Null)
}
