//! What a running operation knows about itself.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::sync::{OwnedMappedMutexGuard, OwnedMutexGuard};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::contract::Contract;
use super::observer::{EventKind, Subject};
use super::renewal::{LeasedRun, Renewal, about_to_end};
use super::shared::Shared;
use super::steps::{self, StepsState};
use crate::fingerprint::Fingerprint;
use crate::machine::{Lease, OwnerOutcome, Term};
use crate::record::{Acquisition, Checkpoint};
use crate::record_id::RecordId;
use crate::store::{StoreError, StoreTransaction};
use crate::trace::TraceParent;

/// The longest checkpoint, in bytes of its data: it is for identifiers, not for payloads.
const MAX_CHECKPOINT_BYTES: usize = 64 * 1024;

/// What an operation knows about its run. Clones share everything.
#[derive(Clone)]
pub struct Context {
    run: Arc<Run>,
}

struct Run {
    shared: Arc<Shared>,
    subject: Subject,
    /// Of the request that asked for it.
    fingerprint: Fingerprint,
    /// How long its lease and its record last.
    term: Term,
    /// `None` when the operation runs without protection, because the store could not answer.
    lease: Option<Lease>,
    lost: CancellationToken,
    /// The sequence of the last checkpoint of the operation; locked while one is recorded.
    checkpoints: tokio::sync::Mutex<u32>,
    /// `None` while the run has no steps.
    steps: Mutex<Option<StepsState>>,
    /// When the renewal that succeeded last was sent, or the acquire; `None` while there is no lease to renew.
    renewed_at: Mutex<Option<Instant>>,
    /// `None` when the contract has no transactions.
    transaction: Option<TransactionSlot>,
}

/// The open transaction: first the handler borrows it, then the settlement takes it.
type TransactionSlot = Arc<tokio::sync::Mutex<Option<Box<dyn StoreTransaction>>>>;

impl Context {
    pub(super) fn new(
        shared: Arc<Shared>,
        subject: Subject,
        fingerprint: Fingerprint,
        term: Term,
        lease: Option<Lease>,
        transaction: Option<Box<dyn StoreTransaction>>,
    ) -> Self {
        let lost = CancellationToken::new();
        let recorded = lease.as_ref().and_then(|lease| lease.checkpoint.as_ref());
        let checkpoints = tokio::sync::Mutex::new(recorded.map_or(0, |checkpoint| checkpoint.sequence));
        let transaction = transaction.map(|transaction| Arc::new(tokio::sync::Mutex::new(Some(transaction))));
        Self {
            run: Arc::new(Run {
                shared,
                subject,
                fingerprint,
                term,
                lease,
                lost,
                checkpoints,
                steps: Mutex::default(),
                renewed_at: Mutex::default(),
                transaction,
            }),
        }
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.run.shared
    }

    pub(super) fn subject(&self) -> &Subject {
        &self.run.subject
    }

    /// The id of the operation's record, for logs.
    #[must_use]
    pub fn record_id(&self) -> &RecordId {
        &self.run.subject.id
    }

    /// Reports an event of this run to the observer.
    pub(super) fn observe(&self, kind: EventKind<'_>) {
        self.run.observe(kind);
    }

    /// Renews the lease, which was asked for at `acquired_at`, until the returned value is dropped.
    pub(super) fn start_renewal(&self, acquired_at: Instant) -> Renewal {
        let run: Arc<dyn LeasedRun> = Arc::<Run>::clone(&self.run);
        Renewal::start(&self.shared().renewals, &self.shared().settings, run, acquired_at)
    }

    pub(super) fn fingerprint(&self) -> &Fingerprint {
        &self.run.fingerprint
    }

    pub(super) fn term(&self) -> Term {
        self.run.term
    }

    pub(super) fn lost(&self) -> &CancellationToken {
        &self.run.lost
    }

