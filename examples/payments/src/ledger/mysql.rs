//! The ledger in MariaDB.

use std::time::Duration;

use sqlx::mysql::{MySqlConnectOptions, MySqlPoolOptions, MySqlRow};
use sqlx::{Connection, MySqlConnection, MySqlPool, Row};

use super::{MAX_CONNECTIONS, Payment, Totals};

const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS payments (
        id CHAR(36) NOT NULL PRIMARY KEY,
        tenant VARCHAR(255) NOT NULL,
        amount BIGINT NOT NULL,
        currency CHAR(3) NOT NULL,
        recipient VARCHAR(255) NOT NULL,
        created_at VARCHAR(64) NOT NULL,
        KEY payments_tenant (tenant, created_at)
    ) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
    CREATE TABLE IF NOT EXISTS ledger (
        id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
        tenant VARCHAR(255) NOT NULL,
        payment CHAR(36) NOT NULL,
        amount BIGINT NOT NULL,
        attempt BIGINT NOT NULL,
        KEY ledger_tenant (tenant)
    ) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
";

#[derive(Debug)]
pub(crate) struct MySqlLedger {
    pool: MySqlPool,
}

impl MySqlLedger {
    pub(super) async fn open(url: &str) -> Result<Self, sqlx::Error> {
        let options: MySqlConnectOptions = url.parse()?;
        // On a separate connection: a pool that cannot connect only says that it has waited.
        let mut connection = MySqlConnection::connect_with(&options).await?;
        sqlx::raw_sql(TABLES).execute(&mut connection).await?;
        connection.close().await?;
        let pool = MySqlPoolOptions::new().max_connections(MAX_CONNECTIONS).acquire_timeout(Duration::from_secs(5));
        Ok(Self { pool: pool.connect_lazy_with(options) })
    }

    /// Inserts two rows, in the transaction that `connection` is in.
    pub(super) async fn insert(
        &self,
        connection: &mut MySqlConnection,
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
        // The sum of integers is a DECIMAL.
        let query =
            sqlx::query("SELECT count(*), CAST(coalesce(sum(amount), 0) AS SIGNED) FROM ledger WHERE tenant = ?");
        let row = query.bind(tenant).fetch_one(&self.pool).await?;
        Ok(Totals { effects: row.try_get(0)?, total: row.try_get(1)? })
    }
}

fn read(row: &MySqlRow) -> Result<Payment, sqlx::Error> {
    Ok(Payment {
        id: row.try_get(0)?,
        amount: row.try_get(1)?,
        currency: row.try_get(2)?,
        recipient: row.try_get(3)?,
        created_at: row.try_get(4)?,
    })
}
