//! The MySQL store keeps the contract.

use std::any::Any;
use std::sync::Arc;

use async_trait::async_trait;
use idem_core::TransactionalStore;
use idem_mysql::{MySqlConfig, MySqlStore, MySqlTransaction};
use idem_testkit::{BusinessData, TransactionalSubject};

use crate::support::{Database, Offset, PRECISION, number, sql, subject};

/// Few cases are enough: the state machine itself decides each verb, so there is no translation to test.
const CASES: u32 = 60;

idem_testkit::conformance!(subject);
idem_testkit::resolve_conformance!(resolving, subject);
idem_testkit::inspect_conformance!(inspecting, subject);
idem_testkit::state_machine!(the_store_follows_the_model, subject, CASES);

/// A database with a table of effects.
struct Effects(Database);

impl std::fmt::Debug for Effects {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Effects").field(&self.0.name).finish()
    }
}

#[async_trait]
impl BusinessData for Effects {
    async fn write(&self, transaction: &mut (dyn Any + Send)) {
        let transaction = transaction.downcast_mut::<MySqlTransaction>().unwrap();
        sqlx::raw_sql("INSERT INTO effects () VALUES ()").execute(&mut **transaction).await.unwrap();
    }

    async fn count(&self) -> u64 {
        number(&mut self.0.connection().await, "SELECT COUNT(*) FROM effects").await.unsigned_abs()
    }

    async fn opened_again(&self) -> Arc<dyn TransactionalStore> {
        Arc::new(self.0.store().await)
    }

    async fn another_store(&self) -> Arc<dyn TransactionalStore> {
        Arc::new(Database::new().await.store().await)
    }
}

async fn transactions_on(database: Database, config: MySqlConfig) -> TransactionalSubject {
    let store = MySqlStore::open(config).await.unwrap();
    sql(&mut database.connection().await, "CREATE TABLE effects (id INT AUTO_INCREMENT PRIMARY KEY)").await;
    let time = Arc::new(Offset(database.offset.clone()));
    TransactionalSubject::new(Arc::new(store), Arc::new(Effects(database)), time).with_precision(PRECISION)
}

async fn transactions() -> TransactionalSubject {
    let database = Database::new().await;
    let config = database.config();
    transactions_on(database, config).await
}

async fn transactions_from_pool() -> TransactionalSubject {
    let database = Database::new().await;
    let config = MySqlConfig::from_pool(database.pool()).time_offset(database.offset.clone());
    transactions_on(database, config).await
}

idem_testkit::transactional_conformance!(transactions);
idem_testkit::transactional_conformance!(transactions_with_a_pool_of_the_application, transactions_from_pool);
