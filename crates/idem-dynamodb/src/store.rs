//! The store: its verbs.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use aws_sdk_dynamodb::Client;
use idem_core::{
    Acquire, AcquireOutcome, Capabilities, Checkpoint, Command, Durability, DurableStore, Erase, EraseOutcome,
    IdempotencyStore, Lease, LeaseRenewer, LiveRecord, Operate, Outcome, OwnerAction, OwnerOutcome, Record, RecordId,
    Repair, RepairNote, Resolve, ResolveOutcome, Settlement, SettlementListener, StoreError, Term,
};

use crate::clock::{Reads, ServerClock};
use crate::config::DynamoConfig;
use crate::records::{Records, misanswered};
use crate::sightings::Sightings;
use crate::table;

/// The idempotency store in DynamoDB. Clones share everything.
///
/// The service announces no settlements, so waiters learn of them by polling.
#[derive(Clone)]
pub struct DynamoStore {
    pub(crate) records: Records,
    renewals: Client,
    identity: [u8; 16],
}

impl DynamoStore {
    /// Checks that the table is there and has the right keys, and reads the identity of its records.
    ///
    /// # Errors
    /// - [`Misconfigured`](idem_core::StoreErrorKind::Misconfigured) when there is no such table, its keys are others, the client may
    ///   not use it, or the answers have no field `Date`.
    /// - [`Unavailable`](idem_core::StoreErrorKind::Unavailable) when the service cannot be reached, or the table is not active.
    pub async fn open(config: DynamoConfig) -> Result<Self, StoreError> {
        let records = records(&config);
        table::check(&records).await?;
        let identity = table::identity(&records).await?;
        if config.renewals.is_none() && config.client.config().http_client().is_some() {
            tracing::warn!(
                "the client has an HTTP client of the application, which renewals share: a handler that blocks its thread may lose its \
                 lease; give a second client by DynamoConfig::renewals"
            );
        }
        // Without an HTTP client of the application, each client makes its own.
        let client = config.renewals.as_ref().unwrap_or(&config.client);
        let renewals = watched(client, &records.clock);
        Ok(Self { records, renewals, identity })
    }

    /// Makes the table, which is paid by request, with a TTL, and waits until it is active. It does nothing if the table is there.
    ///
    /// # Errors
    /// [`StoreError`] when the service cannot be reached, or the client may not make tables.
    ///
    /// # Cancellation safety
    /// Call it again.
    pub async fn create_table(config: &DynamoConfig) -> Result<(), StoreError> {
        table::create(&records(config)).await
    }

    async fn own(&self, what: &str, lease: &Lease, action: OwnerAction<'_>) -> Result<OwnerOutcome, StoreError> {
        match self.records.step(what, &lease.id, None, Command::Owner(lease.owner, action)).await? {
            Outcome::Owner(outcome) => Ok(outcome),
            _ => Err(misanswered()),
        }
    }
}

/// A client like this one, which reads the time from each answer.
fn watched(client: &Client, clock: &Arc<ServerClock>) -> Client {
    Client::from_conf(client.config().to_builder().interceptor(Reads(Arc::clone(clock))).build())
}

fn records(config: &DynamoConfig) -> Records {
    let clock = Arc::new(ServerClock::new(config.offset.clone()));
    Records {
        client: watched(&config.client, &clock),
        table: config.table.clone(),
        clock,
        sightings: Arc::new(Sightings::default()),
    }
}

#[async_trait]
impl IdempotencyStore for DynamoStore {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        let command = Command::Acquire(request);
        match self.records.step("acquire", &request.id, Some(&request.origin), command).await? {
            Outcome::Acquire(outcome) => Ok(outcome),
            _ => Err(misanswered()),
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
        self.own("settle", lease, OwnerAction::Settle(settlement, retention)).await
    }

    async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        Ok(self.records.read("peek", id).await?.stored.map(|stored| stored.record))
    }

    /// Does nothing: the service announces nothing.
    fn on_settled(&self, _listener: Weak<dyn SettlementListener>) {}

    /// A store with the client for [renewals](DynamoConfig::renewals).
    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>> {
        let client = self.renewals.clone();
        Some(Arc::new(Renewer(Self { records: Records { client, ..self.records.clone() }, ..self.clone() })))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new("dynamodb", Durability::Power, true)
    }
}

#[async_trait]
impl DurableStore for DynamoStore {
    async fn live_record(&self, id: &RecordId) -> Result<Option<LiveRecord>, StoreError> {
        let found = self.records.read("read a record", id).await?;
        Ok(found.stored.and_then(|stored| LiveRecord::at(stored.record, found.now)))
    }

    fn identity(&self) -> [u8; 16] {
        self.identity
    }

    fn may_be_copied(&self) -> bool {
        true
    }
}

#[async_trait]
impl Operate for DynamoStore {
    async fn resolve(&self, request: &Resolve) -> Result<ResolveOutcome, StoreError> {
        match self.records.step("resolve", &request.id, None, Command::Resolve(request)).await? {
            Outcome::Resolve(outcome) => Ok(outcome),
            _ => Err(misanswered()),
        }
    }

    /// The record comes first, so that a refused erasure leaves parts and notes as they are.
    ///
    /// # Errors
    /// If the parts or the notes cannot be removed, the error is indeterminate: the record is erased. Repeat the same request.
    async fn erase(&self, request: &Erase) -> Result<EraseOutcome, StoreError> {
        let what = "erase";
        let outcome = match self.records.step(what, &request.id, None, Command::Erase(request)).await? {
            Outcome::Erase(outcome) => outcome,
            _ => return Err(misanswered()),
        };
        if outcome == EraseOutcome::Erased {
            // Also those of an earlier try that broke off, and of writes that were refused.
            self.records.remove_parts(what, &request.id).await.map_err(StoreError::indeterminate)?;
            if let Some(principal) = request.principal.as_deref() {
                let erased = self.records.erase_from_notes(&request.id, principal).await;
                erased.map_err(StoreError::indeterminate)?;
            }
        }
        Ok(outcome)
    }

    async fn note(&self, note: &RepairNote) -> Result<(), StoreError> {
        self.records.note(note).await
    }

    async fn repairs(&self, limit: NonZeroU32) -> Result<Vec<Repair>, StoreError> {
        self.records.repairs(limit).await
    }
}

/// A store with separate connections.
#[derive(Debug)]
struct Renewer(DynamoStore);

#[async_trait]
impl LeaseRenewer for Renewer {
    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.0.renew(lease, term).await
    }
}

impl fmt::Debug for DynamoStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("DynamoStore").field("table", &self.records.table).finish_non_exhaustive()
    }
}
