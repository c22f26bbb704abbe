//! The ports of operators and of the purge.

use std::num::NonZeroU32;
use std::sync::Arc;

use async_trait::async_trait;
use idem_core::{
    CountPage, Erase, EraseOutcome, IdempotencyStore, Inspect, Inspection, Operate, Purge, RecordFilter, RecordId,
    RecordPage, RecordSummary, Repair, RepairNote, Resolution, Resolve, ResolveOutcome, ScanPosition, StoreError,
};

use crate::repeat;
use crate::sealer::{Run, SEALED};
use crate::store::EncryptedStore;

#[async_trait]
impl<S: IdempotencyStore + Operate + ?Sized> Operate for EncryptedStore<S> {
    /// A resolution has no lease. The fingerprint and the attempt that its answer is bound to are those of the record.
    ///
    /// The record need not open: not the answer of a failure that waits for a retry, and no checkpoint. The state machine refuses a
    /// completed or terminally failed record as final, also if it does not open. [`inspect`](Inspect::inspect) fails for a record that
    /// does not open; [`list`](Inspect::list) gives its version. A repeat of the same action needs the key of the stored answer.
    async fn resolve(&self, request: &Resolve) -> Result<ResolveOutcome, StoreError> {
        if request.resolution == Resolution::OutcomeUnknown {
            return self.inner.resolve(request).await;
        }
        // The second round is for an earlier try of the same action that comes late.
        for _ in 0..2 {
            let Some(record) = self.inner.peek(&request.id).await? else { return Ok(ResolveOutcome::Changed) };
            let is_own = record.owner == request.action;
            // An answer that is bound to another fingerprint than that of the record it resolves would never open.
            if !is_own && record.version() != request.seen {
                return Ok(ResolveOutcome::Changed);
            }
            let resolution = match repeat::resolution(&self.sealer, &record, request)? {
                Some(stored) => stored,
                None => self.sealer.seal_resolution(Run::of_record(&request.id, &record), &request.resolution)?,
            };
            let outcome = self.inner.resolve(&Resolve { resolution, ..request.clone() }).await?;
            if outcome != ResolveOutcome::Changed || is_own {
                return Ok(outcome);
            }
        }
        Ok(ResolveOutcome::Changed)
    }

    /// An erasure needs no key. What is left has nothing to seal, so a status in a tombstone is not authenticated.
    async fn erase(&self, request: &Erase) -> Result<EraseOutcome, StoreError> {
        self.inner.erase(request).await
    }

    async fn note(&self, note: &RepairNote) -> Result<(), StoreError> {
        self.inner.note(note).await
    }

    async fn repairs(&self, limit: NonZeroU32) -> Result<Vec<Repair>, StoreError> {
        self.inner.repairs(limit).await
    }
}

impl<S: IdempotencyStore + ?Sized> EncryptedStore<S> {
    /// The name of the record's checkpoint. `None` if the record has changed, does not open, or cannot be read: a listing shows all.
    async fn opened_name(&self, summary: &RecordSummary) -> Option<Arc<str>> {
        let record = self.inner.peek(&summary.id).await.ok()??;
        let run = Run::of_record(&summary.id, &record);
        let checkpoint = record.checkpoint.as_ref().filter(|_| record.version() == summary.version)?;
        Some(self.sealer.open_checkpoint(run, checkpoint).ok()?.name)
    }
}

#[async_trait]
impl<S: IdempotencyStore + Inspect + ?Sized> Inspect for EncryptedStore<S> {
    async fn inspect(&self, id: &RecordId) -> Result<Inspection, StoreError> {
        let found = self.inner.inspect(id).await?;
        let record = found.record.as_ref().map(|record| self.sealer.open_record(id, record)).transpose()?;
        Ok(Inspection { record, ..found })
    }

    /// Each record with a checkpoint costs one more query, which reads the name of the checkpoint; if it fails, the
    /// name stays sealed. Lengths of bodies are those before
    /// encryption; a compressed body counts with its compressed length.
    async fn list(
        &self,
        filter: &RecordFilter,
        from: Option<&ScanPosition>,
        limit: NonZeroU32,
    ) -> Result<RecordPage, StoreError> {
        let mut page = match self.sealer.scope_secret() {
            Some(secret) => self.inner.list(&secret.filter(filter), from, limit).await?,
            None => self.inner.list(filter, from, limit).await?,
        };
        for summary in &mut page.records {
            if summary.checkpoint.as_deref() == Some(SEALED)
                && let Some(name) = self.opened_name(summary).await
            {
                summary.checkpoint = Some(name);
            }
        }
        Ok(page)
    }

    async fn count(&self, from: Option<&ScanPosition>, limit: NonZeroU32) -> Result<CountPage, StoreError> {
        self.inner.count(from, limit).await
    }
}

#[async_trait]
impl<S: Purge + ?Sized> Purge for EncryptedStore<S> {
    async fn purge(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        self.inner.purge(limit).await
    }

    async fn maintain(&self, limit: NonZeroU32) -> Result<u32, StoreError> {
        self.inner.maintain(limit).await
    }
}
