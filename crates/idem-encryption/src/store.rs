//! The store that seals what another one keeps.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{
    Acquire, AcquireOutcome, Begin, Capabilities, Checkpoint, DurableStore, IdempotencyStore, Lease, LeaseRenewer,
    LiveRecord, OnMismatch, OwnerOutcome, Record, RecordId, Replay, Settlement, SettlementListener, StoreError,
    StoreErrorKind, Term, TransactionalStore,
};

use crate::config::EncryptionConfig;
use crate::fault::Fault;
use crate::keys::Keys;
use crate::repeat;
use crate::sealer::{Run, Sealer};
use crate::transaction::EncryptedTransaction;
use crate::unopened::Unopened;

/// A store that encrypts answers and checkpoints in another store. Clones share everything.
///
/// It implements each port that `S` implements. `S` may be a trait object: `EncryptedStore<dyn TransactionalStore>`.
///
/// # Errors
/// If a stored value does not open, its verbs return [`StoreError`] of the kind `Corrupt`. The message names the record and the id of
/// the key, and says what to do. The operation does not run. All errors of `S` are passed on.
///
/// # Timeouts
/// If `S` refuses a settlement or a checkpoint, the verb reads the record, and may write once more. An engine allows all three calls one
/// `store_timeout` together, and repeats a settlement that takes longer.
///
/// # Cancellation safety
/// As that of `S`.
pub struct EncryptedStore<S: ?Sized> {
    pub(crate) inner: Arc<S>,
    pub(crate) sealer: Arc<Sealer>,
    unopened: Arc<Unopened>,
}

impl<S: ?Sized> EncryptedStore<S> {
    /// Encrypts what `inner` keeps.
    #[must_use]
    pub fn new(inner: Arc<S>, config: EncryptionConfig) -> Self {
        Self { inner, sealer: Arc::new(Sealer::new(config)), unopened: Arc::default() }
    }

    /// The store that keeps the records, for what is particular to it. Its verbs give and take sealed values.
    #[must_use]
    pub fn inner(&self) -> &Arc<S> {
        &self.inner
    }

    /// Replaces the keys, for all clones at once. A step that has begun may still use the keys from before.
    ///
    /// Before a key becomes the primary one, every process must have it: see [rotation](crate#rotation).
    pub fn rotate(&self, keys: Keys) {
        self.sealer.rotate(keys);
    }

    /// Whether this record proves that the primary key and the [context](EncryptionConfig::with_context) are those of the application.
    ///
    /// It does if the primary key has sealed a part of it, and each such part opens. `record` is as the [`inner`](Self::inner) store
    /// returns it. For tools that get their keys from an operator: an answer that they seal under a wrong key can never be read.
    ///
    /// # Errors
    /// [`StoreError`] of the kind `Corrupt` if a part does not open that names the primary key.
    pub fn proves_primary_key(&self, id: &RecordId, record: &Record) -> Result<bool, StoreError> {
        self.sealer.proves_primary_key(id, record)
    }

    /// The principal as the wrapped store keeps it, and as listings show it: its digest, if the store hashes scopes.
    ///
    /// A console that shows a client only the records of one principal compares with this form.
    #[must_use]
    pub fn stored_principal(&self, principal: &str) -> String {
        self.sealer.scope_secret().map_or_else(|| principal.to_owned(), |secret| secret.principal(principal))
    }
}

impl<S: IdempotencyStore + ?Sized> EncryptedStore<S> {
    /// Opens the answer to `request`.
    pub(crate) async fn opened(
        &self,
        request: &Acquire,
        outcome: AcquireOutcome,
    ) -> Result<AcquireOutcome, StoreError> {
        match outcome {
            AcquireOutcome::Acquired(lease) => self.opened_lease(lease).map(AcquireOutcome::Acquired),
            AcquireOutcome::Replay(replay) => self.opened_replay(request, replay).await.map(AcquireOutcome::Replay),
            outcome => Ok(outcome),
        }
    }

    fn opened_lease(&self, lease: Lease) -> Result<Lease, StoreError> {
        let id = lease.id;
        self.sealer.open_lease(lease).map_err(|error| {
            self.unopened.add(&id);
            // The lease is taken, although nothing can run under it: the caller has to release it.
            error.indeterminate().with_existing_record()
        })
    }

    /// Refuses a record whose checkpoint did not open at an earlier acquire, and still does not: an acquire would begin an attempt.
    async fn refuse_unopened(&self, request: &Acquire) -> Result<(), StoreError> {
        let id = &request.id;
        if !self.unopened.contains(id) {
            return Ok(());
        }
        let record = self.inner.peek(id).await.map_err(StoreError::with_existing_record)?;
        if let Some(record) = record {
            // The owner of a run begins no other attempt.
            if record.owner == request.owner {
                return Ok(());
            }
            // A settled record is only replayed.
            if let Some(checkpoint) = record.checkpoint.as_ref().filter(|_| record.replay().is_none()) {
                let opened = self.sealer.open_checkpoint(Run::of_record(id, &record), checkpoint);
                opened.map_err(|fault| fault.of(id).with_existing_record())?;
            }
        }
        self.unopened.remove(id);
        Ok(())
    }

