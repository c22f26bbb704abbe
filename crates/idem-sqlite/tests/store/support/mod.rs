//! A store in a new folder, on a clock that stands still.

use std::sync::Arc;

use idem_core::Timestamp;
use idem_core::memory::ManualClock;
use idem_sqlite::{SqliteConfig, SqliteStore};
use idem_testkit::Subject;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};
use tempfile::TempDir;

pub struct Database {
    pub store: SqliteStore,
    pub clock: Arc<ManualClock>,
    pub folder: TempDir,
}

impl Database {
    pub async fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let clock = Arc::new(ManualClock::new(Timestamp::from_unix_micros(1_767_225_600_000_000)));
        let store = SqliteStore::open(Self::config(&folder).clock(clock.clone())).await.unwrap();
        Self { store, clock, folder }
    }

    /// The same with a pool of the application.
    pub async fn from_pool() -> Self {
        let Self { clock, folder, .. } = Self::new().await;
        let file = SqliteConnectOptions::new().filename(folder.path().join("records.db"));
        let pool = SqlitePoolOptions::new().max_connections(17).connect_lazy_with(file);
        let config = SqliteConfig::from_pool(pool).dangerous_synchronous_normal().clock(clock.clone());
        Self { store: SqliteStore::open(config).await.unwrap(), clock, folder }
    }

    /// Does not sync to the disk, which these tests do not need and which would take most of their time.
    pub fn config(folder: &TempDir) -> SqliteConfig {
        let url = format!("sqlite://{}", folder.path().join("records.db").display());
        SqliteConfig::new(url).dangerous_synchronous_normal()
    }

    /// Another store on the same file, as another process would have.
    pub async fn another(&self) -> SqliteStore {
        SqliteStore::open(Self::config(&self.folder).clock(self.clock.clone())).await.unwrap()
    }

    pub async fn subject() -> Subject {
        let Self { store, clock, folder } = Self::new().await;
        let store = Arc::new(store);
        Subject::new(store.clone(), store.clone(), clock).operated_by(store.clone()).inspected_by(store).keeping(folder)
    }
}