    /// When the lease was asked for or renewed last; `None` if it is not renewed.
    pub(super) fn renewed_at(&self) -> Option<Instant> {
        self.run.renewed_at()
    }

    /// Cancels the run's `lost` token, and rolls its transaction back as soon as its borrower returns it. Without this, the
    /// transaction would stay open, with its locks, as long as any clone of the context lives.
    pub(super) fn roll_back_when_given_back(&self) {
        self.run.lost.cancel();
        let Some(slot) = self.run.transaction.clone() else { return };
        // No shutdown waits for it, and none ends it: the borrower may take as long as it likes.
        tokio::spawn(async move { drop(slot.lock().await.take()) });
    }

    /// The number of a checkpoint that is written outside of [`checkpoint`](Self::checkpoint).
    pub(super) async fn next_checkpoint(&self) -> u32 {
        let mut last = self.run.checkpoints.lock().await;
        *last = last.saturating_add(1);
        *last
    }

    /// Renews the lease once more, beside the renewals in the background. For `patience` it tries again.
    pub(super) async fn renew_now(&self, patience: Duration) -> Result<OwnerOutcome, StoreError> {
        let Some(lease) = &self.run.lease else { return Ok(OwnerOutcome::LeaseLost) };
        self.shared().persist(self.subject(), patience, || self.shared().store().renew(lease, self.term())).await
    }

    /// The checkpoint that the record has, while this run owns it. For `patience` it tries again.
    pub(super) async fn recorded_checkpoint(&self, patience: Duration) -> Result<Option<Checkpoint>, StoreError> {
        let peek = || self.shared().store().peek(self.record_id());
        let record = self.shared().persist(self.subject(), patience, peek).await?;
        let owner = self.run.lease.as_ref().map(|lease| lease.owner);
        Ok(record.filter(|record| Some(record.owner) == owner).and_then(|record| record.checkpoint))
    }

    /// Whether the run may have steps: it asks for the first time, and has recorded no checkpoint itself.
    pub(super) fn begin_steps(&self) -> bool {
        let acquired = self.last_checkpoint().map_or(0, |checkpoint| checkpoint.sequence);
        let is_new = self.run.checkpoints.try_lock().is_ok_and(|last| *last == acquired);
        let mut steps = self.run.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let may_begin = is_new && steps.is_none();
        if may_begin {
            *steps = Some(StepsState::default());
        }
        may_begin
    }

    /// Notes how the steps of the run stand.
    pub(super) fn note_steps(&self, state: StepsState) {
        *self.run.steps.lock().unwrap_or_else(PoisonError::into_inner) = Some(state);
    }

    /// How the steps of the run stand; `None` if it has none.
    pub(super) fn steps_state(&self) -> Option<StepsState> {
        self.run.steps.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The transaction, unless a handler has borrowed it.
    pub(super) fn take_transaction(&self) -> Option<Box<dyn StoreTransaction>> {
        self.run.transaction.as_ref()?.try_lock().ok()?.take()
    }

    /// Which attempt this is: 1 for the first, larger for every further one of the same record. It can serve as a fencing token
    /// while the record is kept. A release, or a rollback under Transactional, leaves no record, and the next run is attempt 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.run.lease.as_ref().map_or(1, |lease| lease.attempt)
    }

    /// How this run was acquired; [`Acquisition::Fresh`] when it is not protected.
    #[must_use]
    pub fn acquisition(&self) -> Acquisition {
        self.run.lease.as_ref().map_or(Acquisition::Fresh, |lease| lease.acquisition)
    }

    /// Whether a record protects this run. False only if the store is unavailable and the settings say to [fail
    /// open](super::Settings::dangerous_fail_open).
    #[must_use]
    pub fn is_protected(&self) -> bool {
        self.run.lease.is_some()
    }

    /// The lease of this run, with which a store can fence other writes; `None` when the run is not protected.
    #[must_use]
    pub fn lease(&self) -> Option<&Lease> {
        self.run.lease.as_ref()
    }

