//! Admission: a request gets the right to execute, or the answer instead.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::Operation;
use super::late_acquires::{give_back_when_taken, never_answered};
use super::observer::{Durations, EventKind, Subject};
use super::shared::{Backend, Shared};
use super::waiters::{Told, Waiter};
use crate::fingerprint::{Algorithm, Fingerprint};
use crate::machine::{Acquire, AcquireOutcome, Lease, Origin, Term};
use crate::record::OwnerToken;
use crate::store::{Begin, StoreError, StoreErrorKind, StoreTransaction};

pub(super) enum Admission {
    /// It runs now.
    Run(Admitted),
    /// It does not run; the outcome is not `Acquired`.
    Answered(AcquireOutcome),
    /// The caller went away while it waited.
    Gone,
}

/// The right to execute, and what came with it.
pub(super) struct Admitted {
    pub(super) lease: Lease,
    pub(super) transaction: Option<Box<dyn StoreTransaction>>,
    pub(super) renew: bool,
    /// Before the engine sent the first acquire that may have taken the lease. Counted from here, the lease ends before
    /// the store's.
    pub(super) acquired_at: Instant,
    /// Whether an acquire got no answer, so that the store may still execute it.
    pub(super) is_unclear: bool,
    pub(super) permit: OwnedSemaphorePermit,
}

/// A request on its way to an admission. All its acquires have one owner token.
struct AcquireAttempt<'a> {
    shared: &'a Arc<Shared>,
    request: &'a mut Acquire,
    /// The request's own, by which a new record is made.
    fingerprint: Fingerprint,
    by_other_algorithms: &'a [Fingerprint],
    subject: Subject,
    durations: &'a mut Durations,
    /// When the first unanswered acquire was sent; the store may still execute it.
    unclear_since: Option<Instant>,
}

/// The result of an acquire: the lease, its transaction, and whether the lease is to be renewed.
type Acquired = (Lease, Option<Box<dyn StoreTransaction>>, bool);

impl Shared {
    pub(super) fn acquire_request(&self, operation: &Operation) -> Acquire {
        let term = self.settings.term();
        Acquire {
            id: self.settings.identity.record_id(&operation.scope, &operation.key),
            origin: Origin { namespace: self.settings.identity.namespace().clone(), scope: operation.scope.clone() },
            trace: operation.trace,
            fingerprint: operation.fingerprint,
            owner: OwnerToken::random(),
            term: Term { retention: operation.retention.unwrap_or(term.retention), ..term },
            takeover: self.contract().takeover(self.settings.probe.is_some()),
            max_attempts: self.settings.max_attempts,
            on_mismatch: self.settings.on_mismatch,
        }
    }

    /// Asks for the right to execute. If another run is in progress, waits for its answer up to `wait` or until `gone`.
    pub(super) async fn admit(
        self: &Arc<Self>,
        request: &mut Acquire,
        by_other_algorithms: &[Fingerprint],
        wait: Duration,
        gone: impl Future<Output = ()>,
        permit: OwnedSemaphorePermit,
        durations: &mut Durations,
    ) -> Result<Admission, StoreError> {
        let deadline = Instant::now() + wait.min(self.settings.max_wait);
        let subject = Subject::of(request);
        let mut attempt = AcquireAttempt {
            shared: self,
            fingerprint: request.fingerprint,
            request,
            by_other_algorithms,
            subject,
            unclear_since: None,
            durations: &mut *durations,
        };
        let first = attempt.acquire(permit).await?;
        if !first.is_in_progress() || Instant::now() >= deadline {
            return Ok(first);
        }
        match self.waiters.enter(attempt.request.id, attempt.request.fingerprint) {
            // Boxed, because few requests wait, and unboxed it would enlarge the future of every request.
            Some(waiter) => {
                let (began, asked) = (Instant::now(), attempt.durations.store);
                let admission = Box::pin(attempt.wait(first, waiter, deadline, gone)).await;
                durations.wait = began.elapsed().saturating_sub(durations.store.saturating_sub(asked));
                admission
            }
            None => Ok(first),
        }
    }
}

