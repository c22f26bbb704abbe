//! The store: its verbs, and what they share.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{
    Acquire, AcquireOutcome, Capabilities, Checkpoint, Erase, EraseOutcome, IdempotencyStore, Lease, LeaseRenewer,
    LiveRecord, Operate, OwnerAction, OwnerOutcome, Record, RecordId, Repair, RepairNote, Resolve, ResolveOutcome,
    Settlement, SettlementListener, StoreError, Term,
};

use crate::config::{RedisConfig, TIMEOUT};
use crate::keys::Keys;
use crate::packed::Ending;
use crate::script::Scripts;
use crate::subscription::Subscription;
use crate::transport::Transport;
use crate::verb::{Shared, Verb};

/// The idempotency store in Redis: one string for each record. Clones share everything.
///
/// It needs a tokio runtime with I/O and time enabled. It does not implement `Purge`: the TTL removes old records.
#[derive(Clone)]
pub struct RedisStore {
    pub(crate) shared: Arc<Shared>,
    pub(crate) transport: Arc<Transport>,
}

impl RedisStore {
    /// Connects, and checks that the servers can hold records.
    ///
    /// # Errors
    /// - [`Misconfigured`](idem_core::StoreErrorKind::Misconfigured) when the URL is invalid, or the server refuses the login. Also
    ///   when a server cannot hold records: it is older than 7.0, a 32-bit build, or would evict live records.
    /// - [`Unavailable`](idem_core::StoreErrorKind::Unavailable) when the server cannot be reached, and when it is a replica.
    pub async fn open(config: RedisConfig) -> Result<Self, StoreError> {
        let timeout = config.timeout.unwrap_or(TIMEOUT);
        let transport = Transport::new(config.servers(timeout)?, timeout, config.replica_connections.get());
        let durability = crate::servers::examine(&transport, config.min_replicas, config.allow_eviction).await?;
        // `WAIT` must answer before the transport gives up on it, which in a Cluster is after half of the timeout.
        let patience_ms = u64::try_from(timeout.as_millis() * 2 / 5).unwrap_or(u64::MAX).max(1);
        if config.is_from_pool() {
            tracing::info!(
                "the connections come from the application's pool: verbs wait for one, and waiters learn of settlements by polling"
            );
        }
        let keys = Keys::new(&config.key_prefix);
        let subscription = Subscription::new(config.servers(timeout)?, keys.clone(), tokio::runtime::Handle::current());
        let shared = Shared {
            scripts: Scripts::new(),
            keys,
            replicas: (config.min_replicas > 0).then_some((config.min_replicas, patience_ms)),
            allow_eviction: config.allow_eviction,
            durability,
            offset: config.offset,
            subscription,
        };
        Ok(Self { shared: Arc::new(shared), transport: Arc::new(transport) })
    }

    pub(crate) fn verb<'a>(&'a self, what: &'a str, id: &RecordId, replicas: Option<(u32, u64)>) -> Verb<'a> {
        Verb::new(&self.shared, &self.transport, what, id, replicas)
    }

    /// The record and its remaining lifetime.
    pub(crate) async fn live_record(&self, id: &RecordId) -> Result<Option<LiveRecord>, StoreError> {
        let verb = self.verb("peek", id, self.shared.replicas);
        loop {
            let Some(seen) = verb.look().await? else { continue };
            return match (seen.too_few, seen.record()) {
                (Some(found), Some(_)) => Err(verb.too_few(found).with_existing_record()),
                (_, record) => Ok(record.map(|record| LiveRecord {
                    record: record.clone(),
                    remaining: record.expires_at.saturating_duration_since(seen.now),
                })),
            };
        }
    }

    /// Runs a verb of the owner. It awaits replicas as an acquire does: if a failover lost a renewal, the lease would end
    /// while its owner runs.
    async fn own(&self, what: &str, lease: &Lease, action: OwnerAction<'_>) -> Result<OwnerOutcome, StoreError> {
        self.verb(what, &lease.id, self.shared.replicas).own(lease, action).await
    }
}

#[async_trait]
impl IdempotencyStore for RedisStore {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        let verb = self.verb("acquire", &request.id, self.shared.replicas);
        let (outcome, too_few) = verb.acquire(request).await?;
        match (too_few, &outcome) {
            // A failover could lose this outcome, so it is an error. The record stays acquired by its token: a delayed release
            // could arrive after the same token has acquired again, and free a key whose operation then runs.
            (Some(found), AcquireOutcome::Acquired(_)) => Err(verb.too_few(found)),
            (Some(found), AcquireOutcome::Replay(_)) => Err(verb.too_few(found).with_existing_record()),
            // The caller may wait for the settlement.
            (_, AcquireOutcome::InProgress { .. }) => {
                self.shared.subscription.keep();
                Ok(outcome)
            }
            // The other outcomes neither let the caller run nor report a result.
            _ => Ok(outcome),
        }
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.own("renew", lease, OwnerAction::Renew(term)).await
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        self.own("record a checkpoint", lease, OwnerAction::Checkpoint(checkpoint)).await
    }

    async fn settle(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError> {
        // If a failover undoes a release, the key is free after its lease, so a release does not await replicas.
        let replicas = self.shared.replicas.filter(|_| *settlement != Settlement::Released);
        let verb = self.verb("settle", &lease.id, replicas);
        if let Some(ending) = Ending::new(lease, settlement, retention)
            && let Some(outcome) = verb.end(&ending).await?
        {
            return Ok(outcome);
        }
        verb.own(lease, OwnerAction::Settle(settlement, retention)).await
    }

    async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        Ok(self.live_record(id).await?.map(|live| live.record))
    }

    fn on_settled(&self, listener: Weak<dyn SettlementListener>) {
        self.shared.subscription.tell(listener);
    }

    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>> {
        let transport = Arc::new(self.transport.another());
        Some(Arc::new(RedisRenewer(Self { shared: Arc::clone(&self.shared), transport })))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new("redis", self.shared.durability.level(), true)
    }
}

#[async_trait]
impl Operate for RedisStore {
    async fn resolve(&self, request: &Resolve) -> Result<ResolveOutcome, StoreError> {
        self.verb("resolve", &request.id, self.shared.replicas).resolve(request).await
    }

    /// The record comes first, so that a refused erasure leaves the notes as they are. In a Cluster both can be on different servers.
    ///
    /// # Errors
    /// If the notes do not answer, the error is indeterminate: the record is erased. Repeat the same request.
    async fn erase(&self, request: &Erase) -> Result<EraseOutcome, StoreError> {
        let outcome = self.verb("erase", &request.id, self.shared.replicas).erase(request).await?;
        if let (EraseOutcome::Erased, Some(principal)) = (outcome, request.principal.as_deref()) {
            self.erase_from_notes(&request.id, principal).await.map_err(StoreError::indeterminate)?;
        }
        Ok(outcome)
    }

    async fn note(&self, note: &RepairNote) -> Result<(), StoreError> {
        self.write_note(note).await
    }

    async fn repairs(&self, limit: NonZeroU32) -> Result<Vec<Repair>, StoreError> {
        self.read_notes(limit).await
    }
}

/// A store with separate connections.
#[derive(Debug)]
struct RedisRenewer(RedisStore);

#[async_trait]
impl LeaseRenewer for RedisRenewer {
    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.0.renew(lease, term).await
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("RedisStore")
            .field("keys", &self.shared.keys)
            .field("durability", &self.shared.durability)
            .finish_non_exhaustive()
    }
}
