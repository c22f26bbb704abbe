//! The business data: payments, and the ledger that says how often money really moved.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};
use sqlx::{Row, SqliteConnection, SqlitePool};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

use crate::problem::Problem;

/// The largest amount, 2^53: beyond it, clients that read numbers as doubles see another amount.
const MAX_AMOUNT: i64 = 1 << 53;

const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS payments (
        id TEXT NOT NULL PRIMARY KEY,
        tenant TEXT NOT NULL,
        amount INTEGER NOT NULL,
        currency TEXT NOT NULL,
        recipient TEXT NOT NULL,
        created_at TEXT NOT NULL
    ) STRICT;
    CREATE INDEX IF NOT EXISTS payments_tenant ON payments (tenant, created_at);
    CREATE TABLE IF NOT EXISTS ledger (
        id INTEGER PRIMARY KEY,
        tenant TEXT NOT NULL,
        payment TEXT NOT NULL,
        amount INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX IF NOT EXISTS ledger_tenant ON ledger (tenant);
";

/// What a client asks for.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewPayment {
    /// In minor units, 1 to 2^53.
    amount: i64,
    /// ISO 4217, as in `EUR`.
    currency: String,
    recipient: String,
}

/// What was done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Payment {
    pub(crate) id: String,
    amount: i64,
    currency: String,
    recipient: String,
    created_at: String,
}

/// How often money moved, and how much.
#[derive(Debug, Serialize)]
pub(crate) struct Totals {
    effects: i64,
    total: i64,
}

impl NewPayment {
    /// Reads and checks a request body.
    pub(crate) fn from_json(body: &[u8]) -> Result<Self, Problem> {
        let payment: Self = serde_json::from_slice(body).map_err(|error| Problem::InvalidPayment(error.to_string()))?;
        let invalid = |detail: &str| Err(Problem::InvalidPayment(detail.to_owned()));
        if !(1..=MAX_AMOUNT).contains(&payment.amount) {
            return invalid("amount is in minor units, from 1 to 9007199254740992");
        }
        if payment.currency.len() != 3 || !payment.currency.bytes().all(|byte| byte.is_ascii_uppercase()) {
            return invalid("currency is three capital letters, as in EUR");
        }
        if payment.recipient.is_empty() || payment.recipient.len() > 255 {
            return invalid("recipient has 1 to 255 bytes");
        }
        Ok(payment)
    }
}

/// Opens a database of the example's own.
pub(crate) async fn open(url: &str) -> Result<SqlitePool, sqlx::Error> {
    let options: SqliteConnectOptions = url.parse()?;
    let options = options
        .create_if_missing(true)
        .journal_mode(sqlx::sqlite::SqliteJournalMode::Wal)
        .busy_timeout(Duration::from_secs(5));
    SqlitePoolOptions::new().max_connections(8).connect_with(options).await
}

/// Makes the tables where they are missing.
pub(crate) async fn migrate(pool: &SqlitePool) -> Result<(), sqlx::Error> {
    let mut transaction = pool.begin_with("BEGIN IMMEDIATE").await?;
    sqlx::raw_sql(SCHEMA).execute(&mut *transaction).await?;
    transaction.commit().await
}

/// Moves money: two rows, in whatever transaction `connection` is in.
pub(crate) async fn pay(
    connection: &mut SqliteConnection,
    tenant: &str,
    payment: NewPayment,
) -> Result<Payment, sqlx::Error> {
    let NewPayment { amount, currency, recipient } = payment;
    let created_at = OffsetDateTime::now_utc().format(&Rfc3339).map_err(|error| sqlx::Error::Encode(error.into()))?;
    let payment = Payment { id: Uuid::new_v4().to_string(), amount, currency, recipient, created_at };
    sqlx::query("INSERT INTO payments (id, tenant, amount, currency, recipient, created_at) VALUES (?, ?, ?, ?, ?, ?)")
        .bind(&payment.id)
        .bind(tenant)
        .bind(payment.amount)
        .bind(&payment.currency)
        .bind(&payment.recipient)
        .bind(&payment.created_at)
        .execute(&mut *connection)
        .await?;
    sqlx::query("INSERT INTO ledger (tenant, payment, amount) VALUES (?, ?, ?)")
        .bind(tenant)
        .bind(&payment.id)
        .bind(payment.amount)
        .execute(connection)
        .await?;
    Ok(payment)
}

/// The tenant's payments, oldest first.
pub(crate) async fn payments(pool: &SqlitePool, tenant: &str) -> Result<Vec<Payment>, sqlx::Error> {
    let query = sqlx::query(
        "SELECT id, amount, currency, recipient, created_at FROM payments WHERE tenant = ? ORDER BY created_at, id",
    );
    query.bind(tenant).fetch_all(pool).await?.iter().map(read).collect()
}

/// One payment of the tenant.
pub(crate) async fn payment(pool: &SqlitePool, tenant: &str, id: &str) -> Result<Option<Payment>, sqlx::Error> {
    let query =
        sqlx::query("SELECT id, amount, currency, recipient, created_at FROM payments WHERE tenant = ? AND id = ?");
    query.bind(tenant).bind(id).fetch_optional(pool).await?.as_ref().map(read).transpose()
}

/// How often the tenant's money moved, and how much.
pub(crate) async fn totals(pool: &SqlitePool, tenant: &str) -> Result<Totals, sqlx::Error> {
    let query = sqlx::query("SELECT count(*), coalesce(sum(amount), 0) FROM ledger WHERE tenant = ?");
    let row = query.bind(tenant).fetch_one(pool).await?;
    Ok(Totals { effects: row.try_get(0)?, total: row.try_get(1)? })
}

fn read(row: &sqlx::sqlite::SqliteRow) -> Result<Payment, sqlx::Error> {
    Ok(Payment {
        id: row.try_get(0)?,
        amount: row.try_get(1)?,
        currency: row.try_get(2)?,
        recipient: row.try_get(3)?,
        created_at: row.try_get(4)?,
    })
}
