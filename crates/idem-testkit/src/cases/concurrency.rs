//! Many callers at once, on real threads (law L1).

use std::pin::Pin;
use std::sync::Arc;

use idem_core::{
    Acquire, AcquireOutcome, Acquisition, Checkpoint, IdempotencyStore, OwnerOutcome, ReplayKind, Settlement, State,
    StoredResponse, Takeover,
};
use tokio::sync::Barrier;

use super::assert_replay;
use crate::fixture::{BACKOFF, KEPT, LEASE, completed, mismatch_of, repeat_of, request, response, retryable};
use crate::subject::{Purging, Subject};

const CALLERS: usize = 16;

/// A race depends on chance, so each is run often.
const ROUNDS: usize = 20;

/// Runs the calls at once, each in a separate task, and returns their answers in the order of the calls.
pub(crate) async fn at_once<T, F>(calls: impl IntoIterator<Item = F>) -> Vec<T>
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let calls: Vec<F> = calls.into_iter().collect();
    let barrier = Arc::new(Barrier::new(calls.len()));
    let start = |call: F| {
        let barrier = Arc::clone(&barrier);
        tokio::spawn(async move {
            barrier.wait().await;
            call.await
        })
    };
    let tasks: Vec<_> = calls.into_iter().map(start).collect();
    let mut answers = Vec::with_capacity(tasks.len());
    for task in tasks {
        answers.push(task.await.expect("a call panicked"));
    }
    answers
}

async fn acquire(store: Arc<dyn IdempotencyStore>, request: Acquire) -> AcquireOutcome {
    store.acquire(&request).await.expect("acquire: the store could not answer")
}

async fn acquire_at_once(subject: &Subject, requests: impl IntoIterator<Item = Acquire>) -> Vec<AcquireOutcome> {
    at_once(requests.into_iter().map(|request| acquire(subject.store.clone(), request))).await
}

enum Reply<T> {
    Acquire(AcquireOutcome),
    Rival(T),
}

/// Sends repeats of `request` and a rival call at once. The place of the rival among them varies with the round, so that it
/// sometimes comes first and sometimes last.
async fn meet<T, F>(subject: &Subject, round: usize, request: &Acquire, rival: F) -> (T, Vec<AcquireOutcome>)
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    type Call<T> = Pin<Box<dyn Future<Output = Reply<T>> + Send>>;
    let acquire = |request| -> Call<T> {
        let call = acquire(subject.store.clone(), request);
        Box::pin(async move { Reply::Acquire(call.await) })
    };
    let mut calls: Vec<Call<T>> = repeats(request).map(acquire).collect();
    calls.insert(round % (CALLERS + 1), Box::pin(async move { Reply::Rival(rival.await) }));
    let (mut answer, mut outcomes) = (None, Vec::new());
    for reply in at_once(calls).await {
        match reply {
            Reply::Acquire(outcome) => outcomes.push(outcome),
            Reply::Rival(given) => answer = Some(given),
        }
    }
    (answer.expect("the rival answered"), outcomes)
}

fn repeats(request: &Acquire) -> impl Iterator<Item = Acquire> {
    std::iter::repeat_with(|| repeat_of(request)).take(CALLERS)
}

/// Asserts that exactly one caller acquired, as `expected`, and that the others got `InProgress`. Returns the attempt.
fn assert_one_winner(outcomes: &[AcquireOutcome], expected: Acquisition) -> u32 {
    let mut attempt = None;
    for outcome in outcomes {
        match outcome {
            AcquireOutcome::Acquired(lease) => {
                assert_eq!(lease.acquisition, expected);
                assert_eq!(attempt.replace(lease.attempt), None, "two callers were told to run");
            }
            AcquireOutcome::InProgress { .. } => {}
            other => panic!("expected Acquired or InProgress, got {other:?}"),
        }
    }
    attempt.expect("nobody was told to run")
}

/// Of many first requests, exactly one runs.
pub async fn one_of_many_first_requests_runs(subject: &Subject) {
    for _ in 0..ROUNDS {
        let outcomes = acquire_at_once(subject, repeats(&request())).await;
        assert_eq!(assert_one_winner(&outcomes, Acquisition::Fresh), 1);
    }
}

/// Of many requests after the end of a lease, exactly one takes over.
pub async fn one_of_many_takes_over(subject: &Subject) {
    let request = request();
    subject.lease(&request).await;
    for attempt in 2..ROUNDS as u32 {
        subject.advance_to_end_of(LEASE);
        let outcomes = acquire_at_once(subject, repeats(&request)).await;
        assert_eq!(assert_one_winner(&outcomes, Acquisition::Takeover), attempt);
    }
}

