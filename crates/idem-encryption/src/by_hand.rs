//! Sealing and opening by hand, for applications that reach records without the verbs of the store.

use idem_core::{
    Acquire, AcquireOutcome, Checkpoint, IdempotencyStore, Lease, Record, RecordId, ReplayKind, Settlement, StoreError,
    StoredResponse,
};

use crate::sealer::Run;
use crate::store::EncryptedStore;

/// For applications that reach records without the verbs of the store: by SQL statements, joined transactions or guards.
/// The README has [examples](crate#transactions-of-your-own).
///
/// What the other side takes must be sealed, and what it gives must be opened. Sealing fails for more than 64 GiB.
impl<S: IdempotencyStore + ?Sized> EncryptedStore<S> {
    /// The request as the wrapped store takes it: with its scope hashed, if the store hashes scopes.
    #[must_use]
    pub fn seal_request(&self, request: &Acquire) -> Acquire {
        self.sealer.seal_request(request)
    }

    /// Seals the answer of a run, for a statement that settles the run as `kind` says.
    ///
    /// [`ReplayKind::Failed`] is for both kinds of failure. Settled as another kind, the answer does not open.
    ///
    /// Its one header field is ASCII text, and its body is bytes. The same answer of the same run has the same bytes until the keys
    /// rotate.
    ///
    /// # Errors
    /// [`StoreError`] when the answer cannot be sealed, or `kind` is [`ReplayKind::OutcomeUnknown`], which has no answer.
    pub fn seal_response(
        &self,
        lease: &Lease,
        kind: ReplayKind,
        response: &StoredResponse,
    ) -> Result<StoredResponse, StoreError> {
        self.sealer.seal_response(Run::of_lease(lease), kind, response)
    }

    /// Seals the answer in a settlement, for a joined transaction.
    ///
    /// # Errors
    /// [`StoreError`] when the answer cannot be sealed.
    pub fn seal_settlement(&self, lease: &Lease, settlement: &Settlement) -> Result<Settlement, StoreError> {
        self.sealer.seal_settlement(Run::of_lease(lease), settlement)
    }

    /// Seals a checkpoint, for a guard that commits it with business writes.
    ///
    /// # Errors
    /// [`StoreError`] when the checkpoint cannot be sealed.
    pub fn seal_checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<Checkpoint, StoreError> {
        self.sealer.seal_checkpoint(lease, checkpoint)
    }

    /// Opens a lease: its checkpoint of an earlier attempt.
    ///
    /// # Errors
    /// [`StoreError`] of the kind `Corrupt` when the checkpoint does not open.
    pub fn open_lease(&self, lease: Lease) -> Result<Lease, StoreError> {
        self.sealer.open_lease(lease)
    }

    /// Opens what the wrapped store answered to `request`.
    ///
    /// # Errors
    /// [`StoreError`] of the kind `Corrupt` when the answer does not open. If it is [indeterminate](StoreError::is_indeterminate), the
    /// record is held by `request.owner`: settle it as released. Another kind when the record of another request has to be read, and
    /// the store could not answer.
    pub async fn open_outcome(&self, request: &Acquire, outcome: AcquireOutcome) -> Result<AcquireOutcome, StoreError> {
        self.opened(request, outcome).await
    }

    /// Opens a record that the wrapped store returned, or that was read by [`codec`](idem_core::codec).
    ///
    /// # Errors
    /// [`StoreError`] of the kind `Corrupt` when its answer or its checkpoint does not open.
    pub fn open_record(&self, id: &RecordId, record: &Record) -> Result<Record, StoreError> {
        self.sealer.open_record(id, record)
    }
}
