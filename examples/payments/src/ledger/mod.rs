//! The business data: payments, and the ledger that says how often money really moved.

mod mysql;
mod postgres;
mod sqlite;

use idem_core::engine::{Context, TransactionError, TransactionGuard};
use idem_mysql::MySqlTransaction;
use idem_postgres::PostgresTransaction;
use idem_sqlite::SqliteTransaction;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::answer::Answer;
use crate::config::{Config, Database};
use crate::joined::JoinedTransaction;
use crate::problem::Problem;
use mysql::MySqlLedger;
use postgres::PostgresLedger;
use sqlite::SqliteLedger;

/// The largest amount, 2^53: beyond it, clients that read numbers as doubles see another amount.
const MAX_AMOUNT: i64 = 1 << 53;

/// How many connections a ledger opens at most.
const MAX_CONNECTIONS: u32 = 8;

/// A payment that a client asks for.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewPayment {
    /// In minor units, 1 to 2^53.
    #[serde(deserialize_with = "whole_number")]
    #[schema(minimum = 1, maximum = 9_007_199_254_740_992_i64)]
    amount: i64,
    /// ISO 4217, as in `EUR`.
    #[schema(pattern = "^[A-Z]{3}$")]
    currency: String,
    /// 1 to 255 characters, none of them a control character.
    #[schema(pattern = r"^[^\u0000-\u001F\u007F-\u009F]{1,255}$")]
    recipient: String,
}

/// A payment that was made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct Payment {
    pub(crate) id: String,
    amount: i64,
    currency: String,
    recipient: String,
    created_at: String,
}

/// What a payment would cost.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Quote {
    id: String,
    /// In minor units.
    fee: i64,
    /// Whether a repeat gets the same quote, because it came with an idempotency key.
    repeatable: bool,
}

/// How often money moved, and how much.
#[derive(Debug, Serialize, ToSchema)]
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
        let length = payment.recipient.chars().count();
        if !(1..=255).contains(&length) || payment.recipient.chars().any(char::is_control) {
            return invalid("recipient has 1 to 255 characters, none of them a control character");
        }
        Ok(payment)
    }

    /// A quote with a fee of 25 minor units and one percent.
    pub(crate) fn quoted(&self, repeatable: bool) -> Quote {
        Quote { id: Uuid::new_v4().to_string(), fee: 25 + self.amount / 100, repeatable }
    }

    /// The payment, before it is written.
    pub(crate) fn made_now(self) -> Result<Payment, sqlx::Error> {
        let Self { amount, currency, recipient } = self;
        let now = OffsetDateTime::now_utc().format(&Rfc3339);
        let created_at = now.map_err(|error| sqlx::Error::Encode(error.into()))?;
        Ok(Payment { id: Uuid::new_v4().to_string(), amount, currency, recipient, created_at })
    }
}

/// The tables, in one of the databases.
#[derive(Debug)]
pub(crate) enum Ledger {
    Sqlite(SqliteLedger),
    Postgres(PostgresLedger),
    MySql(MySqlLedger),
}

impl Ledger {
    /// Opens the database, and creates missing tables.
    ///
    /// It has separate connections even in the store's database, because many payments at once take all of the store's.
    ///
    /// `settle_run_sql` is the statement by which payments under a lease settle their runs.
    pub(crate) async fn open(
        config: &Config,
        settle_run_sql: Option<String>,
    ) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        Ok(match config.ledger()? {
            Database::Sqlite(url) => Self::Sqlite(SqliteLedger::open(url).await?),
            Database::Postgres(url) => Self::Postgres(PostgresLedger::open(url, config, settle_run_sql).await?),
            Database::MySql(url) => Self::MySql(MySqlLedger::open(url).await?),
        })
    }

    /// Moves money. If the run has a transaction, the payment is written in it and commits together with the stored answer,
    /// or not at all. Under the contracts without one, the payment commits in a separate transaction. If payments settle their
    /// runs, `answer` commits there as well.
    pub(crate) async fn pay(
        &self,
        run: &Context,
        tenant: &str,
        payment: &Payment,
        answer: &Answer,
    ) -> Result<(), Problem> {
        let attempt = run.attempt();
        match self {
            Self::Sqlite(ledger) => match transaction_of::<SqliteTransaction>(run)? {
                Some(mut transaction) => ledger.insert(&mut transaction, tenant, payment, attempt).await?,
                None => ledger.insert_alone(tenant, payment, attempt).await?,
            },
            Self::MySql(ledger) => match transaction_of::<MySqlTransaction>(run)? {
                Some(mut transaction) => ledger.insert(&mut transaction, tenant, payment, attempt).await?,
                None => ledger.insert_alone(tenant, payment, attempt).await?,
            },
            Self::Postgres(ledger) => match transaction_of::<PostgresTransaction>(run) {
                Ok(Some(mut transaction)) => ledger.insert(&mut transaction, tenant, payment, attempt).await?,
                Ok(None) => ledger.insert_alone(run, tenant, payment, answer).await?,
                Err(TransactionError::OtherType(_)) => {
                    let mut joined = run.transaction::<JoinedTransaction>()?;
                    ledger.insert(&mut joined.transaction, tenant, payment, attempt).await?;
                }
                Err(error) => return Err(error.into()),
            },
        }
        Ok(())
    }

    /// The tenant's payments, oldest first.
    pub(crate) async fn payments(&self, tenant: &str) -> Result<Vec<Payment>, sqlx::Error> {
        match self {
            Self::Sqlite(ledger) => ledger.payments(tenant).await,
            Self::Postgres(ledger) => ledger.payments(tenant).await,
            Self::MySql(ledger) => ledger.payments(tenant).await,
        }
    }

    /// One payment of the tenant.
    pub(crate) async fn payment(&self, tenant: &str, id: &str) -> Result<Option<Payment>, sqlx::Error> {
        match self {
            Self::Sqlite(ledger) => ledger.payment(tenant, id).await,
            Self::Postgres(ledger) => ledger.payment(tenant, id).await,
            Self::MySql(ledger) => ledger.payment(tenant, id).await,
        }
    }

    /// How often the tenant's money moved, and how much.
    pub(crate) async fn totals(&self, tenant: &str) -> Result<Totals, sqlx::Error> {
        match self {
            Self::Sqlite(ledger) => ledger.totals(tenant).await,
            Self::Postgres(ledger) => ledger.totals(tenant).await,
            Self::MySql(ledger) => ledger.totals(tenant).await,
        }
    }
}

/// A number without a fraction, however it is written: `12.0` is an integer to JSON Schema.
fn whole_number<'de, D: Deserializer<'de>>(number: D) -> Result<i64, D::Error> {
    let number = serde_json::Number::deserialize(number)?;
    let is_whole = |number: &f64| number.fract() == 0.0 && number.abs() <= MAX_AMOUNT as f64;
    let whole = number.as_i64().or_else(|| number.as_f64().filter(is_whole).map(|number| number as i64));
    whole.ok_or_else(|| D::Error::custom("amount is in minor units, from 1 to 9007199254740992"))
}

/// The transaction of the run; `None` under the contracts that have none.
fn transaction_of<T>(run: &Context) -> Result<Option<TransactionGuard<T>>, TransactionError> {
    match run.transaction() {
        Ok(transaction) => Ok(Some(transaction)),
        Err(TransactionError::NotTransactional) => Ok(None),
        Err(error) => Err(error),
    }
}
