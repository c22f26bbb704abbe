//! The SQLite store keeps the contract.

use std::any::Any;
use std::sync::{Arc, Mutex};

use crate::support::Database;
use async_trait::async_trait;
use idem_core::TransactionalStore;
use idem_sqlite::{SqliteStore, SqliteTransaction};
use idem_testkit::{BusinessData, TransactionalSubject};
use tempfile::TempDir;

/// Few cases are enough. Every verb is written to the disk, and the state machine itself decides it, so there is no
/// translation to test.
const CASES: u32 = 500;

idem_testkit::conformance!(Database::subject);
idem_testkit::resolve_conformance!(resolving, Database::subject);
idem_testkit::inspect_conformance!(inspecting, Database::subject);
idem_testkit::state_machine!(the_store_follows_the_model, Database::subject, CASES);

/// A database with a table of effects, and the folders of other databases.
struct Effects(Database, Mutex<Vec<TempDir>>);

impl std::fmt::Debug for Effects {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Effects").field(&self.0.store).finish()
    }
}

#[async_trait]
impl BusinessData for Effects {
    async fn write(&self, transaction: &mut (dyn Any + Send)) {
        let transaction = transaction.downcast_mut::<SqliteTransaction>().unwrap();
        sqlx::raw_sql("INSERT INTO effects DEFAULT VALUES").execute(&mut **transaction).await.unwrap();
    }

    async fn count(&self) -> u64 {
        let count = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM effects");
        count.fetch_one(self.0.store.pool()).await.unwrap().unsigned_abs()
    }

    async fn opened_again(&self) -> Arc<dyn TransactionalStore> {
        Arc::new(self.0.another().await)
    }

    async fn another_store(&self) -> Arc<dyn TransactionalStore> {
        let Database { store, folder, .. } = Database::new().await;
        self.1.lock().unwrap().push(folder);
        Arc::new(store)
    }
}

async fn transactions_on(database: Database) -> TransactionalSubject {
    let (store, clock): (SqliteStore, _) = (database.store.clone(), database.clock.clone());
    sqlx::raw_sql("CREATE TABLE effects (id INTEGER PRIMARY KEY)").execute(store.pool()).await.unwrap();
    TransactionalSubject::new(Arc::new(store), Arc::new(Effects(database, Mutex::default())), clock)
}

async fn transactions() -> TransactionalSubject {
    transactions_on(Database::new().await).await
}

async fn transactions_from_pool() -> TransactionalSubject {
    transactions_on(Database::from_pool().await).await
}

idem_testkit::transactional_conformance!(transactions);
idem_testkit::transactional_conformance!(transactions_with_a_pool_of_the_application, transactions_from_pool);
