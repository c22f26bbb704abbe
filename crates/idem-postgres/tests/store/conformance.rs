//! The Postgres store keeps the contract: on a session, through a transaction-pooling proxy, with records in partitions, and
//! with a pool of the application. The default isolation level of a session changes nothing: the store follows the model on
//! each.

use std::any::Any;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{Configure as _, Offset, PRECISION, Schema, subject};
use crate::world::{World, pool};
use async_trait::async_trait;
use idem_core::TransactionalStore;
use idem_postgres::{PostgresConfig, PostgresStore, PostgresTransaction};
use idem_testkit::{BusinessData, Subject, TransactionalSubject};
use sqlx::AssertSqlSafe;

async fn read_committed() -> Subject {
    subject("one table", |schema| schema.config_with_isolation("read committed")).await
}

async fn repeatable_read() -> Subject {
    subject("one table", |schema| schema.config_with_isolation("repeatable read")).await
}

async fn serializable() -> Subject {
    subject("one table", |schema| schema.config_with_isolation("serializable")).await
}

async fn pooled() -> Subject {
    subject("one table", |schema| schema.config_at(&idem_servers::pgbouncer_url()).through_transaction_pooler()).await
}

async fn partitioned() -> Subject {
    subject("partitioned", |schema| schema.config().partitioned(Duration::from_secs(3600))).await
}

async fn from_pool() -> Subject {
    subject("one table", |schema| {
        PostgresConfig::from_pool(pool(&idem_servers::postgres_url(), &schema.name)).schema(&schema.name)
    })
    .await
}

idem_testkit::conformance!(on_a_read_committed_session, read_committed);
idem_testkit::conformance!(through_a_transaction_pooler, pooled);
idem_testkit::conformance!(in_partitions, partitioned);
idem_testkit::conformance!(with_a_pool_of_the_application, from_pool);

idem_testkit::resolve_conformance!(resolving_on_a_session, read_committed);
idem_testkit::resolve_conformance!(resolving_through_a_transaction_pooler, pooled);
idem_testkit::resolve_conformance!(resolving_in_partitions, partitioned);
idem_testkit::inspect_conformance!(inspecting_on_a_session, read_committed);
idem_testkit::inspect_conformance!(inspecting_through_a_transaction_pooler, pooled);
idem_testkit::inspect_conformance!(inspecting_in_partitions, partitioned);

/// The table of business writes, and the schemas of other stores.
struct Effects(World, Mutex<Vec<Schema>>);

impl std::fmt::Debug for Effects {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Effects").field(&self.0.store).finish()
    }
}

#[async_trait]
impl BusinessData for Effects {
    async fn write(&self, transaction: &mut (dyn Any + Send)) {
        let transaction = transaction.downcast_mut::<PostgresTransaction>().unwrap();
        let insert = format!("INSERT INTO {}.effects (id) VALUES ('')", self.0.name);
        sqlx::raw_sql(AssertSqlSafe(insert)).execute(&mut **transaction).await.unwrap();
    }

    async fn count(&self) -> u64 {
        self.0.number("SELECT count(*) FROM $.effects").await.unsigned_abs()
    }

    async fn opened_again(&self) -> Arc<dyn TransactionalStore> {
        let config = PostgresConfig::new(idem_servers::postgres_url()).schema(&self.0.name);
        Arc::new(PostgresStore::open(config.time_offset(self.0.offset.clone())).await.unwrap())
    }

    async fn another_store(&self) -> Arc<dyn TransactionalStore> {
        let schema = Schema::new();
        let store = PostgresStore::open(schema.config()).await.unwrap();
        self.1.lock().unwrap().push(schema);
        Arc::new(store)
    }
}

fn transactional(world: World) -> TransactionalSubject {
    let (store, time) = (Arc::new(world.store.clone()), Arc::new(Offset(world.offset.clone())));
    TransactionalSubject::new(store, Arc::new(Effects(world, Mutex::default())), time).with_precision(PRECISION)
}

async fn transactions() -> TransactionalSubject {
    transactional(World::shared().await)
}

async fn transactions_through_a_pooler() -> TransactionalSubject {
    transactional(World::pooled().await)
}

async fn transactions_from_pool() -> TransactionalSubject {
    transactional(World::from_pool().await)
}

idem_testkit::transactional_conformance!(transactions_on_a_session, transactions);
idem_testkit::transactional_conformance!(transactions_through_a_transaction_pooler, transactions_through_a_pooler);
idem_testkit::transactional_conformance!(transactions_with_a_pool_of_the_application, transactions_from_pool);

/// Each verb is a round trip to a server.
const CASES: u32 = 300;

idem_testkit::state_machine!(the_store_follows_the_model_on_a_read_committed_session, read_committed, CASES);
idem_testkit::state_machine!(the_store_follows_the_model_on_a_repeatable_read_session, repeatable_read, CASES);
idem_testkit::state_machine!(the_store_follows_the_model_on_a_serializable_session, serializable, CASES);
idem_testkit::state_machine!(the_store_follows_the_model_through_a_transaction_pooler, pooled, CASES);
idem_testkit::state_machine!(the_store_follows_the_model_in_partitions, partitioned, CASES);
idem_testkit::state_machine!(the_store_follows_the_model_with_a_pool_of_the_application, from_pool, CASES);
