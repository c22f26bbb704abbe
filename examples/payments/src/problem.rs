//! The application's own problem documents; their types differ from those of the idempotency layer.

use idem_core::StoreError;
use idem_core::engine::TransactionError;

use crate::answer::Answer;

/// What the application refuses or fails to do.
#[derive(Debug)]
pub(crate) enum Problem {
    /// The bearer token is missing.
    Unauthenticated,
    /// The request body is not a payment.
    InvalidPayment(String),
    /// The `X-Simulate` header is not understood.
    InvalidSimulation(String),
    /// The request body is over the limit.
    BodyTooLarge,
    /// The request body broke off.
    BodyIncomplete,
    /// A simulated timeout.
    TimedOut,
    /// There is no such payment, or no such page.
    NotFound,
    /// The page exists for other methods.
    MethodNotAllowed(&'static str),
    /// The database failed.
    Database(sqlx::Error),
    /// The database is unavailable, or shuts down.
    DatabaseAway(sqlx::Error),
    /// The store of records could not answer.
    StoreAway(StoreError),
    /// The transaction of the run is not available.
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

impl std::fmt::Display for Problem {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.told().2)
    }
}

impl Problem {
    /// The status, the name and the detail that clients get.
    fn told(&self) -> (u16, &'static str, String) {
        match self {
            Self::Unauthenticated => (401, "unauthenticated", "send Authorization: Bearer TENANT".to_owned()),
            Self::InvalidPayment(detail) => (422, "invalid-payment", detail.clone()),
            Self::InvalidSimulation(detail) => (400, "invalid-simulation", detail.clone()),
            Self::BodyTooLarge => (413, "body-too-large", "the request body is over the limit".to_owned()),
            Self::BodyIncomplete => (400, "body-incomplete", "the request body broke off".to_owned()),
            Self::TimedOut => (504, "timed-out", "it took too long".to_owned()),
            Self::NotFound => (404, "not-found", "there is no such payment or page".to_owned()),
            Self::MethodNotAllowed(allowed) => (405, "method-not-allowed", format!("this page takes {allowed}")),
            Self::Database(_) => (500, "database", "the database failed; repeat the request".to_owned()),
            Self::DatabaseAway(_) => (503, "database-away", "the database is away; repeat the request".to_owned()),
            Self::StoreAway(_) => (503, "store-away", "the store of records is away; repeat the request".to_owned()),
            Self::Transaction(error) => (500, "transaction", error.to_string()),
        }
    }
}

impl From<Problem> for Answer {
    fn from(problem: Problem) -> Self {
        Self::from(&problem)
    }
}

impl From<&Problem> for Answer {
    fn from(problem: &Problem) -> Self {
        if let Problem::Database(error) | Problem::DatabaseAway(error) = problem {
            tracing::error!(error = error as &dyn std::error::Error, "the database did not do it");
        }
        if let Problem::StoreAway(error) = problem {
            tracing::error!(error = error as &dyn std::error::Error, "the store could not show a record");
        }
        let (status, name, detail) = problem.told();
        let document = serde_json::json!({
            "type": format!("urn:payments:problem:{name}"),
            "title": name,
            "status": status,
            "detail": detail,
        });
        let answer = Self::document(status, "application/problem+json", &document);
        match problem {
            Problem::Unauthenticated => answer.header("www-authenticate", "Bearer"),
            Problem::MethodNotAllowed(allowed) => answer.header("allow", *allowed),
            Problem::DatabaseAway(_) | Problem::StoreAway(_) => answer.header("retry-after", "1"),
            _ => answer,
        }
    }
}
