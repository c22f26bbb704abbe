//! What everybody in one cell shares, and the servers behind it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use idem_faults::{Cell, Contract, Key, Operation, Payment, Promise, Store};
use idem_servers::{Postgres, Redis, redis_command};
use sqlx::{Connection, Row};
use tempfile::TempDir;

use crate::Error;
use crate::client::read_recipient;
use crate::service::{Ports, Service};

/// So short that what a dead process has left behind is taken over many times in a run.
pub(crate) const LEASE: Duration = Duration::from_secs(2);

/// How much longer than a lease a key may be without an answer once everything is well: connections are made anew, and
/// everything that has no answer is asked for at once.
const MARGIN: Duration = Duration::from_secs(10);

/// How many services there are, one on each framework.
pub(crate) const SERVICES: usize = 2;

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) started: Instant,
    pub(crate) lease: Duration,
    /// Where clients find the services.
    pub(crate) ports: Vec<u16>,
    pub(crate) keys: AtomicU64,
    pub(crate) over: AtomicBool,
    pub(crate) history: Mutex<Vec<Operation>>,
}

impl World {
    pub(crate) fn new(services: &[Service]) -> Self {
        Self {
            started: Instant::now(),
            lease: LEASE,
            ports: services.iter().map(|service| service.to_service.port()).collect(),
            keys: AtomicU64::new(0),
            over: AtomicBool::new(false),
            history: Mutex::default(),
        }
    }

    /// What is asked for under a key, unless the body is altered: then it is one more.
    pub(crate) fn amount_of(&self, key: &Key) -> i64 {
        1 + 2 * (key.key % 1000) as i64
    }
}

/// The servers of one cell, whose data are gone with it.
#[derive(Debug)]
pub(crate) struct Servers {
    pub(crate) postgres: Option<Postgres>,
    pub(crate) redis: Option<Redis>,
    pub(crate) folder: TempDir,
}

impl Servers {
    pub(crate) fn start(cell: Cell) -> Result<Self, Error> {
        let postgres = (cell.store != Store::Redis).then(Postgres::start).transpose()?;
        // Alone, it has to survive its crashes.
        let durable = ["--appendonly", "yes", "--appendfsync", "always"];
        let settings: &[&str] = if cell.store == Store::Redis { &durable } else { &[] };
        let redis = (cell.store != Store::Postgres).then(|| Redis::start_with(settings)).transpose()?;
        Ok(Self { postgres, redis, folder: TempDir::new()? })
    }

    pub(crate) fn ports(&self) -> Ports {
        Ports { postgres: self.postgres.as_ref().map(Postgres::port), redis: self.redis.as_ref().map(Redis::port) }
    }

    /// What really happened: the ledger, in the order in which it was written.
    pub(crate) async fn effects(&self, cell: Cell) -> Result<Vec<Payment>, Error> {
        let columns = "SELECT payment.id, payment.recipient, payment.amount, CAST(ledger.attempt AS BIGINT)";
        let rows: Vec<(String, String, i64, i64)> = match &self.postgres {
            Some(postgres) if cell.contract == Contract::Transactional => {
                let sql = format!(
                    "{columns} FROM payments.ledger JOIN payments.payments AS payment ON payment.id = ledger.payment \
                     ORDER BY ledger.id"
                );
                let mut connection = sqlx::PgConnection::connect(&postgres.url()).await?;
                let rows = sqlx::query(sqlx::AssertSqlSafe(sql)).fetch_all(&mut connection).await?;
                rows.iter()
                    .map(|row| Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?, row.try_get(3)?)))
                    .collect::<Result<_, sqlx::Error>>()?
            }
            _ => {
                let sql = format!(
                    "{columns} FROM ledger JOIN payments AS payment ON payment.id = ledger.payment ORDER BY ledger.id"
                );
                let url = format!("sqlite://{}", self.folder.path().join("ledger.db").display());
                let mut connection = sqlx::SqliteConnection::connect(&url).await?;
                let rows = sqlx::query(sqlx::AssertSqlSafe(sql)).fetch_all(&mut connection).await?;
                rows.iter()
                    .map(|row| Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?, row.try_get(3)?)))
                    .collect::<Result<_, sqlx::Error>>()?
            }
        };
        let read = |(id, recipient, amount, attempt): (String, String, i64, i64)| {
            let key = read_recipient(&recipient).ok_or_else(|| format!("a payment to {recipient:?}"))?;
            Ok(Payment { id, key, amount, attempt: attempt.try_into()? })
        };
        rows.into_iter().map(read).collect()
    }

    /// What is left over when nobody asks any more, in words; nothing should be.
    pub(crate) async fn leaks(&self) -> Result<Vec<String>, Error> {
        let mut leaks = Vec::new();
        if let Some(postgres) = &self.postgres {
            let mut connection = sqlx::PgConnection::connect(&postgres.url()).await?;
            let sql = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'";
            let open: i64 = sqlx::query(sql).fetch_one(&mut connection).await?.try_get(0)?;
            if open > 0 {
                leaks.push(format!("{open} transactions are open"));
            }
        }
        if let Some(redis) = &self.redis {
            const IMMORTAL: &str = "local immortal = 0
                for _, key in ipairs(redis.call('KEYS', '*')) do
                    if redis.call('TTL', key) < 0 then immortal = immortal + 1 end
                end
                return immortal";
            let immortal = redis_command(redis.port(), &["EVAL", IMMORTAL, "0"])?.integer().unwrap_or_default();
            if immortal > 0 {
                leaks.push(format!("{immortal} keys of Redis have no end"));
            }
        }
        Ok(leaks)
    }
}

/// What a cell promises.
pub(crate) fn promise(cell: Cell) -> Promise {
    let stale_lock = match (cell.store, cell.contract) {
        (Store::Hybrid, _) => LEASE + Duration::from_secs(1),
        (Store::Postgres | Store::Redis, _) => Duration::ZERO,
    };
    Promise {
        at_most_one_effect: cell.contract != Contract::AtLeastOnce,
        may_be_unknown: cell.contract == Contract::AtMostOnce,
        stale_lock,
        live_within: LEASE + MARGIN,
    }
}