impl AcquireAttempt<'_> {
    /// Waits for the answer of a run in progress: another waiter shares it, or this one asks the store when it is its
    /// turn.
    async fn wait(
        mut self,
        first: Admission,
        mut waiter: Waiter<'_>,
        deadline: Instant,
        gone: impl Future<Output = ()>,
    ) -> Result<Admission, StoreError> {
        let shared = self.shared;
        let mut gone = std::pin::pin!(gone);
        let turn = waiter.turn();
        let mut pace = tokio::select! {
            biased;
            told = waiter.told() => return Ok(match told {
                Told::Answer(outcome) => Admission::Answered(outcome),
                Told::Nothing => first,
            }),
            pace = turn => pace,
            () = tokio::time::sleep_until(deadline) => return Ok(first),
            () = gone.as_mut() => return Ok(Admission::Gone),
            () = shared.group.closing.cancelled() => return Ok(first),
        };
        let mut latest = first;
        loop {
            let permits = async {
                pace.due().await;
                shared.permits_to_look().await
            };
            let permits = tokio::select! {
                // Polled first, so that a short wait still asks once.
                biased;
                permits = permits => permits,
                () = tokio::time::sleep_until(deadline) => return Ok(latest),
                () = gone.as_mut() => return Ok(Admission::Gone),
                () = shared.group.closing.cancelled() => return Ok(latest),
            };
            let Some((looking, permit)) = permits else { return Ok(latest) };
            pace.asked(self.request.owner);
            // The operation was in progress. A store that became unavailable since changes neither the answer nor what
            // runs.
            let Ok(look) = self.acquire(permit).await else {
                waiter.tell(&mut pace, Told::Nothing);
                return Ok(latest);
            };
            drop(looking);
            match look {
                Admission::Answered(AcquireOutcome::InProgress { .. }) => latest = look,
                Admission::Answered(outcome) => {
                    waiter.tell(&mut pace, Told::Answer(outcome.clone()));
                    return Ok(Admission::Answered(outcome));
                }
                Admission::Run(_) | Admission::Gone => return Ok(look),
            }
        }
    }

    /// Acquires. If the store fails with a retryable error, repeats it once with the same token, which is safe.
    /// `permit` is kept only if the operation is to run.
    async fn acquire(&mut self, permit: OwnedSemaphorePermit) -> Result<Admission, StoreError> {
        let sent = Instant::now();
        self.request.fingerprint = self.fingerprint;
        let mut answer = self.acquire_or_repeat().await;
        if let Ok(Err(AcquireOutcome::Mismatch { stored_algorithm })) = &answer
            && let Some(fingerprint) = self.fingerprint_by(*stored_algorithm)
        {
            self.request.fingerprint = fingerprint;
            // Boxed, as only records of another version need it.
            answer = Box::pin(self.acquire_or_repeat()).await.map_err(StoreError::with_existing_record);
        }
        self.durations.store += sent.elapsed();
        Ok(match answer? {
            Ok((lease, transaction, renew)) => {
                let kind = EventKind::Acquired(lease.acquisition);
                self.shared.observe(&self.subject, Some(lease.attempt), kind);
                // An abandoned acquire, of this try or of an earlier one, may be the one that took the lease.
                let unclear_since = self.unclear_since.take();
                let (acquired_at, is_unclear) = (unclear_since.unwrap_or(sent), unclear_since.is_some());
                Admission::Run(Admitted { lease, transaction, renew, acquired_at, is_unclear, permit })
            }
            Err(outcome) => Admission::Answered(outcome),
        })
    }

    /// The request's fingerprint by the record's algorithm, if that differs from the one just compared.
    fn fingerprint_by(&self, stored: Algorithm) -> Option<Fingerprint> {
        let other = stored != self.request.fingerprint.algorithm();
        self.by_other_algorithms.iter().find(|fingerprint| other && fingerprint.algorithm() == stored).copied()
    }

    async fn acquire_or_repeat(&mut self) -> Result<Result<Acquired, AcquireOutcome>, StoreError> {
        match self.acquire_once().await {
            // Boxed, as it happens seldom. A busy store was not asked, and has already made the caller wait.
            Err(error) if error.is_retryable() && error.kind() != StoreErrorKind::Busy => {
                match Box::pin(self.acquire_once()).await {
                    // If the first error says that a record exists, the second one must not hide that.
                    Err(_) if error.has_existing_record() => Err(error),
                    answer => answer,
                }
            }
            answer => answer,
        }
    }

    #[expect(clippy::result_large_err, reason = "the outcome is moved on at once")]
    async fn acquire_once(&mut self) -> Result<Result<Acquired, AcquireOutcome>, StoreError> {
        // Unclear until it is answered, even if this future is dropped before.
        let before = self.unclear_since;
        self.unclear_since = before.or_else(|| Some(Instant::now()));
        let answer = match &self.shared.backend {
            Backend::Leased(store, _) => {
                let answer = self.shared.bounded(&self.subject, store.acquire(self.request)).await;
                answer.map(|outcome| match outcome {
                    AcquireOutcome::Acquired(lease) => Ok((lease, None, true)),
                    outcome => Err(outcome),
                })
            }
            Backend::Transactional(store) => {
                let answer = self.shared.bounded(&self.subject, store.begin(self.request)).await;
                answer.map(|begun| match begun {
                    Begin::Acquired { lease, transaction, renew } => Ok((lease, Some(transaction), renew)),
                    Begin::Answered(outcome) => Err(outcome),
                })
            }
        };
        if answer.as_ref().map_or_else(|error| !error.is_indeterminate(), |_| true) {
            self.unclear_since = before;
        }
        answer
    }
}

/// Releases the lease that an unanswered acquire may take, unless the operation runs under it.
impl Drop for AcquireAttempt<'_> {
    fn drop(&mut self) {
        let Acquire { id, fingerprint, owner, .. } = *self.request;
        if self.unclear_since.is_some() {
            give_back_when_taken(self.shared, &self.subject, never_answered(id, fingerprint, owner));
        }
    }
}

impl Admission {
    fn is_in_progress(&self) -> bool {
        matches!(self, Self::Answered(AcquireOutcome::InProgress { .. }))
    }
}
