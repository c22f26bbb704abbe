//! The fast store, and what is believed of it.

use std::future::Future;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use idem_core::{
    Acquire, AcquireOutcome, FastStore, RecordId, SettlementListener, StoreError, StoreErrorKind, Timestamp,
};

use crate::breaker::Breaker;
use crate::entry::{CLAIM_RANK, Entry, lock_rank};
use crate::metrics::{Counter, HybridMetrics};

#[derive(Debug)]
pub(crate) struct Cache {
    fast: Arc<dyn FastStore>,
    /// Of the durable store, whose records the entries are about.
    identity: [u8; 16],
    patience: Duration,
    breaker: Breaker,
    replays: Counter,
    in_progress: Counter,
    failures: Counter,
    unreadable: Counter,
}

/// What came of putting an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Put {
    /// It, or a more important one, is there.
    Done,
    /// It was over when it came.
    TooLate,
    /// It may be there, or come later, or never.
    Unanswered,
}

/// What the fast store knows of a record.
pub(crate) struct CacheRead {
    /// Its time.
    pub(crate) now: Timestamp,
    pub(crate) entry: Option<Entry>,
    /// Whether somebody else is asking the durable store now.
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
        }
    }

    /// `None` when the store cannot answer, which is never a reason for anything but asking the other one.
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

    /// Puts the entry in place, unless a more important one is there.
    pub(crate) async fn put(&self, id: &RecordId, entry: &Entry) -> Put {
        let Some(entry) = entry.encode(&self.identity, id) else { return Put::TooLate };
        match self.ask(self.fast.put(id, &entry)).await {
            Some(now) if now < entry.until => Put::Done,
            Some(_) => Put::TooLate,
            None => Put::Unanswered,
        }
    }

    /// Removes the lock of an attempt, for a claim if one is wanted, and says what time it was then; `None` when it may still
    /// be there.
    pub(crate) async fn unlock(&self, id: &RecordId, attempt: u32, claim: Option<Duration>) -> Option<Timestamp> {
        self.ask(self.fast.remove(id, lock_rank(attempt), claim)).await
    }

    /// Takes a claim back.
    pub(crate) async fn unclaim(&self, id: &RecordId) {
        // One that stays is over in a moment.
        self.ask(self.fast.remove(id, CLAIM_RANK, None)).await;
    }

    /// Whether the store answers, whatever the breaker says.
    pub(crate) async fn try_out(&self, id: &RecordId) -> Result<(), StoreError> {
        self.bounded(self.fast.get(id, None)).await.map(|_| ())
    }

    /// Whether it is of use to prepare anything for the store.
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
                permit.failed();
                self.failures.count();
                tracing::debug!(error = &error as &dyn std::error::Error, "the fast store failed");
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
            opened: self.breaker.opened(),
            is_open: self.breaker.is_open(),
        }
    }
}

impl CacheRead {
    /// The answer to a request, if this is enough to go by.
    pub(crate) fn answer(&self, request: &Acquire) -> Option<AcquireOutcome> {
        self.entry.as_ref()?.answer(request, self.now)
    }
}
