//! The first step of an operation: the store is asked whether it may run.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;

use super::admit::{Admission, Admitted};
use super::answer::{ExecuteError, ExecuteResult, Reply, answered};
use super::context::Context;
use super::contract::Contract;
use super::granted::Granted;
use super::observer::{Durations, EventKind};
use super::shared::Shared;
use crate::fingerprint::Fingerprint;
use crate::machine::{Acquire, Term};
use crate::store::{StoreError, StoreErrorKind};

/// An operation that was asked for, and what the store said to it.
pub(super) struct Asked<T> {
    fingerprint: Fingerprint,
    term: Term,
    admission: Result<Admission, StoreError>,
    reply: Reply<T>,
}

/// Asks the store whether an operation may run.
#[expect(clippy::manual_async_fn, reason = "the future of an `async fn` has room for each argument twice")]
pub(super) fn ask<T>(
    shared: Arc<Shared>,
    mut request: Acquire,
    by_other_algorithms: Vec<Fingerprint>,
    wait: Duration,
    mut reply: Reply<T>,
    permit: OwnedSemaphorePermit,
) -> impl Future<Output = Asked<T>> {
    async move {
        let mut durations = Durations::default();
        let admission =
            shared.admit(&mut request, &by_other_algorithms, wait, reply.closed(), permit, &mut durations).await;
        reply.durations = durations;
        Asked { fingerprint: request.fingerprint, term: request.term, admission, reply }
    }
}

/// What comes after the store was asked.
pub(super) enum Next<T> {
    Run(Granted<T>),
    Answer(Reply<T>, ExecuteResult<T>),
}

impl<T> Asked<T> {
    pub(super) fn next(self, shared: &Arc<Shared>) -> Next<T> {
        let Self { fingerprint, term, admission, reply } = self;
        let context = |lease, transaction| {
            Context::new(Arc::clone(shared), reply.subject().clone(), fingerprint, term, lease, transaction)
        };
        match admission {
            Ok(Admission::Run(Admitted { lease, transaction, renew, acquired_at, is_unclear, permit })) => {
                let context = context(Some(lease), transaction);
                let renewed_from = renew.then_some(acquired_at);
                Next::Run(Granted { context, renewed_from, is_acquire_unclear: is_unclear, permit, reply })
            }
            Ok(Admission::Answered(outcome)) => Next::Answer(reply, Ok(answered(outcome))),
            // The caller does not listen any more.
            Ok(Admission::Gone) => Next::Answer(reply, Err(ExecuteError::Interrupted)),
            Err(error) if shared.may_fail_open(&error) => {
                let Some(permit) = shared.permit() else { return Next::Answer(reply, Err(shared.overloaded())) };
                let subject = reply.subject();
                let error = &error as &dyn std::error::Error;
                tracing::error!(record = %subject.id, error, "an operation runs without protection");
                shared.observe(subject, None, EventKind::FailedOpen);
                let context = context(None, None);
                Next::Run(Granted { context, renewed_from: None, is_acquire_unclear: false, permit, reply })
            }
            Err(error) if error.kind() == StoreErrorKind::Busy => Next::Answer(reply, Err(ExecuteError::Busy(error))),
            Err(error) => Next::Answer(reply, Err(ExecuteError::NotAdmitted(error))),
        }
    }
}

impl Shared {
    /// Whether an operation may run without protection: only while the store is unavailable. A store that answers
    /// something unreadable may hold the record of a run that took effect. If a store reports a wrong configuration,
    /// the engine would fail open for ever.
    fn may_fail_open(&self, error: &StoreError) -> bool {
        // A busy store was not asked.
        let is_asked = error.kind() != StoreErrorKind::Busy;
        let is_away = is_asked && error.is_retryable() && !error.has_existing_record();
        self.settings.fail_open && self.contract() != Contract::Transactional && is_away
    }

    /// The error of an operation for which there is no permit.
    pub(super) fn overloaded(&self) -> ExecuteError {
        ExecuteError::Overloaded { limit: self.group.most_running }
    }
}