    async fn opened_replay(&self, request: &Acquire, replay: Replay) -> Result<Replay, StoreError> {
        match self.sealer.open_replay(&request.id, &request.fingerprint, &replay) {
            // The answer may be that of another request, whose fingerprint only the record has.
            Err(Fault::NotAuthentic(_)) if request.on_mismatch == OnMismatch::ReplayOriginal => {
                let record = self.inner.peek(&request.id).await.map_err(StoreError::with_existing_record)?;
                let Some((record, replay)) = record.and_then(|record| record.replay().map(|replay| (record, replay)))
                else {
                    let message = format!("the record {} expired while it was read; repeat the request", request.id);
                    return Err(StoreError::new(StoreErrorKind::Unavailable, message).with_existing_record());
                };
                self.sealer.open_replay(&request.id, &record.fingerprint, &replay)
            }
            opened => opened,
        }
        .map_err(|fault| fault.of(&request.id).with_existing_record())
    }
}

#[async_trait]
impl<S: IdempotencyStore + ?Sized> IdempotencyStore for EncryptedStore<S> {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        self.refuse_unopened(request).await?;
        let outcome = self.inner.acquire(&self.sealer.seal_request(request)).await?;
        self.opened(request, outcome).await
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.inner.renew(lease, term).await
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        let sealed = self.sealer.seal_checkpoint(lease, checkpoint)?;
        let outcome = self.inner.checkpoint(lease, &sealed).await?;
        if outcome == OwnerOutcome::Applied {
            return Ok(outcome);
        }
        let Some(record) = self.inner.peek(&lease.id).await? else { return Ok(outcome) };
        match repeat::checkpoint(&self.sealer, lease, &record, checkpoint) {
            Some(stored) if stored != sealed => self.inner.checkpoint(lease, &stored).await,
            _ => Ok(outcome),
        }
    }

    async fn settle(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError> {
        let sealed = self.sealer.seal_settlement(Run::of_lease(lease), settlement)?;
        let outcome = self.inner.settle(lease, &sealed, retention).await?;
        // Without an answer there is nothing that other bytes could hide.
        let has_answer = !matches!(settlement, Settlement::OutcomeUnknown | Settlement::Released);
        if outcome == OwnerOutcome::Applied || !has_answer {
            return Ok(outcome);
        }
        let Some(record) = self.inner.peek(&lease.id).await? else { return Ok(outcome) };
        match repeat::settlement(&self.sealer, lease, &record, settlement) {
            Some(stored) if stored != sealed => self.inner.settle(lease, &stored, retention).await,
            _ => Ok(outcome),
        }
    }

    async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        let record = self.inner.peek(id).await?;
        record.map(|record| self.sealer.open_record(id, &record)).transpose()
    }

    fn on_settled(&self, listener: Weak<dyn SettlementListener>) {
        self.inner.on_settled(listener);
    }

    /// The renewer of the wrapped store: a renewal has nothing to seal.
    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>> {
        self.inner.renewer()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
}

#[async_trait]
impl<S: DurableStore + ?Sized> DurableStore for EncryptedStore<S> {
    async fn live_record(&self, id: &RecordId) -> Result<Option<LiveRecord>, StoreError> {
        let Some(live) = self.inner.live_record(id).await? else { return Ok(None) };
        Ok(Some(LiveRecord { record: self.sealer.open_record(id, &live.record)?, ..live }))
    }

    fn identity(&self) -> [u8; 16] {
        self.inner.identity()
    }

    /// `false`: a cache in front of it would keep plaintext. Wrap a hybrid store as a whole instead, whose cache then has sealed copies.
    fn may_be_copied(&self) -> bool {
        false
    }
}

#[async_trait]
impl<S: TransactionalStore + ?Sized> TransactionalStore for EncryptedStore<S> {
    async fn begin(&self, request: &Acquire) -> Result<Begin, StoreError> {
        self.refuse_unopened(request).await?;
        match self.inner.begin(&self.sealer.seal_request(request)).await? {
            Begin::Acquired { lease, transaction, renew } => {
                let lease = self.opened_lease(lease)?;
                let transaction = EncryptedTransaction::new(transaction, Arc::clone(&self.sealer), lease.clone());
                Ok(Begin::Acquired { lease, transaction: Box::new(transaction), renew })
            }
            Begin::Answered(outcome) => self.opened(request, outcome).await.map(Begin::Answered),
        }
    }
}

impl<S: ?Sized> Clone for EncryptedStore<S> {
    fn clone(&self) -> Self {
        let (inner, sealer) = (Arc::clone(&self.inner), Arc::clone(&self.sealer));
        Self { inner, sealer, unopened: Arc::clone(&self.unopened) }
    }
}

impl<S: fmt::Debug + ?Sized> fmt::Debug for EncryptedStore<S> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("EncryptedStore").field("inner", &self.inner).field("sealer", &self.sealer).finish()
    }
}
