//! From a request to the right to execute, or to the answer that it gets instead.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::observer::Event;
use super::settle::release_behind;
use super::waiters::Place;
use super::{Backend, Operation, Shared};
use crate::machine::{Acquire, AcquireOutcome, Lease, Origin};
use crate::planted;
use crate::record::{Acquisition, OwnerToken};
use crate::store::{Begin, StoreError, StoreTransaction};

/// The first and the longest pause between two looks at a record that another process runs.
const FIRST_POLL: Duration = Duration::from_millis(50);
const LAST_POLL: Duration = Duration::from_secs(1);

pub(super) enum Admission {
    /// It runs now.
    Run(Admitted),
    /// It does not run; the outcome is not `Acquired`.
    Answered(AcquireOutcome),
    /// Whoever asked has gone while waiting.
    Gone,
}

/// The right to execute, and what came with it.
pub(super) struct Admitted {
    pub(super) lease: Lease,
    pub(super) transaction: Option<Box<dyn StoreTransaction>>,
    pub(super) renew: bool,
    /// Before the acquire was sent, so that a lease counted from here ends before the store's does.
    pub(super) acquired_at: Instant,
}

impl Shared {
    pub(super) fn acquire_request(&self, operation: &Operation) -> Acquire {
        Acquire {
            id: self.settings.identity.record_id(&operation.scope, &operation.key),
            origin: Origin { namespace: self.settings.identity.namespace().clone(), scope: operation.scope.clone() },
            fingerprint: operation.fingerprint,
            owner: OwnerToken::random(),
            term: self.settings.term(),
            takeover: self.contract().takeover(&self.settings),
            max_attempts: self.settings.max_attempts,
            on_mismatch: self.settings.on_mismatch,
        }
    }

    /// Asks for the right to execute, and waits for the answer of a run in progress up to `wait` or until `gone`.
    pub(super) async fn admit(
        self: &Arc<Self>,
        request: &Acquire,
        wait: Duration,
        gone: impl Future<Output = ()>,
    ) -> Result<Admission, StoreError> {
        let deadline = Instant::now() + wait.min(self.settings.max_wait);
        let first = self.acquire(request).await?;
        if !first.is_in_progress() || Instant::now() >= deadline {
            return Ok(first);
        }
        match self.waiters.enter(request.id) {
            // Boxed, because few requests wait, and all of them would have the room for it.
            Some(place) => Box::pin(self.wait(request, first, place, deadline, gone)).await,
            None => Ok(first),
        }
    }

    async fn wait(
        self: &Arc<Self>,
        request: &Acquire,
        first: Admission,
        place: Place<'_>,
        deadline: Instant,
        gone: impl Future<Output = ()>,
    ) -> Result<Admission, StoreError> {
        let mut gone = std::pin::pin!(gone);
        let mut poll = FIRST_POLL;
        loop {
            // Listening begins before looking, so that a settlement in between is not missed.
            let mut settled = std::pin::pin!(place.settled.notified());
            settled.as_mut().enable();
            // It was in progress: a store that went away since is no reason to say, or to do, anything else.
            let Ok(look) = self.acquire(request).await else { return Ok(first) };
            let now = Instant::now();
            if !look.is_in_progress() || now >= deadline {
                return Ok(look);
            }
            let pause = jittered(poll, request.owner).min(deadline - now);
            poll = (poll * 2).min(LAST_POLL);
            tokio::select! {
                () = settled => planted!("waiter-does-not-look-again" => return Ok(super::bugs::unasked(request))),
                () = tokio::time::sleep(pause) => {}
                () = gone.as_mut() => return Ok(Admission::Gone),
                () = self.closing.cancelled() => return Ok(look),
            }
        }
    }

    /// One acquire. When its answer is lost it is repeated once with the same token, which is safe; if that fails too,
    /// a lease that it may have taken is given back in the background.
    async fn acquire(self: &Arc<Self>, request: &Acquire) -> Result<Admission, StoreError> {
        // A repeat does not extend what the first try may have taken.
        let acquired_at = Instant::now();
        let answer = match self.acquire_once(request, acquired_at).await {
            // Boxed, as it happens seldom.
            Err(error) if error.is_retryable() => match Box::pin(self.acquire_once(request, acquired_at)).await {
                // What was known is not forgotten because the store fails otherwise now.
                Err(_) if error.knows_a_record() => Err(error),
                answer => answer,
            },
            answer => answer,
        };
        if answer.is_err() {
            release_behind(self, never_answered(request));
        }
        answer
    }

    async fn acquire_once(&self, request: &Acquire, acquired_at: Instant) -> Result<Admission, StoreError> {
        let (lease, transaction, renew) = match &self.backend {
            Backend::Leased(store, _) => match self.bounded(store.acquire(request)).await? {
                AcquireOutcome::Acquired(lease) => (lease, None, true),
                outcome => return Ok(Admission::Answered(outcome)),
            },
            Backend::Transactional(store) => match self.bounded(store.begin(request)).await? {
                Begin::Acquired { lease, transaction, renew } => (lease, Some(transaction), renew),
                Begin::Answered(outcome) => return Ok(Admission::Answered(outcome)),
            },
        };
        self.observe(&Event::Acquired { acquisition: lease.acquisition, attempt: lease.attempt });
        Ok(Admission::Run(Admitted { lease, transaction, renew, acquired_at }))
    }
}

impl Admission {
    fn is_in_progress(&self) -> bool {
        matches!(self, Self::Answered(AcquireOutcome::InProgress { .. }))
    }
}

/// The lease that an acquire would have, had its answer come. Stores look only at its id and its owner.
fn never_answered(request: &Acquire) -> Lease {
    Lease { id: request.id, owner: request.owner, attempt: 0, acquisition: Acquisition::Fresh, checkpoint: None }
}

/// Half to all of `pause`. The owner token is random and each waiter has its own, so waiters do not move in step.
fn jittered(pause: Duration, owner: OwnerToken) -> Duration {
    let random = u32::from(owner.as_bytes()[0]) + 1;
    pause / 2 + pause * random / 512
}
