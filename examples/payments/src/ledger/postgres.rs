//! The ledger in Postgres, in a separate schema.
//!
//! Every statement names its schema, and every read is in a transaction whose search path has only built-in names. With
//! another path, a role that may create objects in one of its schemas could redefine a function. Behind a transaction-pooling
//! proxy, such as PgBouncer, no session could remember a path or a prepared statement.

use std::time::Duration;

use idem_core::engine::Context;
use sqlx::postgres::{PgArguments, PgConnectOptions, PgPoolOptions, PgRow};
use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool, Postgres, Row};

use super::{MAX_CONNECTIONS, Payment, Totals};
use crate::answer::{Answer, Body};
use crate::config::{Config, SchemaName};

/// Half of the advisory lock under which the tables are made; the other half is made of the schema's name.
const TABLES_LOCK: i32 = 0x7061_7973;

/// Begins the ledger's own transactions.
const BEGIN: &str = "BEGIN;SET LOCAL search_path=pg_catalog,pg_temp";

const TABLES: &str = r"
    CREATE SCHEMA IF NOT EXISTS {schema};
    CREATE TABLE IF NOT EXISTS {schema}.payments (
        id TEXT NOT NULL PRIMARY KEY,
        tenant TEXT NOT NULL,
        amount BIGINT NOT NULL,
        currency TEXT NOT NULL,
        recipient TEXT NOT NULL,
        created_at TEXT NOT NULL
    );
    CREATE INDEX IF NOT EXISTS payments_tenant ON {schema}.payments (tenant, created_at);
    CREATE TABLE IF NOT EXISTS {schema}.ledger (
        id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        tenant TEXT NOT NULL,
        payment TEXT NOT NULL,
        amount BIGINT NOT NULL,
        attempt BIGINT NOT NULL
    );
    CREATE INDEX IF NOT EXISTS ledger_tenant ON {schema}.ledger (tenant);
";

#[derive(Debug)]
pub(crate) struct PostgresLedger {
    pool: PgPool,
    schema: SchemaName,
    /// Whether the connections lead through a transaction-pooling proxy.
    pooler: bool,
    /// The statement by which payments under a lease settle their runs, and how long their answers are kept, in seconds.
    settle: Option<(String, i64)>,
}

impl PostgresLedger {
    pub(super) async fn open(url: &str, config: &Config, settle: Option<String>) -> Result<Self, sqlx::Error> {
        let mut options: PgConnectOptions = url.parse()?;
        let Config { pooler, retention_s, .. } = *config;
        if pooler {
            // The proxy refuses startup parameters that it does not know, and has no place for named statements.
            options = options.extra_float_digits(None).statement_cache_capacity(0);
        }
        // On a separate connection: a pool that cannot connect only says that it has waited.
        let mut connection = PgConnection::connect_with(&options).await?;
        let pool = PgPoolOptions::new().max_connections(MAX_CONNECTIONS).acquire_timeout(Duration::from_secs(5));
        let settle = settle.map(|sql| (sql, i64::try_from(retention_s).unwrap_or(i64::MAX)));
        let ledger = Self { pool: pool.connect_lazy_with(options), schema: config.schema.clone(), pooler, settle };
        ledger.make_tables(&mut connection).await?;
        connection.close().await?;
        Ok(ledger)
    }

    /// Creates the tables, one replica after the other: `IF NOT EXISTS` alone fails if two create the same thing at once.
    async fn make_tables(&self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        let mut transaction = connection.begin_with(BEGIN).await?;
        // The wait is limited, because every role that may connect could hold the lock.
        sqlx::raw_sql("SET LOCAL lock_timeout='30s'").execute(&mut *transaction).await?;
        let lock = self.query("SELECT pg_advisory_xact_lock($1, hashtext($2))");
        lock.bind(TABLES_LOCK).bind(self.schema.as_str()).execute(&mut *transaction).await?;
        sqlx::raw_sql(AssertSqlSafe(self.in_schema(TABLES))).execute(&mut *transaction).await?;
        transaction.commit().await
    }

    fn in_schema(&self, statement: &str) -> String {
        statement.replace("{schema}", &format!("\"{}\"", self.schema.as_str()))
    }

    fn query<'q>(&self, statement: &str) -> Query<'q, Postgres, PgArguments> {
        // The text contains only a name that was checked; see `SchemaName`.
        sqlx::query(AssertSqlSafe(self.in_schema(statement))).persistent(!self.pooler)
    }