    /// The last recovery point of the attempt before this one: continue after it.
    #[must_use]
    pub fn last_checkpoint(&self) -> Option<&Checkpoint> {
        self.run.lease.as_ref().and_then(|lease| lease.checkpoint.as_ref())
    }

    /// Whose request asked for it; `None` if the service has one tenant.
    #[must_use]
    pub fn principal(&self) -> Option<&str> {
        self.run.subject.scope.principal()
    }

    /// The trace of the request that this run answers, if its [`Operation`](super::Operation::trace) named one.
    #[must_use]
    pub fn trace(&self) -> Option<TraceParent> {
        self.run.subject.trace
    }

    /// A key for a call to another system, the same on every attempt, different for every `step`.
    #[must_use]
    pub fn downstream_key(&self, step: &str) -> String {
        self.downstream().downstream_key(step)
    }

    /// The record that downstream keys are derived from.
    pub(super) fn downstream(&self) -> &RecordId {
        &self.run.subject.downstream
    }

    /// Whether this run may no longer own its record, judged by the store's answers and by the local monotonic clock. After
    /// the run's end it is lost too, which stops tasks that the operation has left behind. Ask directly before starting something
    /// that must not be done twice.
    #[must_use]
    pub fn is_lease_lost(&self) -> bool {
        self.run.lost.is_cancelled() || self.run.is_about_to_end()
    }

    /// Completes when this run no longer owns its record, at its end at the latest, or is about to lose it by the local monotonic
    /// clock: stop before doing anything that must not be done twice.
    pub fn lease_lost(&self) -> WaitForCancellationFutureOwned {
        self.run.lost.clone().cancelled_owned()
    }

    /// Records a recovery point for the attempt that takes over after a crash, in place of the one before. `data` has at
    /// most 64 KiB. Calls of one run take effect one after the other.
    ///
    /// # Errors
    /// [`CheckpointError`]; after `LeaseLost`, stop: another attempt runs the operation.
    ///
    /// # Cancellation safety
    /// If the future is dropped, the recovery point may or may not be recorded.
    pub async fn checkpoint(&self, name: &str, data: impl Into<bytes::Bytes>) -> Result<(), CheckpointError> {
        let is_in_steps = self.steps_state().is_some() || self.last_checkpoint().is_some_and(steps::is_log);
        if is_in_steps || name == steps::CHECKPOINT {
            return Err(CheckpointError::HasSteps);
        }
        self.record(name, data.into(), None).await
    }

    /// Records a checkpoint, of the handler or of its steps. For `patience` it tries again if the store does not answer.
    pub(super) async fn record(
        &self,
        name: &str,
        data: bytes::Bytes,
        patience: Option<Duration>,
    ) -> Result<(), CheckpointError> {
        if data.len() > MAX_CHECKPOINT_BYTES {
            return Err(CheckpointError::TooLarge { bytes: data.len() });
        }
        if self.run.shared.contract() != Contract::AtLeastOnce {
            return Err(CheckpointError::NeverRerun);
        }
        let Some(lease) = &self.run.lease else { return Ok(()) };
        // One after the other: an earlier checkpoint that arrives after a later one gets `LeaseLost`.
        let mut last = self.run.checkpoints.lock().await;
        *last = last.saturating_add(1);
        let checkpoint = Checkpoint { sequence: *last, name: name.into(), data };
        let write = || self.shared().store().checkpoint(lease, &checkpoint);
        let written = match patience {
            Some(patience) => self.shared().persist(self.subject(), patience, write).await,
            None => self.shared().bounded(self.subject(), write()).await,
        };
        match written? {
            OwnerOutcome::Applied => Ok(()),
            OwnerOutcome::LeaseLost => Err(CheckpointError::LeaseLost),
        }
    }

