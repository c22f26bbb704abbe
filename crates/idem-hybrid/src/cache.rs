//! Access to the fast store: timeout, circuit breaker, and validation of entries.

use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use idem_core::{
    Acquire, AcquireOutcome, FastEntry, FastStore, OwnerToken, RecordId, SettlementListener, StoreError,
    StoreErrorKind, Timestamp,
};

use crate::breaker::Breaker;
use crate::entry::{CLAIM_RANK, ERASING, Entry, lock_rank};
use crate::metrics::{Counter, HybridMetrics};

/// The rank of an entry that is put on trial, and how long it lasts if it is not removed: longer than four calls usually take.
const TRIAL_RANK: u64 = 1;
const TRIAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Cache {
    fast: Arc<dyn FastStore>,
    /// The identity of the durable store, which authenticates the entries.
    identity: [u8; 16],
    patience: Duration,
    breaker: Breaker,
    replays: Counter,
    in_progress: Counter,
    failures: Counter,
    unreadable: Counter,
    erased_copies: Counter,
}

/// The outcome of putting an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Put {
    /// The entry, or one of a higher rank, is there.
    Done,
    /// The entry had expired when it arrived.
    TooLate,
    /// No answer: the entry may be there, arrive later, or never arrive.
    Unanswered,
}

/// What the fast store knows of a record.
pub(crate) struct CacheRead {
    /// The fast store's time.
    pub(crate) now: Timestamp,
    pub(crate) entry: Option<Entry>,
    /// Whether another caller is asking the durable store now.
    pub(crate) is_claimed: bool,
}

impl Cache {
    pub(crate) fn new(fast: Arc<dyn FastStore>, identity: [u8; 16], patience: Duration) -> Self {
        Self {
            fast,
            identity,
            patience,
            breaker: Breaker::new(),
            replays: Counter::default(),
            in_progress: Counter::default(),
            failures: Counter::default(),
            unreadable: Counter::default(),
            erased_copies: Counter::default(),
        }
    }

    /// Reads the entry of a record, and claims the record for the duration of `claim` if there is none.
    ///
    /// `None` when the fast store cannot answer; the caller then has to ask the durable store.
    pub(crate) async fn read(&self, id: &RecordId, claim: Option<Duration>) -> Option<CacheRead> {
        let look = self.ask(self.fast.get(id, claim)).await?;
        let is_claimed = look.bytes.as_ref().is_some_and(Bytes::is_empty);
        let entry = look.bytes.filter(|bytes| !bytes.is_empty()).and_then(|bytes| {
            let entry = Entry::decode(&self.identity, id, &bytes);
            if entry.is_none() {
                self.unreadable.count();
            }
            entry
        });
        Some(CacheRead { now: look.now, entry, is_claimed })
    }

    /// Puts the entry, unless one of a higher rank is there.
    pub(crate) async fn put(&self, id: &RecordId, entry: &Entry) -> Put {
        match entry.encode(&self.identity, id) {
            Some(entry) => self.put_encoded(id, &entry).await,
            None => Put::TooLate,
        }
    }

    /// Puts a tombstone that can be [taken back](Self::take_back), unless one is there that stays.
    pub(crate) async fn put_tentatively(&self, id: &RecordId, tombstone: &Entry) -> Put {
        match tombstone.encode(&self.identity, id) {
            Some(entry) => self.put_encoded(id, &FastEntry { rank: ERASING, ..entry }).await,
            None => Put::TooLate,
        }
    }

    async fn put_encoded(&self, id: &RecordId, entry: &FastEntry) -> Put {
        match self.ask(self.fast.put(id, entry)).await {
            Some(now) if now < entry.until => Put::Done,
            Some(_) => Put::TooLate,
            None => Put::Unanswered,
        }
    }

    /// Removes a tombstone that was put tentatively. If there is no answer, it stays until the record expires.
    pub(crate) async fn take_back(&self, id: &RecordId) {
        self.ask(self.fast.remove(id, ERASING, None)).await;
    }

    /// Counts a copy that a tombstone has replaced.
    pub(crate) fn erased_copy(&self) {
        self.erased_copies.count();
    }

