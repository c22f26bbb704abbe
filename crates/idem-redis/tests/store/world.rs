//! A store, and direct access to its server for tests.

use std::time::{Duration, Instant};

use idem_core::{
    Acquire, AcquireOutcome, IdempotencyStore as _, Lease, OwnerOutcome, RecordId, Settlement, StoreError,
};
use idem_redis::{RedisConfig, RedisStore};
use idem_servers::{Reply, redis_command};
use idem_testkit::fixture::{KEPT, completed, request};

use crate::support::fresh_prefix;

/// The timeout for a loaded machine. Tests about time set another one.
const PATIENCE: Duration = Duration::from_secs(10);

pub struct World {
    pub store: RedisStore,
    pub prefix: String,
    /// The port of the server, or of one of them.
    pub port: u16,
}

impl World {
    /// A store with a fresh key prefix.
    pub async fn at(url: &str, port: u16) -> Self {
        Self::with(url, port, |config| config).await
    }

    pub async fn with(url: &str, port: u16, configure: impl FnOnce(RedisConfig) -> RedisConfig) -> Self {
        let prefix = fresh_prefix();
        let config = configure(RedisConfig::new(url).key_prefix(&prefix).timeout(PATIENCE));
        Self { store: RedisStore::open(config).await.unwrap(), prefix, port }
    }

    /// A store in the server that all tests share.
    pub async fn shared() -> Self {
        let url = idem_servers::redis_url();
        let port = crate::support::ports(&url)[0];
        Self::at(&url, port).await
    }

    pub fn key(&self, id: &RecordId) -> String {
        format!("{}{{{id}}}", self.prefix)
    }

    /// Sends a command to the server, past the store.
    pub fn ask<W: AsRef<[u8]>>(&self, words: &[W]) -> Reply {
        redis_command(self.port, words).unwrap()
    }

    /// The bytes under the key of a record; the README describes them.
    pub fn stored(&self, id: &RecordId) -> Vec<u8> {
        stored(self.port, &self.key(id))
    }

    /// Replaces these bytes, and keeps the TTL.
    pub fn store(&self, id: &RecordId, bytes: &[u8]) {
        self.ask(&[&b"SET"[..], self.key(id).as_bytes(), bytes, b"KEEPTTL"]);
    }

    pub async fn lease(&self, request: &Acquire) -> Result<Lease, StoreError> {
        match self.store.acquire(request).await? {
            AcquireOutcome::Acquired(lease) => Ok(lease),
            other => panic!("expected Acquired, got {other:?}"),
        }
    }

    pub async fn complete(&self, lease: &Lease) -> Result<OwnerOutcome, StoreError> {
        self.settle(lease, &completed()).await
    }

    pub async fn settle(&self, lease: &Lease, settlement: &Settlement) -> Result<OwnerOutcome, StoreError> {
        self.store.settle(lease, settlement, KEPT).await
    }

    /// Checks that the store acquires, settles and reads.
    pub async fn is_whole(&self) {
        let lease = self.lease(&request()).await.unwrap();
        assert_eq!(self.complete(&lease).await.unwrap(), OwnerOutcome::Applied);
        assert!(self.store.peek(&lease.id).await.unwrap().unwrap().replay().is_some());
    }
}

fn stored(port: u16, key: &str) -> Vec<u8> {
    match redis_command(port, &["GET", key]).unwrap() {
        Reply::Bytes(bytes) => bytes,
        other => panic!("{other:?}"),
    }
}

/// The state number of the record under `key`.
pub fn stored_state(port: u16, key: &str) -> u8 {
    stored(port, key)[2]
}

/// Looks again until `look` finds something.
pub async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let patience = Duration::from_secs(30);
    let begun = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(begun.elapsed() < patience, "within {patience:?} it did not come true that {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
