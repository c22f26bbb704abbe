//! Two stores together keep the contract of one: with both sides and with either, in memory, on a file, and on servers.

use std::sync::Arc;

use crate::support::{InMemory, MemoryFast, durable, fresh_prefix, patient, servers, servers_at};
use idem_core::Timestamp;
use idem_core::memory::ManualClock;
use idem_hybrid::{HybridConfig, HybridStore};
use idem_postgres::PostgresStore;
use idem_redis::{RedisConfig, RedisFastStore};
use idem_schemas::Schema;
use idem_sqlite::{SqliteConfig, SqliteStore};
use idem_testkit::Subject;
use tempfile::TempDir;

async fn in_memory() -> Subject {
    InMemory::new(patient()).subject()
}

async fn on_a_file() -> Subject {
    let folder = TempDir::new().unwrap();
    let clock = Arc::new(ManualClock::new(Timestamp::from_unix_micros(1_767_225_600_000_000)));
    let url = format!("sqlite://{}", folder.path().join("records.db").display());
    let config = SqliteConfig::new(url).dangerous_synchronous_normal().clock(clock.clone());
    let durable = Arc::new(SqliteStore::open(config).await.unwrap());
    let fast = Arc::new(MemoryFast::new(clock.clone()));
    let store = Arc::new(HybridStore::new(Arc::clone(&durable), fast, patient()));
    Subject::new(store.clone(), durable, clock).operated_by(store.clone()).inspected_by(store).keeping(folder)
}

async fn both_sides() -> Subject {
    servers(patient()).await
}

async fn locks_alone() -> Subject {
    servers(patient().without_cache()).await
}

async fn cache_alone() -> Subject {
    servers(patient().without_locks()).await
}

async fn in_front_of_a_cluster() -> Subject {
    servers_at(&idem_servers::redis_cluster_url(), patient()).await
}

/// Redis is down, and stays so.
async fn redis_away() -> Subject {
    servers_at("redis://127.0.0.1:1", patient()).await
}

idem_testkit::conformance!(memory_in_front_of_memory, in_memory);
idem_testkit::conformance!(memory_in_front_of_a_file, on_a_file);
idem_testkit::conformance!(redis_in_front_of_postgres, both_sides);
idem_testkit::conformance!(locks_in_front_of_postgres, locks_alone);
idem_testkit::conformance!(a_cache_in_front_of_postgres, cache_alone);
idem_testkit::conformance!(a_cluster_in_front_of_postgres, in_front_of_a_cluster);
idem_testkit::conformance!(nothing_in_front_of_postgres, redis_away);

idem_testkit::resolve_conformance!(resolving_behind_memory, on_a_file);
idem_testkit::resolve_conformance!(resolving_behind_redis, both_sides);
idem_testkit::inspect_conformance!(inspecting_behind_memory, on_a_file);
idem_testkit::inspect_conformance!(inspecting_behind_redis, both_sides);

#[test]
fn an_operation_that_keeps_its_runtime_busy_keeps_its_lease() {
    let (schema, prefix) = (Schema::new(), fresh_prefix());
    idem_testkit::renewals::a_busy_runtime_keeps_its_leases(async || {
        let durable = Arc::new(PostgresStore::open(durable(&schema)).await.unwrap());
        let config = RedisConfig::new(idem_servers::redis_url()).key_prefix(&prefix);
        let fast = Arc::new(RedisFastStore::new(config).unwrap());
        Arc::new(HybridStore::new(durable, fast, HybridConfig::new()))
    });
}

/// Each verb is round trips to two servers.
const CASES: u32 = 100;

idem_testkit::state_machine!(the_store_follows_the_model_in_memory, in_memory, 500);
idem_testkit::state_machine!(the_store_follows_the_model_on_servers, both_sides, CASES);
idem_testkit::state_machine!(the_store_follows_the_model_with_locks_alone, locks_alone, CASES);
idem_testkit::state_machine!(the_store_follows_the_model_with_a_cache_alone, cache_alone, CASES);