    /// The transaction of this run, to make the business writes in. `T` is the store's type for it.
    ///
    /// Dropping the guard returns it. Drop the guard before the operation ends: a transaction that is still borrowed
    /// then cannot be committed, and is rolled back.
    ///
    /// # Errors
    /// [`TransactionError`] when there is none of this type, or when it is borrowed already.
    pub fn transaction<T: 'static>(&self) -> Result<TransactionGuard<T>, TransactionError> {
        let slot = self.run.transaction.as_ref().ok_or(TransactionError::NotTransactional)?;
        let guard = Arc::clone(slot).try_lock_owned().map_err(|_| TransactionError::Borrowed)?;
        if guard.is_none() {
            return Err(TransactionError::NotTransactional);
        }
        OwnedMutexGuard::try_map(guard, |slot| slot.as_mut()?.as_any_mut().downcast_mut())
            .map(TransactionGuard)
            .map_err(|_| TransactionError::OtherType(std::any::type_name::<T>()))
    }
}

impl Run {
    fn renewed_at(&self) -> Option<Instant> {
        *self.renewed_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the lease ends soon by this process's clock. It does not rely on the renewal task, which may be late.
    fn is_about_to_end(&self) -> bool {
        self.renewed_at()
            .is_some_and(|renewed_at| Instant::now() >= about_to_end(renewed_at, self.shared.settings.lease))
    }
}

impl LeasedRun for Run {
    fn renewed(&self, sent: Instant) {
        *self.renewed_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(sent);
    }

    fn id(&self) -> &RecordId {
        &self.subject.id
    }

    fn lost(&self) -> &CancellationToken {
        &self.lost
    }

    fn renew<'a>(&'a self, home: &'a Handle) -> BoxFuture<'a, Result<OwnerOutcome, StoreError>> {
        Box::pin(async {
            match &self.lease {
                Some(lease) => self.shared.bounded(&self.subject, self.shared.renew(lease, self.term, home)).await,
                None => std::future::pending().await,
            }
        })
    }

    fn observe(&self, kind: EventKind<'_>) {
        self.shared.observe(&self.subject, self.lease.as_ref().map(|lease| lease.attempt), kind);
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Context")
            .field("id", self.record_id())
            .field("lease", &self.run.lease)
            .finish_non_exhaustive()
    }
}

/// Exclusive use of a run's transaction.
pub struct TransactionGuard<T: 'static>(OwnedMappedMutexGuard<Option<Box<dyn StoreTransaction>>, T>);

impl<T> Deref for TransactionGuard<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for TransactionGuard<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T> fmt::Debug for TransactionGuard<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "TransactionGuard({})", std::any::type_name::<T>())
    }
}

/// Why a handler cannot borrow the transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransactionError {
    /// The contract is not Transactional.
    #[error("this operation has no transaction; build its layer with `transactional(store)`")]
    NotTransactional,
    /// Another guard holds it.
    #[error("the transaction of this operation is in use elsewhere; drop the other borrow first")]
    Borrowed,
    /// The store's transactions are of another type.
    #[error("the transaction of this operation is not a `{0}`; name the transaction type of the store in use")]
    OtherType(&'static str),
}

/// Why a recovery point was not recorded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// Another owner has the record.
    #[error("the lease is lost: another attempt runs this operation, so this one must stop")]
    LeaseLost,
    /// The data has more than 64 KiB.
    #[error("the checkpoint has {bytes} bytes; at most 65536 are kept, so record an identifier instead of a payload")]
    TooLarge {
        /// The size that was given.
        bytes: usize,
    },
    /// The contract is not AtLeastOnce, the only one that runs an operation again and reads its recovery points.
    #[error("checkpoints belong to the AtLeastOnce contract; no other one resumes an operation")]
    NeverRerun,
    /// The operation has [steps](Context::steps), whose results are in the checkpoint named `idem:steps`.
    #[error("this operation has steps, which keep their results in its checkpoint; return the data from a step")]
    HasSteps,
    /// The store could not answer.
    #[error("the store could not record the checkpoint")]
    Store(#[from] StoreError),
}
