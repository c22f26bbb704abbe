//! What a service in Rust writes by hand: the statements of the `pgbench` scripts, prepared, through a pool of sqlx.
//!
//! `pgbench` is a program in C that does nothing else, and on one machine its clients leave more of the processors to the server
//! than a service does. It bounds what is possible; this is the alternative that a user has.

use sqlx::postgres::PgPoolOptions;
use sqlx::{PgConnection, PgPool};

use super::crowd::CLIENTS;
use crate::error::Error;

const LOCK: &str = "SELECT pg_try_advisory_xact_lock($1)";
const CLAIM: &str = "INSERT INTO hand_records (key, state, fingerprint, token, expires_at) VALUES (sha256(int8send($1)), 1, \
     sha256('f'), '\\x00112233445566778899aabbccddeeff', now() + INTERVAL '1 day') ON CONFLICT DO NOTHING RETURNING 1";
const PAY: &str = "INSERT INTO ledger (account, amount, memo) VALUES ($1, 100, 'pay') RETURNING id";
const SETTLE: &str = "UPDATE hand_records SET state = 2, status = 200, response = convert_to(repeat('x', 512), 'UTF8') \
     WHERE key = sha256(int8send($1)) AND token = '\\x00112233445566778899aabbccddeeff' AND state = 1";
const REPLAY: &str = "SELECT state, fingerprint, status, response FROM hand_replays \
     WHERE key = sha256(int8send($1)) AND expires_at > now()";

#[derive(Clone)]
pub(super) struct ByHand(PgPool);

impl ByHand {
    pub(super) fn open(url: &str) -> Result<Self, Error> {
        // Sqlx asks each connection that comes back whether it lives, which is one exchange more. It would ask before each use as
        // well, which a careful team turns off.
        let pool = PgPoolOptions::new().max_connections(CLIENTS as u32).test_before_acquire(false);
        Ok(Self(pool.connect_lazy(url)?))
    }

    /// Two statements, and what the pool adds.
    pub(super) async fn cycle(&self, number: i64) -> Result<(), Error> {
        let mut connection = self.0.acquire().await?;
        claim(&mut connection, number).await?;
        settle(&mut connection, number).await
    }

    /// Six round trips, and what the pool adds.
    pub(super) async fn transaction(&self, number: i64) -> Result<(), Error> {
        let mut transaction = self.0.begin().await?;
        let locked: bool = sqlx::query_scalar(LOCK).bind(number).fetch_one(&mut *transaction).await?;
        if !locked {
            return Err(format!("operation {number} is running").into());
        }
        claim(&mut transaction, number).await?;
        sqlx::query(PAY).bind(number).fetch_one(&mut *transaction).await?;
        settle(&mut transaction, number).await?;
        Ok(transaction.commit().await?)
    }

    pub(super) async fn replay(&self, number: i64) -> Result<(), Error> {
        sqlx::query(REPLAY).bind(number).fetch_one(&self.0).await?;
        Ok(())
    }
}

async fn claim(connection: &mut PgConnection, number: i64) -> Result<(), Error> {
    let claimed = sqlx::query(CLAIM).bind(number).fetch_optional(connection).await?;
    claimed.map(|_| ()).ok_or_else(|| format!("record {number} was there already").into())
}

async fn settle(connection: &mut PgConnection, number: i64) -> Result<(), Error> {
    match sqlx::query(SETTLE).bind(number).execute(connection).await?.rows_affected() {
        1 => Ok(()),
        _ => Err(format!("the lease of record {number} was lost").into()),
    }
}