    /// Inserts two rows, in the transaction that `connection` is in.
    pub(super) async fn insert(
        &self,
        connection: &mut PgConnection,
        tenant: &str,
        payment: &Payment,
        attempt: u32,
    ) -> Result<(), sqlx::Error> {
        let statement = "INSERT INTO {schema}.payments (id, tenant, amount, currency, recipient, created_at) \
                         VALUES ($1, $2, $3, $4, $5, $6)";
        self.query(statement)
            .bind(&payment.id)
            .bind(tenant)
            .bind(payment.amount)
            .bind(&payment.currency)
            .bind(&payment.recipient)
            .bind(&payment.created_at)
            .execute(&mut *connection)
            .await?;
        self.query("INSERT INTO {schema}.ledger (tenant, payment, amount, attempt) VALUES ($1, $2, $3, $4)")
            .bind(tenant)
            .bind(&payment.id)
            .bind(payment.amount)
            .bind(i64::from(attempt))
            .execute(connection)
            .await?;
        Ok(())
    }

    pub(super) async fn insert_alone(
        &self,
        run: &Context,
        tenant: &str,
        payment: &Payment,
        answer: &Answer,
    ) -> Result<(), sqlx::Error> {
        let mut transaction = self.pool.begin_with(BEGIN).await?;
        self.insert(&mut transaction, tenant, payment, run.attempt()).await?;
        self.settle(&mut transaction, run, answer).await?;
        transaction.commit().await
    }

    /// Settles the run in the transaction that `connection` is in, if payments do that. It fails if another run has the
    /// payment by now, and then nothing is committed.
    async fn settle(&self, connection: &mut PgConnection, run: &Context, answer: &Answer) -> Result<(), sqlx::Error> {
        let (Some((sql, retention)), Some(lease)) = (&self.settle, run.lease()) else { return Ok(()) };
        let Body::Whole(body) = &answer.body else { return Ok(()) };
        let (names, values): (Vec<_>, Vec<_>) =
            answer.headers.iter().map(|(name, value)| (*name, String::from_utf8_lossy(value).into_owned())).unzip();
        let settle = sqlx::query(AssertSqlSafe(sql.clone())).persistent(!self.pooler);
        settle
            .bind(lease.id.as_bytes().as_slice())
            .bind(lease.owner.as_bytes().as_slice())
            .bind("completed")
            .bind(i32::from(answer.status))
            .bind(names)
            .bind(values)
            .bind(body.as_ref())
            .bind(retention)
            .execute(connection)
            .await?;
        Ok(())
    }

    pub(super) async fn payments(&self, tenant: &str) -> Result<Vec<Payment>, sqlx::Error> {
        let query = self.query(
            "SELECT id, amount, currency, recipient, created_at FROM {schema}.payments WHERE tenant = $1 \
             ORDER BY created_at, id",
        );
        let mut transaction = self.pool.begin_with(BEGIN).await?;
        query.bind(tenant).fetch_all(&mut *transaction).await?.iter().map(read).collect()
    }

    pub(super) async fn payment(&self, tenant: &str, id: &str) -> Result<Option<Payment>, sqlx::Error> {
        let query = self.query(
            "SELECT id, amount, currency, recipient, created_at FROM {schema}.payments WHERE tenant = $1 AND id = $2",
        );
        let mut transaction = self.pool.begin_with(BEGIN).await?;
        query.bind(tenant).bind(id).fetch_optional(&mut *transaction).await?.as_ref().map(read).transpose()
    }

    pub(super) async fn totals(&self, tenant: &str) -> Result<Totals, sqlx::Error> {
        let query =
            self.query("SELECT count(*), coalesce(sum(amount), 0)::BIGINT FROM {schema}.ledger WHERE tenant = $1");
        let mut transaction = self.pool.begin_with(BEGIN).await?;
        let row = query.bind(tenant).fetch_one(&mut *transaction).await?;
        Ok(Totals { effects: row.try_get(0)?, total: row.try_get(1)? })
    }
}

fn read(row: &PgRow) -> Result<Payment, sqlx::Error> {
    Ok(Payment {
        id: row.try_get(0)?,
        amount: row.try_get(1)?,
        currency: row.try_get(2)?,
        recipient: row.try_get(3)?,
        created_at: row.try_get(4)?,
    })
}
