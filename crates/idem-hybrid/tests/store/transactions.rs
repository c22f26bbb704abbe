//! Redis in front of Postgres, with the business writes in Postgres.

use std::any::Any;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{
    AcquireOutcome, IdempotencyStore as _, OwnerOutcome, ReplayKind, Settlement, StoredResponse, TransactionalStore,
};
use idem_hybrid::HybridStore;
use idem_postgres::{PostgresStore, PostgresTransaction};
use idem_redis::{RedisConfig, RedisFastStore};
use idem_schemas::Schema;
use idem_testkit::fixture::{KEPT, repeat_of, request};
use idem_testkit::{BusinessData, TransactionalSubject};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Row as _};

use crate::support::{PATIENCE, Time, durable, eventually, fresh_prefix, patient};

/// Stores of one process, in a schema with a table of business writes.
struct Process {
    schema: Arc<Schema>,
    prefix: String,
    time: Time,
    postgres: Arc<PostgresStore>,
    hybrid: Arc<HybridStore<PostgresStore>>,
}

async fn open(schema: &Arc<Schema>, prefix: String, time: Time) -> Process {
    let postgres = PostgresStore::open(durable(schema).time_offset(time.0.clone())).await.unwrap();
    let redis = RedisConfig::new(idem_servers::redis_url()).key_prefix(&prefix).timeout(PATIENCE);
    let fast = Arc::new(RedisFastStore::new(redis.time_offset(time.0.clone())).unwrap());
    let postgres = Arc::new(postgres);
    let hybrid = Arc::new(HybridStore::new(Arc::clone(&postgres), fast, patient()));
    Process { schema: Arc::clone(schema), prefix, time, postgres, hybrid }
}

async fn process() -> Process {
    let schema = Arc::new(Schema::new());
    let process = open(&schema, fresh_prefix(), Time::default()).await;
    process.sql(&format!("CREATE TABLE {}.effects (id INTEGER)", schema.name)).await;
    process
}

impl Process {
    async fn sql(&self, sql: &str) -> Vec<sqlx::postgres::PgRow> {
        let mut connection = PgConnection::connect(&idem_servers::postgres_url()).await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).fetch_all(&mut connection).await.unwrap()
    }
}

/// The business writes of a process, and the schemas of other stores.
struct Effects(Process, Mutex<Vec<Process>>);

impl std::fmt::Debug for Effects {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Effects").field(&self.0.hybrid).finish()
    }
}

#[async_trait]
impl BusinessData for Effects {
    async fn write(&self, transaction: &mut (dyn Any + Send)) {
        let transaction = transaction.downcast_mut::<PostgresTransaction>().unwrap();
        let insert = format!("INSERT INTO {}.effects VALUES (1)", self.0.schema.name);
        sqlx::raw_sql(AssertSqlSafe(insert)).execute(&mut **transaction).await.unwrap();
    }

    async fn count(&self) -> u64 {
        let rows = self.0.sql(&format!("SELECT count(*) FROM {}.effects", self.0.schema.name)).await;
        rows[0].get::<i64, _>(0).unsigned_abs()
    }

    async fn opened_again(&self) -> Arc<dyn TransactionalStore> {
        open(&self.0.schema, self.0.prefix.clone(), self.0.time.clone()).await.hybrid
    }

    async fn another_store(&self) -> Arc<dyn TransactionalStore> {
        let other = process().await;
        let hybrid = Arc::clone(&other.hybrid);
        self.1.lock().unwrap().push(other);
        hybrid
    }
}

async fn transactions() -> TransactionalSubject {
    let process = process().await;
    let (store, time) = (Arc::clone(&process.hybrid), Arc::new(process.time.clone()));
    TransactionalSubject::new(store, Arc::new(Effects(process, Mutex::default())), time).with_precision(PATIENCE)
}

idem_testkit::transactional_conformance!(transactions);

/// What a process does after its handler has settled the run.
#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    Same,
    Other,
    Dies,
}

/// A handler settles its run by SQL, which Redis does not see.
#[tokio::test]
async fn a_run_that_its_handler_settled_by_sql_is_replayed() {
    for end in [End::Same, End::Other, End::Dies] {
        let (process, request) = (process().await, request());
        let AcquireOutcome::Acquired(lease) = process.hybrid.acquire(&request).await.unwrap() else { panic!() };
        let mut connection = PgConnection::connect(&idem_servers::postgres_url()).await.unwrap();
        let mut business = connection.begin().await.unwrap();
        // Counts as a write.
        sqlx::raw_sql("SELECT pg_current_xact_id()").execute(&mut *business).await.unwrap();
        let settle = sqlx::query(AssertSqlSafe(process.postgres.settle_run_sql()));
        let settle = settle.bind(lease.id.as_bytes().as_slice()).bind(lease.owner.as_bytes().as_slice());
        let settle = settle.bind("completed").bind(201_i32).bind(Vec::<String>::new()).bind(Vec::<String>::new());
        settle.bind(b"paid".as_slice()).bind(3600_i64).execute(&mut *business).await.unwrap();
        business.commit().await.unwrap();
        let paid = StoredResponse::new(201, "paid");
        let (answer, expected) = match end {
            End::Same => (Some(paid.clone()), OwnerOutcome::Applied),
            End::Other => (Some(StoredResponse::new(500, "the answer to COMMIT was lost")), OwnerOutcome::LeaseLost),
            End::Dies => (None, OwnerOutcome::Applied),
        };
        if let Some(answer) = answer {
            let settled = process.hybrid.settle(&lease, &Settlement::Completed(answer), KEPT).await.unwrap();
            assert_eq!(settled, expected);
        }
        // The lock in Redis ends with the run, and lasts no longer than the lease if the process dies.
        let replay =
            eventually("the answer", async || match process.hybrid.acquire(&repeat_of(&request)).await.unwrap() {
                AcquireOutcome::Replay(replay) => Some(replay),
                AcquireOutcome::InProgress { .. } if end == End::Dies => {
                    process.time.0.advance(Duration::from_secs(1));
                    None
                }
                other => panic!("{other:?}"),
            });
        let replay = replay.await;
        assert_eq!((replay.response, replay.kind, replay.attempt), (paid, ReplayKind::Completed, 1), "{end:?}");
    }
}
