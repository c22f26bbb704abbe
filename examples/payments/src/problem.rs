//! The application's own problem documents; their types differ from those of the idempotency layer.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use idem_core::engine::TransactionError;

/// What the application refuses or fails to do.
#[derive(Debug)]
pub(crate) enum Problem {
    /// The bearer token is missing.
    Unauthenticated,
    /// The request body is not a payment.
    InvalidPayment(String),
    /// The `X-Simulate` header is not understood.
    InvalidSimulation(String),
    /// There is no such payment.
    NotFound,
    /// The database failed.
    Database(sqlx::Error),
    /// The database is away, or going.
    DatabaseAway(sqlx::Error),
    /// The transaction of the run cannot be had.
    Transaction(TransactionError),
}

impl From<sqlx::Error> for Problem {
    fn from(error: sqlx::Error) -> Self {
        if is_away(&error) { Self::DatabaseAway(error) } else { Self::Database(error) }
    }
}

/// Whether a repeat may find the database where this request did not.
fn is_away(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::WorkerCrashed => true,
        // Postgres: connection exceptions, and a server that shuts down, crashes or starts.
        sqlx::Error::Database(error) => {
            error.code().is_some_and(|code| code.starts_with("08") || code.starts_with("57P"))
        }
        _ => false,
    }
}

impl From<TransactionError> for Problem {
    fn from(error: TransactionError) -> Self {
        Self::Transaction(error)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let (status, name, detail) = match self {
            Self::Unauthenticated => {
                (StatusCode::UNAUTHORIZED, "unauthenticated", "send Authorization: Bearer TENANT".to_owned())
            }
            Self::InvalidPayment(detail) => (StatusCode::UNPROCESSABLE_ENTITY, "invalid-payment", detail),
            Self::InvalidSimulation(detail) => (StatusCode::BAD_REQUEST, "invalid-simulation", detail),
            Self::NotFound => (StatusCode::NOT_FOUND, "not-found", "there is no such payment".to_owned()),
            Self::Database(error) => {
                tracing::error!(error = &error as &dyn std::error::Error, "the database failed");
                (StatusCode::INTERNAL_SERVER_ERROR, "database", "the database failed; repeat the request".to_owned())
            }
            Self::DatabaseAway(error) => {
                tracing::error!(error = &error as &dyn std::error::Error, "the database is away");
                (
                    StatusCode::SERVICE_UNAVAILABLE,
                    "database-away",
                    "the database is away; repeat the request".to_owned(),
                )
            }
            Self::Transaction(error) => (StatusCode::INTERNAL_SERVER_ERROR, "transaction", error.to_string()),
        };
        let document = serde_json::json!({
            "type": format!("urn:payments:problem:{name}"),
            "title": name,
            "status": status.as_u16(),
            "detail": detail,
        });
        let mut response = (status, Json(document)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
