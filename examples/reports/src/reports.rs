//! The reports: what a job makes.

use idem_core::engine::Context;
use idem_core::{HeaderField, StoredResponse};
use idem_jobs::{Job, JobError};
use idem_postgres::PostgresTransaction;
use idem_sqlite::SqliteTransaction;
use serde::{Deserialize, Serialize};

/// What a client asks for.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewReport {
    year: i64,
}

impl NewReport {
    pub(crate) fn is_valid(&self) -> bool {
        (1000..10_000).contains(&self.year)
    }
}

/// Where reports are kept.
#[derive(Debug, Clone)]
pub(crate) enum Reports {
    /// In the transaction of the run: the report and the result of the job commit together.
    Sqlite,
    /// The same, in this schema.
    Postgres(String),
    /// Nowhere but in the result of the job.
    Nowhere,
}

/// Without a unique key: the record of the job is what makes a report once.
pub(crate) const TABLE: &str =
    "CREATE TABLE IF NOT EXISTS {schema}reports (job TEXT NOT NULL, year BIGINT NOT NULL, attempt BIGINT NOT NULL)";

impl Reports {
    pub(crate) async fn make(&self, context: &Context, job: &Job) -> Result<StoredResponse, JobError> {
        let NewReport { year } = serde_json::from_slice(&job.payload)?;
        if !(1900..3000).contains(&year) {
            return Err(JobError::Fail(StoredResponse::new(422, r#"{"title":"There are no figures for that year"}"#)));
        }
        #[cfg(feature = "simulate")]
        if year == 1999 {
            std::process::abort();
        }
        // The real work takes this place.
        let attempt = i64::from(context.attempt());
        match self {
            Self::Sqlite => {
                let mut transaction = context.transaction::<SqliteTransaction>()?;
                let insert = sqlx::query("INSERT INTO reports (job, year, attempt) VALUES (?, ?, ?)");
                insert.bind(job.id.as_str()).bind(year).bind(attempt).execute(&mut **transaction).await?;
            }
            Self::Postgres(schema) => {
                let mut transaction = context.transaction::<PostgresTransaction>()?;
                let insert = format!("INSERT INTO \"{schema}\".reports (job, year, attempt) VALUES ($1, $2, $3)");
                let insert = sqlx::query(sqlx::AssertSqlSafe(insert));
                insert.bind(job.id.as_str()).bind(year).bind(attempt).execute(&mut **transaction).await?;
            }
            Self::Nowhere => {}
        }
        let json = HeaderField { name: "content-type".into(), value: "application/json".into() };
        let report = serde_json::json!({ "year": year, "pages": 7, "attempt": attempt });
        Ok(StoredResponse { headers: [json].into(), ..StoredResponse::new(201, report.to_string()) })
    }
}