/// Of many requests after the backoff, exactly one retries.
pub async fn one_of_many_retries(subject: &Subject) {
    for _ in 0..ROUNDS {
        let request = request();
        let lease = subject.lease(&request).await;
        subject.settle(&lease, &retryable()).await;
        subject.advance_to_end_of(BACKOFF);
        let outcomes = acquire_at_once(subject, repeats(&request)).await;
        assert_eq!(assert_one_winner(&outcomes, Acquisition::Retry), 2);
    }
}

/// Of many requests after the retention, exactly one runs, and it is fresh.
pub async fn one_of_many_runs_after_the_retention(subject: &Subject) {
    for _ in 0..ROUNDS {
        let request = request();
        let lease = subject.lease(&request).await;
        subject.settle(&lease, &completed()).await;
        subject.advance_to_end_of(KEPT);
        let outcomes = acquire_at_once(subject, repeats(&request)).await;
        assert_eq!(assert_one_winner(&outcomes, Acquisition::Fresh), 1);
    }
}

/// Many requests that find an unknown outcome agree on it, and on the time of its settlement.
pub async fn all_agree_on_an_unknown_outcome(subject: &Subject) {
    for _ in 0..ROUNDS {
        let request = Acquire { takeover: Takeover::Unknown, ..request() };
        subject.lease(&request).await;
        subject.advance_to_end_of(LEASE);
        let outcomes = acquire_at_once(subject, repeats(&request)).await;
        let unknown = StoredResponse::outcome_unknown();
        assert_replay(&outcomes[0], ReplayKind::OutcomeUnknown, 1, &unknown);
        assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "callers disagree: {outcomes:?}");
    }
}

/// Two different requests under one key: one request runs once, the other is a mismatch.
pub async fn one_of_two_different_requests_runs(subject: &Subject) {
    for _ in 0..ROUNDS {
        let one = request();
        let other = mismatch_of(&one);
        let requests = repeats(&one).zip(repeats(&other)).flat_map(|(one, other)| [one, other]);
        let outcomes = acquire_at_once(subject, requests).await;
        let ran = |outcome: &AcquireOutcome| matches!(outcome, AcquireOutcome::Acquired(_));
        let winner = outcomes.iter().position(ran).expect("nobody was told to run");
        for (at, outcome) in outcomes.iter().enumerate() {
            let same_request = at % 2 == winner % 2;
            match outcome {
                AcquireOutcome::Acquired(_) => assert_eq!(at, winner, "two callers were told to run"),
                AcquireOutcome::InProgress { .. } => assert!(same_request, "another request was told to wait"),
                AcquireOutcome::Mismatch { .. } => assert!(!same_request, "the same request was refused"),
                other => panic!("unexpected {other:?}"),
            }
        }
    }
}

/// The same acquire sent many times at once is one acquire.
pub async fn an_acquire_that_is_sent_many_times_is_one(subject: &Subject) {
    for _ in 0..ROUNDS {
        let request = request();
        let outcomes = acquire_at_once(subject, std::iter::repeat_n(request.clone(), CALLERS)).await;
        let lease = subject.lease(&request).await;
        assert_eq!(lease.attempt, 1);
        assert!(outcomes.iter().all(|outcome| *outcome == AcquireOutcome::Acquired(lease.clone())), "{outcomes:?}");
    }
}

/// Many keys at once: none disturbs another.
pub async fn many_keys_are_acquired_at_once(subject: &Subject) {
    let outcomes = acquire_at_once(subject, std::iter::repeat_with(request).take(CALLERS * 8)).await;
    let fresh = |outcome: &AcquireOutcome| matches!(outcome, AcquireOutcome::Acquired(lease) if lease.attempt == 1);
    assert!(outcomes.iter().all(fresh), "{outcomes:?}");
}

/// A settlement meets a takeover: it either came first and is replayed, or it came too late and changed nothing.
pub async fn a_settlement_meets_a_takeover(subject: &Subject) {
    for round in 0..ROUNDS {
        let first = request();
        let lease = subject.lease(&first).await;
        subject.advance_to_end_of(LEASE);
        let store = subject.store.clone();
        let settle = async move { store.settle(&lease, &completed(), KEPT).await };
        let (settled, outcomes) = meet(subject, round, &first, settle).await;
        let settled = settled.expect("settle: the store could not answer");
        let record = subject.record(&first.id).await;
        match settled {
            OwnerOutcome::Applied => {
                assert_eq!((record.owner, record.attempt), (first.owner, 1));
                outcomes.iter().for_each(|outcome| assert_replay(outcome, ReplayKind::Completed, 1, &response()));
            }
            OwnerOutcome::LeaseLost => {
                assert_eq!(assert_one_winner(&outcomes, Acquisition::Takeover), 2);
                assert!(matches!(record.state, State::InProgress { .. }), "{record:?}");
            }
        }
    }
}

