//! The Postgres store keeps the contract: on a session, through a transaction-pooling proxy, with records in partitions, and
//! with a pool of the application. The
//! isolation level that a session has by default changes nothing: the store follows the model on each.

use std::time::Duration;

use crate::support::{Configure as _, subject};
use crate::world::pool;
use idem_postgres::PostgresConfig;
use idem_testkit::Subject;

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

/// Each verb is a round trip to a server.
const CASES: u32 = 300;

idem_testkit::state_machine!(the_store_follows_the_model_on_a_read_committed_session, read_committed, CASES);
idem_testkit::state_machine!(the_store_follows_the_model_on_a_repeatable_read_session, repeatable_read, CASES);
idem_testkit::state_machine!(the_store_follows_the_model_on_a_serializable_session, serializable, CASES);
idem_testkit::state_machine!(the_store_follows_the_model_through_a_transaction_pooler, pooled, CASES);
idem_testkit::state_machine!(the_store_follows_the_model_in_partitions, partitioned, CASES);
idem_testkit::state_machine!(the_store_follows_the_model_with_a_pool_of_the_application, from_pool, CASES);
