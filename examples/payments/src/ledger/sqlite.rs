//! The ledger in SQLite.

use std::time::Duration;

use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteRow};
use sqlx::{Row, SqliteConnection, SqlitePool};

use super::{MAX_CONNECTIONS, Payment, Totals};

const TABLES: &str = "
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
        amount INTEGER NOT NULL,
        attempt INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX IF NOT EXISTS ledger_tenant ON ledger (tenant);
";

#[derive(Debug)]
pub(crate) struct SqliteLedger {
    pool: SqlitePool,
}

impl SqliteLedger {
    pub(super) async fn open(url: &str) -> Result<Self, sqlx::Error> {
        let options: SqliteConnectOptions = url.parse()?;
        let options =
            options.create_if_missing(true).journal_mode(SqliteJournalMode::Wal).busy_timeout(Duration::from_secs(5));
        let pool = SqlitePoolOptions::new().max_connections(MAX_CONNECTIONS).connect_with(options).await?;
        let mut transaction = pool.begin_with("BEGIN IMMEDIATE").await?;
        sqlx::raw_sql(TABLES).execute(&mut *transaction).await?;
        transaction.commit().await?;
        Ok(Self { pool })
    }

    /// Inserts two rows, in the transaction that `connection` is in.
    pub(super) async fn insert(
        &self,
        connection: &mut SqliteConnection,
        tenant: &str,
        payment: &Payment,
        attempt: u32,
    ) -> Result<(), sqlx::Error> {
        let statement =
            "INSERT INTO payments (id, tenant, amount, currency, recipient, created_at) VALUES (?, ?, ?, ?, ?, ?)";
        sqlx::query(statement)
            .bind(&payment.id)
            .bind(tenant)
            .bind(payment.amount)
            .bind(&payment.currency)
            .bind(&payment.recipient)
            .bind(&payment.created_at)
            .execute(&mut *connection)
            .await?;
        sqlx::query("INSERT INTO ledger (tenant, payment, amount, attempt) VALUES (?, ?, ?, ?)")
            .bind(tenant)
            .bind(&payment.id)
            .bind(payment.amount)
            .bind(i64::from(attempt))
            .execute(connection)
            .await?;
        Ok(())
    }

    pub(super) async fn insert_alone(&self, tenant: &str, payment: &Payment, attempt: u32) -> Result<(), sqlx::Error> {
        let mut transaction = self.pool.begin().await?;
        self.insert(&mut transaction, tenant, payment, attempt).await?;
        transaction.commit().await
    }

    pub(super) async fn payments(&self, tenant: &str) -> Result<Vec<Payment>, sqlx::Error> {
        let query = sqlx::query(
            "SELECT id, amount, currency, recipient, created_at FROM payments WHERE tenant = ? ORDER BY created_at, id",
        );
        query.bind(tenant).fetch_all(&self.pool).await?.iter().map(read).collect()
    }

    pub(super) async fn payment(&self, tenant: &str, id: &str) -> Result<Option<Payment>, sqlx::Error> {
        let query =
            sqlx::query("SELECT id, amount, currency, recipient, created_at FROM payments WHERE tenant = ? AND id = ?");
        query.bind(tenant).bind(id).fetch_optional(&self.pool).await?.as_ref().map(read).transpose()
    }

    pub(super) async fn totals(&self, tenant: &str) -> Result<Totals, sqlx::Error> {
        let query = sqlx::query("SELECT count(*), coalesce(sum(amount), 0) FROM ledger WHERE tenant = ?");
        let row = query.bind(tenant).fetch_one(&self.pool).await?;
        Ok(Totals { effects: row.try_get(0)?, total: row.try_get(1)? })
    }
}

fn read(row: &SqliteRow) -> Result<Payment, sqlx::Error> {
    Ok(Payment {
        id: row.try_get(0)?,
        amount: row.try_get(1)?,
        currency: row.try_get(2)?,
        recipient: row.try_get(3)?,
        created_at: row.try_get(4)?,
    })
}