/// A renewal meets a takeover: exactly one of them holds the lease afterwards.
pub async fn a_renewal_meets_a_takeover(subject: &Subject) {
    for round in 0..ROUNDS {
        let first = request();
        let lease = subject.lease(&first).await;
        subject.advance_to_end_of(LEASE);
        let store = subject.store.clone();
        let renew = async move { store.renew(&lease, request().term).await };
        let (renewed, outcomes) = meet(subject, round, &first, renew).await;
        let renewed = renewed.expect("renew: the store could not answer");
        let taken_over = outcomes.iter().any(|outcome| matches!(outcome, AcquireOutcome::Acquired(_)));
        assert_eq!(renewed == OwnerOutcome::LeaseLost, taken_over, "{renewed:?} and {outcomes:?}");
    }
}

/// Of many different settlements by one owner, exactly one is applied, and the record keeps it.
pub async fn one_of_many_settlements_is_applied(subject: &Subject) {
    for _ in 0..ROUNDS {
        let lease = subject.lease(&request()).await;
        let responses: Vec<_> = (0..CALLERS).map(|at| StoredResponse::new(200, format!("{at}"))).collect();
        let settle = |response: &StoredResponse| {
            let (store, lease) = (subject.store.clone(), lease.clone());
            let settlement = Settlement::Completed(response.clone());
            async move { store.settle(&lease, &settlement, KEPT).await.expect("settle: the store could not answer") }
        };
        let outcomes = at_once(responses.iter().map(settle)).await;
        let applied: Vec<_> = (0..CALLERS).filter(|&at| outcomes[at] == OwnerOutcome::Applied).collect();
        assert_eq!(applied.len(), 1, "{outcomes:?}");
        let response = responses[applied[0]].clone();
        assert_eq!(subject.record(&lease.id).await.state, State::Completed { response });
    }
}

/// Checkpoints and renewals at once: no update is lost to another.
pub async fn checkpoints_and_renewals_do_not_undo_each_other(subject: &Subject) {
    for round in 0..ROUNDS {
        let lease = subject.lease(&request()).await;
        subject.time.advance(LEASE / 2);
        let checkpoint = Checkpoint { sequence: 1, name: "round".into(), data: format!("{round}").into() };
        let call = |renews: bool| {
            let (store, lease, checkpoint) = (subject.store.clone(), lease.clone(), checkpoint.clone());
            async move {
                match renews {
                    true => store.renew(&lease, request().term).await,
                    false => store.checkpoint(&lease, &checkpoint).await,
                }
            }
        };
        for outcome in at_once([call(round % 2 == 0), call(round % 2 == 1)]).await {
            assert_eq!(outcome.expect("the store could not answer"), OwnerOutcome::Applied);
        }
        let record = subject.record(&lease.id).await;
        assert_eq!(record.checkpoint, Some(checkpoint));
        let renewed = record.created_at.saturating_add(LEASE + LEASE / 4);
        assert!(matches!(record.state, State::InProgress { lease_until, .. } if lease_until > renewed), "{record:?}");
    }
}

/// Purge meets acquires of a key whose record is over: one request runs, and its record stays.
pub async fn purge_meets_acquires(subject: &Subject) {
    for round in 0..ROUNDS {
        let first = request();
        let lease = subject.lease(&first).await;
        subject.settle(&lease, &completed()).await;
        subject.advance_to_end_of(KEPT);
        let purging = subject.purging.clone();
        let limit = std::num::NonZeroU32::MIN.saturating_add(99);
        let purging = async move {
            // A server that purges without a call has done so, or does it meanwhile.
            if let Purging::Called(purge) = purging {
                for _ in 0..5 {
                    purge.purge(limit).await.expect("purge: the store could not answer");
                }
            }
        };
        let ((), outcomes) = meet(subject, round, &first, purging).await;
        assert_eq!(assert_one_winner(&outcomes, Acquisition::Fresh), 1);
        assert!(subject.peek(&first.id).await.is_some(), "purge removed a live record");
    }
}
