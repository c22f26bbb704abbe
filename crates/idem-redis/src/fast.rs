//! Redis as a cache in front of a durable store: it may lose every entry.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{
    FastEntry, FastRead, FastStore, RecordId, SettlementListener, StoreError, StoreErrorKind, TimeOffset, Timestamp,
};
use redis::Value;

use crate::config::RedisConfig;
use crate::error::Phase;
use crate::keys::Keys;
use crate::reply;
use crate::script::{Arg, Exchange, FastScripts, Question, Script};
use crate::subscription::Subscription;
use crate::transport::Transport;

/// The default timeout of a verb: the durable store would have answered a caller that waits longer.
const TIMEOUT: Duration = Duration::from_millis(100);

/// A [`FastStore`] in Redis: the cache that `idem-hybrid` puts in front of Postgres. Clones share everything.
///
/// It uses one key per record, separate from the keys of a [`RedisStore`](crate::RedisStore) with the same prefix. It needs
/// no persistence and no replicas. The server may evict any entry: `maxmemory-policy allkeys-lru` suits it.
#[derive(Clone)]
pub struct RedisFastStore {
    shared: Arc<Shared>,
}

struct Shared {
    transport: Transport,
    scripts: FastScripts,
    keys: Keys,
    offset: TimeOffset,
    subscription: Subscription,
}

impl RedisFastStore {
    /// Makes the store without connecting: a server that is down costs latency only.
    ///
    /// It ignores the settings for replicas and eviction in `config`. The default [timeout](RedisConfig::timeout) is 100 ms.
    ///
    /// Call it inside the tokio runtime that will use it.
    ///
    /// # Errors
    /// [`StoreErrorKind::Misconfigured`] when the URL or the key prefix is invalid, or outside a tokio runtime.
    pub fn new(config: RedisConfig) -> Result<Self, StoreError> {
        let runtime = tokio::runtime::Handle::try_current().map_err(|error| {
            let message = "a fast store has to be made inside a tokio runtime";
            StoreError::new(StoreErrorKind::Misconfigured, message).with_source(error)
        })?;
        let keys = Keys::new(&config.key_prefix);
        let timeout = config.timeout.unwrap_or(TIMEOUT);
        let shared = Shared {
            transport: Transport::new(config.servers(timeout)?, timeout, 0),
            scripts: FastScripts::new(),
            subscription: Subscription::new(config.servers(timeout)?, keys.clone(), runtime),
            keys,
            offset: config.offset,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    async fn run(&self, what: &str, script: &Script, id: &RecordId, args: &[Arg<'_>]) -> Result<Value, StoreError> {
        let key = self.shared.keys.fast(id);
        let exchange = Exchange { key: key.as_bytes(), question: Question::Script(script, args), replicas: None };
        let transport = &self.shared.transport;
        let reply = transport.run(&exchange, transport.deadline()).await;
        let [value] = reply::array(reply.map_err(|failure| failure.of(what, Phase::Serving))?.values)?;
        Ok(value)
    }

    fn now(&self) -> Arg<'_> {
        Arg::Number(self.shared.offset.micros())
    }
}

#[async_trait]
impl FastStore for RedisFastStore {
    async fn get(&self, id: &RecordId, claim: Option<Duration>) -> Result<FastRead, StoreError> {
        let args = [self.now(), milliseconds(claim)];
        let answer = self.run("get an entry", &self.shared.scripts.get, id, &args).await?;
        // The entry may turn the caller away, which then waits for a settlement.
        self.shared.subscription.keep();
        reply::fast_read(answer)
    }

    async fn put(&self, id: &RecordId, entry: &FastEntry) -> Result<Timestamp, StoreError> {
        let rank = entry.rank.to_string();
        let until = Arg::Number(entry.until.unix_micros());
        let args = [self.now(), Arg::Bytes(rank.as_bytes()), until, Arg::Bytes(&entry.bytes)];
        reply::time(&self.run("put an entry", &self.shared.scripts.put, id, &args).await?)
    }

    async fn remove(&self, id: &RecordId, rank: u64, claim: Option<Duration>) -> Result<Timestamp, StoreError> {
        let (rank, told) = (rank.to_string(), self.shared.keys.of(id));
        let channel = Arg::Bytes(self.shared.subscription.channel());
        let claim = milliseconds(claim);
        let args = [self.now(), Arg::Bytes(rank.as_bytes()), claim, channel, Arg::Bytes(told.as_bytes())];
        reply::time(&self.run("remove an entry", &self.shared.scripts.remove, id, &args).await?)
    }

    fn on_settled(&self, listener: Weak<dyn SettlementListener>) {
        self.shared.subscription.tell(listener);
    }
}

/// How long a claim lasts; 0 for none.
fn milliseconds(claim: Option<Duration>) -> Arg<'static> {
    Arg::Number(claim.map_or(0, |life| i64::try_from(life.as_millis()).unwrap_or(i64::MAX).max(1)))
}

impl fmt::Debug for RedisFastStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("RedisFastStore").field("keys", &self.shared.keys).finish_non_exhaustive()
    }
}
