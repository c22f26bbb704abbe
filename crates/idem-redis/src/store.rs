//! The store: each verb one call of a script.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::codec::takeover_number;
use idem_core::{
    Acquire, AcquireOutcome, Capabilities, Checkpoint, IdempotencyStore, Lease, LeaseRenewer, LiveRecord, OnMismatch,
    OwnerOutcome, Record, RecordId, Settlement, SettlementListener, StoreError, StoreErrorKind, StoredBody,
    StoredResponse, Term, TimeOffset, codec,
};

use crate::config::{RedisConfig, TIMEOUT, micros};
use crate::durability::DurabilityReport;
use crate::error::Phase;
use crate::keys::Keys;
use crate::reply;
use crate::script::{Arg, Call, Script, Scripts};
use crate::subscription::Subscription;
use crate::transport::{ScriptReply, Transport};

/// Records in Redis, one hash each. Clones share everything.
///
/// Needs a tokio runtime with I/O and time enabled. It implements no `Purge`: Redis forgets what is over by itself.
#[derive(Clone)]
pub struct RedisStore {
    pub(crate) shared: Arc<Shared>,
    pub(crate) transport: Arc<Transport>,
}

pub(crate) struct Shared {
    scripts: Scripts,
    keys: Keys,
    /// How many replicas are awaited, and for how many milliseconds.
    replicas: Option<(u32, u64)>,
    pub(crate) allow_eviction: bool,
    pub(crate) durability: DurabilityReport,
    offset: TimeOffset,
    subscription: Subscription,
}