    /// Removes the lock of an attempt, puts a claim in its place if `claim` is set, and returns the fast store's time.
    ///
    /// `None` when the lock may still be there.
    pub(crate) async fn unlock(&self, id: &RecordId, attempt: u32, claim: Option<Duration>) -> Option<Timestamp> {
        self.ask(self.fast.remove(id, lock_rank(attempt), claim)).await
    }

    /// Removes a claim.
    pub(crate) async fn unclaim(&self, id: &RecordId) {
        // If that fails, the claim soon expires.
        self.ask(self.fast.remove(id, CLAIM_RANK, None)).await;
    }

    /// Checks whether the fast store takes, returns and removes an entry, even while the breaker is open.
    pub(crate) async fn try_out(&self) -> Result<(), StoreError> {
        // Of no record, and of no other trial.
        let halves = [OwnerToken::random(), OwnerToken::random()];
        let mut id = [0; 32];
        id.iter_mut().zip(halves.iter().flat_map(OwnerToken::as_bytes)).for_each(|(to, from)| *to = *from);
        let id = RecordId::from_bytes(id);
        let now = self.bounded(self.fast.get(&id, None)).await?.now;
        let entry =
            FastEntry { rank: TRIAL_RANK, bytes: Bytes::from_static(b"trial"), until: now.saturating_add(TRIAL) };
        self.bounded(self.fast.put(&id, &entry)).await?;
        let put = self.bounded(self.fast.get(&id, None)).await?.bytes;
        self.bounded(self.fast.remove(&id, TRIAL_RANK, None)).await?;
        if put.is_none_or(|bytes| bytes != entry.bytes) {
            let message = "the fast store lost an entry that it had just taken";
            return Err(StoreError::new(StoreErrorKind::Unavailable, message));
        }
        Ok(())
    }

    pub(crate) fn fast(&self) -> &Arc<dyn FastStore> {
        &self.fast
    }

    /// Whether the breaker is closed, so that work for the fast store is not in vain.
    pub(crate) fn answers(&self) -> bool {
        !self.breaker.is_open()
    }

    pub(crate) fn on_settled(&self, listener: Weak<dyn SettlementListener>) {
        self.fast.on_settled(listener);
    }

    async fn ask<T>(&self, verb: impl Future<Output = Result<T, StoreError>>) -> Option<T> {
        let permit = self.breaker.permit()?;
        match self.bounded(verb).await {
            Ok(answer) => {
                permit.succeeded();
                Some(answer)
            }
            Err(error) => {
                self.failures.count();
                let error_field = &error as &dyn std::error::Error;
                if permit.failed() {
                    tracing::warn!(error = error_field, "the fast store fails, so the durable one is asked alone");
                } else {
                    tracing::debug!(error = error_field, "the fast store failed");
                }
                None
            }
        }
    }

    async fn bounded<T>(&self, verb: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        tokio::time::timeout(self.patience, verb).await.unwrap_or_else(|_| {
            let message = format!("the fast store did not answer within {:?}", self.patience);
            Err(StoreError::new(StoreErrorKind::Timeout, message))
        })
    }

    /// Counts what an entry has answered.
    pub(crate) fn answered(&self, outcome: &AcquireOutcome) {
        match outcome {
            AcquireOutcome::InProgress { .. } => self.in_progress.count(),
            _ => self.replays.count(),
        }
    }

    pub(crate) fn metrics(&self, durable_replays: u64, durable_in_progress: u64) -> HybridMetrics {
        HybridMetrics {
            fast_replays: self.replays.total(),
            fast_in_progress: self.in_progress.total(),
            durable_replays,
            durable_in_progress,
            fast_failures: self.failures.total(),
            fast_skipped: self.breaker.skipped(),
            unreadable: self.unreadable.total(),
            erased_copies: self.erased_copies.total(),
            opened: self.breaker.opened(),
            is_open: self.breaker.is_open(),
        }
    }
}

impl CacheRead {
    pub(crate) fn is_lock(&self) -> bool {
        self.entry.as_ref().is_some_and(Entry::is_lock)
    }

    /// The answer to a request, if the entry suffices.
    pub(crate) fn answer(&self, request: &Acquire) -> Option<AcquireOutcome> {
        self.entry.as_ref()?.answer(request, self.now)
    }
}