impl RedisStore {
    /// Connects, and looks what the servers are.
    ///
    /// # Errors
    /// [`StoreErrorKind::Misconfigured`] when the address is none, and when a server cannot hold records: it is a
    /// replica, older than 7.0, or would evict live records. [`StoreErrorKind::Unavailable`] when it cannot be reached.
    pub async fn open(config: RedisConfig) -> Result<Self, StoreError> {
        let timeout = config.timeout.unwrap_or(TIMEOUT);
        let transport = Transport::new(config.servers(timeout)?, timeout, config.replica_connections.get());
        let durability = crate::servers::examine(&transport, config.min_replicas, config.allow_eviction).await?;
        // So that the answer of `WAIT` comes before anybody gives up on it, which in a Cluster is after half of the time.
        let patience_ms = u64::try_from(timeout.as_millis() * 2 / 5).unwrap_or(u64::MAX).max(1);
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

    /// The record, and how much of its life is left.
    pub(crate) async fn live_record(&self, id: &RecordId) -> Result<Option<LiveRecord>, StoreError> {
        let what = "peek";
        let args = [self.now(), Arg::from(self.shared.replicas.is_some())];
        let answer = self.change(what, &self.shared.scripts.peek, id, &args).await?;
        match (answer.too_few, reply::peek(answer.value)?) {
            (Some(found), Some(_)) => Err(self.too_few(what, found).with_existing_record()),
            (_, look) => Ok(look),
        }
    }

    async fn run(
        &self,
        what: &str,
        script: &Script,
        id: &RecordId,
        replicas: Option<(u32, u64)>,
        args: &[Arg<'_>],
    ) -> Result<ScriptReply, StoreError> {
        let key = self.shared.keys.of(id);
        let call = Call { script, key: key.as_bytes(), args, replicas };
        self.transport.run(&call).await.map_err(|failure| failure.of(what, Phase::Serving))
    }

    /// Runs a script, and awaits the replicas that were asked for.
    async fn change(
        &self,
        what: &str,
        script: &Script,
        id: &RecordId,
        args: &[Arg<'_>],
    ) -> Result<ScriptReply, StoreError> {
        self.run(what, script, id, self.shared.replicas, args).await
    }

    /// An owner's verb. Its loss has to be as unlikely as that of the acquire: a renewal that is lost is a lease that
    /// ends while its owner runs.
    async fn own(
        &self,
        what: &str,
        script: &Script,
        lease: &Lease,
        args: &[Arg<'_>],
    ) -> Result<OwnerOutcome, StoreError> {
        let answer = self.change(what, script, &lease.id, args).await?;
        let outcome = reply::owner(&answer.value)?;
        // A primary that was replaced and does not know it yet may say that a lease is lost which its successor gave.
        answer.too_few.map_or(Ok(outcome), |found| Err(self.too_few(what, found)))
    }

    fn too_few(&self, what: &str, found: i64) -> StoreError {
        let asked_for = self.shared.replicas.map_or(0, |(asked_for, _)| asked_for);
        let message = format!("could not {what}: {found} of {asked_for} replicas have it, so a failover could lose it");
        StoreError::new(StoreErrorKind::Unavailable, message).indeterminate()
    }

    fn now(&self) -> Arg<'_> {
        Arg::Number(self.shared.offset.micros())
    }

    fn settlement<'a>(
        &'a self,
        owner: &'a [u8; 16],
        ending: &'a StoredSettlement,
        retention: Duration,
    ) -> [Arg<'a>; 11] {
        [
            self.now(),
            Arg::Bytes(owner),
            Arg::Number(ending.state),
            Arg::Number(micros(retention)),
            Arg::Number(ending.retry_after),
            Arg::Number(i64::from(ending.status)),
            Arg::Bytes(&ending.headers),
            Arg::Bytes(ending.body.as_deref().unwrap_or_default()),
            Arg::from(ending.body.is_none()),
            Arg::from(self.shared.replicas.is_some()),
            Arg::Bytes(self.shared.subscription.channel()),
        ]
    }
}

/// A settlement as the script takes it.
struct StoredSettlement {
    /// One of [`codec::state`], or 0 for a release.
    state: i64,
    retry_after: i64,
    status: u16,
    headers: Vec<u8>,
    body: Option<bytes::Bytes>,
}

impl StoredSettlement {
    const RELEASED: Self = Self { state: 0, retry_after: 0, status: 0, headers: Vec::new(), body: None };

    fn new(state: i64, response: &StoredResponse, retry_after: Duration) -> Self {
        let body = match &response.body {
            StoredBody::Retained(body) => Some(body.clone()),
            StoredBody::NotRetained => None,
        };
        let headers = codec::encode_headers(&response.headers);
        Self { state, retry_after: micros(retry_after), status: response.status, headers, body }
    }

    fn of(settlement: &Settlement) -> Self {
        use codec::state::{COMPLETED, FAILED_OUTCOME_UNKNOWN, FAILED_RETRYABLE, FAILED_TERMINAL};
        match settlement {
            Settlement::Completed(response) => Self::new(COMPLETED, response, Duration::ZERO),
            Settlement::FailedTerminal(response) => Self::new(FAILED_TERMINAL, response, Duration::ZERO),
            Settlement::FailedRetryable { response, retry_after } => {
                Self::new(FAILED_RETRYABLE, response, *retry_after)
            }
            Settlement::OutcomeUnknown => {
                Self::new(FAILED_OUTCOME_UNKNOWN, &StoredResponse::outcome_unknown(), Duration::ZERO)
            }
            Settlement::Released => Self::RELEASED,
        }
    }
}

#[async_trait]
impl IdempotencyStore for RedisStore {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        let what = "acquire";
        let replays_original = request.on_mismatch == OnMismatch::ReplayOriginal;
        let args = [
            self.now(),
            Arg::Number(i64::from(request.fingerprint.algorithm().number())),
            Arg::Bytes(request.fingerprint.digest()),
            Arg::Bytes(request.owner.as_bytes()),
            Arg::Number(micros(request.term.lease)),
            Arg::Number(micros(request.term.retention)),
            Arg::Number(takeover_number(request.takeover)),
            Arg::Number(i64::from(request.max_attempts.get())),
            Arg::from(replays_original),
            Arg::from(self.shared.replicas.is_some()),
        ];
        let answer = self.change(what, &self.shared.scripts.acquire, &request.id, &args).await?;
        let outcome = reply::acquire(answer.value, request)?;
        match (answer.too_few, &outcome) {
            // A failover could take back what this would tell. What was acquired stays with its token: a release that is
            // on its way while the same token acquires again could come after it, and free what runs by then.
            (Some(found), AcquireOutcome::Acquired(_)) => Err(self.too_few(what, found)),
            (Some(found), AcquireOutcome::Replay(_)) => Err(self.too_few(what, found).with_existing_record()),
            // The caller may wait for the settlement.
            (_, AcquireOutcome::InProgress { .. }) => {
                self.shared.subscription.keep();
                Ok(outcome)
            }
            // Nobody runs for the others, and nobody is told that something has happened.
            _ => Ok(outcome),
        }
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        let (lasts, retention) = (Arg::Number(micros(term.lease)), Arg::Number(micros(term.retention)));
        let args = [self.now(), Arg::Bytes(lease.owner.as_bytes()), lasts, retention];
        self.own("renew", &self.shared.scripts.renew, lease, &args).await
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        let data = codec::encode_checkpoint(checkpoint);
        let (name, data) = (Arg::Bytes(checkpoint.name.as_bytes()), Arg::Bytes(&data));
        let args = [self.now(), Arg::Bytes(lease.owner.as_bytes()), name, data];
        self.own("record a checkpoint", &self.shared.scripts.checkpoint, lease, &args).await
    }

    async fn settle(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError> {
        let ending = StoredSettlement::of(settlement);
        let args = self.settlement(lease.owner.as_bytes(), &ending, retention);
        let (what, script) = ("settle", &self.shared.scripts.settle);
        if *settlement == Settlement::Released {
            // Should a failover undo it, the key is free after its lease: nothing that replicas need to be awaited for.
            let answer = self.run(what, script, &lease.id, None, &args).await?;
            return reply::owner(&answer.value);
        }
        self.own(what, script, lease, &args).await
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

/// A store that has connections of its own.
#[derive(Debug)]
struct RedisRenewer(RedisStore);

#[async_trait]
impl LeaseRenewer for RedisRenewer {
    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        match self.0.renew(lease, term).await? {
            OwnerOutcome::LeaseLost if self.0.transport.is_beside_pool() => {
                let message =
                    "a connection beside the pool finds no lease; the pool's hooks may have chosen another database";
                Err(StoreError::new(StoreErrorKind::Unavailable, message))
            }
            outcome => Ok(outcome),
        }
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
