//! The conformance suite for stores that commit business data and records together ([`TransactionalStore`]), and for what
//! [`DurableStore`](idem_core::DurableStore) adds.
//!
//! For the verbs of stores there is [`conformance!`](crate::conformance!).

use std::any::Any;
use std::fmt;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{
    Acquire, AcquireOutcome, Acquisition, Begin, Failure, Lease, OnMismatch, OwnerOutcome, Record, ReplayKind,
    Settlement, State, StoreTransaction, StoredResponse, Takeover, TransactionalStore, Writes,
};

use crate::fixture::{BACKOFF, KEPT, LEASE, checkpoint, completed, failed, mismatch_of, repeat_of, request, retryable};
use crate::subject::TimeControl;

/// A case of the suite: it panics when the store breaks its contract.
pub type TransactionalCase = for<'a> fn(&'a TransactionalSubject) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// The business data in the same database as the records.
#[async_trait]
pub trait BusinessData: fmt::Debug + Send + Sync + 'static {
    /// Makes one business write in a transaction, which is what [`StoreTransaction::as_any_mut`] gives.
    async fn write(&self, transaction: &mut (dyn Any + Send));

    /// How many business writes of this subject are committed; none at first.
    async fn count(&self) -> u64;

    /// The same records, opened as another process opens them.
    async fn opened_again(&self) -> Arc<dyn TransactionalStore>;

    /// A store with other records.
    async fn another_store(&self) -> Arc<dyn TransactionalStore>;
}

/// A store with transactions under test. The isolation that [`Subject`](crate::Subject) demands applies here too.
pub struct TransactionalSubject {
    /// The store.
    pub store: Arc<dyn TransactionalStore>,
    /// The business data in its database.
    pub data: Arc<dyn BusinessData>,
    /// Its time.
    pub time: Arc<dyn TimeControl>,
    /// How far the store's time may be from where the test put it; see [`Subject`](crate::Subject).
    pub precision: Duration,
    keep: Vec<Box<dyn Any + Send + Sync>>,
}

impl TransactionalSubject {
    /// A subject whose time stands still unless it is moved.
    #[must_use]
    pub fn new(store: Arc<dyn TransactionalStore>, data: Arc<dyn BusinessData>, time: Arc<dyn TimeControl>) -> Self {
        Self { store, data, time, precision: Duration::ZERO, keep: Vec::new() }
    }

    /// Sets how far the time may be off, at most 10 s; see [`Subject::with_precision`](crate::Subject::with_precision).
    ///
    /// # Panics
    /// When `precision` is more than 10 s.
    #[must_use]
    pub fn with_precision(mut self, precision: Duration) -> Self {
        assert!(precision <= Duration::from_secs(10), "a precision of more than 10 s proves nothing");
        self.precision = precision;
        self
    }

    /// Keeps `value` for as long as the subject.
    #[must_use]
    pub fn keeping(mut self, value: impl Any + Send + Sync) -> Self {
        self.keep.push(Box::new(value));
        self
    }

    /// Begins a transaction. A store may release a key a moment after it has answered another request for it.
    async fn begin(&self, request: &Acquire) -> (Lease, Box<dyn StoreTransaction>) {
        let mut begun = self.store.begin(request).await;
        for _ in 0..1_000 {
            if !matches!(begun, Ok(Begin::Answered(AcquireOutcome::InProgress { .. }))) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
            begun = self.store.begin(request).await;
        }
        match begun {
            Ok(Begin::Acquired { lease, transaction, .. }) => (lease, transaction),
            other => panic!("a transaction should begin: {other:?}"),
        }
    }

    async fn leased(&self, request: &Acquire) -> Lease {
        match self.store.acquire(request).await {
            Ok(AcquireOutcome::Acquired(lease)) => lease,
            other => panic!("a new key should be acquired: {other:?}"),
        }
    }

    async fn answered(&self, request: &Acquire) -> AcquireOutcome {
        match self.store.begin(request).await {
            Ok(Begin::Answered(outcome)) => outcome,
            other => panic!("it should be answered: {other:?}"),
        }
    }

    async fn write(&self, transaction: &mut dyn StoreTransaction) {
        self.data.write(transaction.as_any_mut()).await;
    }

    /// Runs an operation with one business write.
    async fn run(&self, request: &Acquire, settlement: &Settlement, writes: Writes) -> Lease {
        let (lease, mut transaction) = self.begin(request).await;
        self.write(&mut *transaction).await;
        let finished = transaction.finish(settlement, KEPT, writes).await;
        assert!(matches!(finished, Ok(OwnerOutcome::Applied)), "{settlement:?} with {writes:?}: {finished:?}");
        lease
    }

    async fn record(&self, request: &Acquire) -> Option<Record> {
        self.store.peek(&request.id).await.expect("a look at the record")
    }
}

impl fmt::Debug for TransactionalSubject {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("TransactionalSubject").field("store", &self.store).finish_non_exhaustive()
    }
}

/// Makes a `#[test]` of every case of [`transactional`](crate::transactional), for the store that the harness gives.
///
/// Like [`conformance!`](crate::conformance!), with a harness that gives a future of a [`TransactionalSubject`].
#[macro_export]
macro_rules! transactional_conformance {
    ($harness:expr) => {
        $crate::transactional_conformance!(transactional_conformance, $harness);
    };
    ($module:ident, $harness:expr) => {
        #[cfg(test)]
        mod $module {
            use super::*;
            $crate::__for_every_transactional_case!($crate::__test_of_every_transactional_case, ($harness));
        }
    };
}

/// The list of all cases.
#[doc(hidden)]
#[macro_export]
macro_rules! __for_every_transactional_case {
    ($callback:path, $argument:tt) => {
        $callback! { $argument,
            nothing_is_seen_before_the_commit
            what_is_kept_commits_with_its_record
            what_is_discarded_leaves_its_record
            a_release_leaves_no_record
            each_settlement_leads_to_its_state_in_a_transaction
            a_transaction_that_is_dropped_leaves_nothing
            a_running_transaction_turns_others_away
            one_of_many_transactions_begins
            a_committed_record_is_replayed_to_transactions_and_verbs
            a_record_of_the_verbs_is_replayed_to_transactions
            a_mismatch_is_refused_before_a_transaction_begins
            a_retryable_failure_runs_again_in_a_transaction
            a_lease_that_is_over_is_taken_over_by_a_transaction
            an_unknown_outcome_never_runs_in_a_transaction
            used_up_attempts_never_run_in_a_transaction
            the_original_is_replayed_to_a_transaction_where_the_policy_says_so
            a_transaction_that_was_taken_over_commits_nothing
            a_live_record_says_how_long_it_lives
            those_who_share_records_have_one_identity
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __test_of_every_transactional_case {
    (($harness:expr), $($case:ident)+) => {
        $(
            #[test]
            fn $case() {
                $crate::transactional::run($harness, |subject| {
                    ::std::boxed::Box::pin($crate::transactional::$case(subject))
                });
            }
        )+
    };
}

macro_rules! named_cases {
    ((), $($case:ident)+) => {
        /// Every case with its name.
        pub const ALL: &[(&str, TransactionalCase)] = &[$((stringify!($case), |subject| Box::pin($case(subject)))),+];
    };
}

crate::__for_every_transactional_case!(named_cases, ());

/// Runs one case on a subject that `harness` makes, on a separate runtime with several threads.
///
/// # Panics
/// When the store breaks its contract, or the case takes longer than two minutes.
pub fn run<H, S>(harness: H, case: TransactionalCase)
where
    H: FnOnce() -> S,
    S: Future<Output = TransactionalSubject>,
{
    crate::conformance::within_the_limit(async {
        let subject = harness().await;
        case(&subject).await;
    });
}

/// Before the commit, neither the business write nor the settled record is visible.
pub async fn nothing_is_seen_before_the_commit(subject: &TransactionalSubject) {
    let request = request();
    let (_, mut transaction) = subject.begin(&request).await;
    subject.write(&mut *transaction).await;
    assert_eq!(subject.data.count().await, 0, "a write is seen before its commit");
    let record = subject.record(&request).await;
    assert!(record.is_none_or(|record| matches!(record.state, State::InProgress { .. })), "a record is seen early");
    drop(transaction);
}

/// After `finish`, the business write and the record exist.
pub async fn what_is_kept_commits_with_its_record(subject: &TransactionalSubject) {
    let request = request();
    subject.run(&request, &completed(), Writes::Keep).await;
    assert_eq!(subject.data.count().await, 1, "the write is lost");
    let record = subject.record(&request).await.expect("a record");
    assert_eq!((record.fingerprint, record.attempt, record.owner), (request.fingerprint, 1, request.owner));
}

/// If writes are discarded, only the record exists.
pub async fn what_is_discarded_leaves_its_record(subject: &TransactionalSubject) {
    for settlement in [completed(), failed(), retryable()] {
        let request = request();
        subject.run(&request, &settlement, Writes::Discard).await;
        assert_eq!(subject.data.count().await, 0, "{settlement:?}: the write was kept");
        assert!(subject.record(&request).await.is_some(), "{settlement:?}: the record is lost");
    }
}

/// A release keeps or discards the business write, and frees the key.
pub async fn a_release_leaves_no_record(subject: &TransactionalSubject) {
    for (writes, expected) in [(Writes::Discard, 0), (Writes::Keep, 1)] {
        let request = request();
        subject.run(&request, &Settlement::Released, writes).await;
        assert_eq!(subject.data.count().await, expected, "{writes:?}");
        assert_eq!(subject.record(&request).await, None, "{writes:?}");
        drop(subject.begin(&repeat_of(&request)).await);
    }
}

/// Each settlement leads to its state, as the verb `settle` does.
pub async fn each_settlement_leads_to_its_state_in_a_transaction(subject: &TransactionalSubject) {
    for settlement in [completed(), failed(), retryable(), Settlement::OutcomeUnknown] {
        let request = request();
        subject.run(&request, &settlement, Writes::Keep).await;
        let state = subject.record(&request).await.expect("a record").state;
        let is_right = match (&settlement, &state) {
            (Settlement::Completed(expected), State::Completed { response }) => expected == response,
            (Settlement::FailedTerminal(expected), State::Failed { failure, response }) => {
                (failure, response) == (&Failure::Terminal, expected)
            }
            (Settlement::FailedRetryable { response: expected, .. }, State::Failed { failure, response }) => {
                matches!(failure, Failure::Retryable { .. }) && response == expected
            }
            (Settlement::OutcomeUnknown, State::Failed { failure, response }) => {
                (failure, response) == (&Failure::OutcomeUnknown, &StoredResponse::outcome_unknown())
            }
            _ => false,
        };
        assert!(is_right, "{settlement:?} led to {state:?}");
    }
}

/// A dropped transaction leaves neither a write nor a record, and its key is free after one lease.
pub async fn a_transaction_that_is_dropped_leaves_nothing(subject: &TransactionalSubject) {
    let request = request();
    let (_, mut transaction) = subject.begin(&request).await;
    subject.write(&mut *transaction).await;
    drop(transaction);
    subject.time.advance(LEASE + subject.precision);
    drop(subject.begin(&repeat_of(&request)).await);
    assert_eq!(subject.data.count().await, 0, "what was dropped is there");
}

/// While a transaction runs, other transactions and the verbs get an answer at once.
pub async fn a_running_transaction_turns_others_away(subject: &TransactionalSubject) {
    let request = request();
    let (_, transaction) = subject.begin(&request).await;
    let others = async {
        let begun = subject.answered(&repeat_of(&request)).await;
        assert!(matches!(begun, AcquireOutcome::InProgress { .. }), "{begun:?}");
        let acquired = subject.store.acquire(&repeat_of(&request)).await;
        assert!(matches!(acquired, Ok(AcquireOutcome::InProgress { .. })), "{acquired:?}");
    };
    let in_time = tokio::time::timeout(Duration::from_secs(20), others).await;
    in_time.expect("a repeat waits for the transaction that runs");
    drop(transaction);
}

/// One of many transactions begins. The others get its answer, or that it is in progress.
pub async fn one_of_many_transactions_begins(subject: &TransactionalSubject) {
    let request = request();
    let begun = (0..8).map(|_| {
        let (store, data, request) = (subject.store.clone(), subject.data.clone(), repeat_of(&request));
        tokio::spawn(async move {
            match store.begin(&request).await.expect("an answer") {
                Begin::Acquired { mut transaction, .. } => {
                    data.write(transaction.as_any_mut()).await;
                    let finished = transaction.finish(&completed(), KEPT, Writes::Keep).await;
                    assert!(matches!(finished, Ok(OwnerOutcome::Applied)), "{finished:?}");
                    1
                }
                Begin::Answered(AcquireOutcome::InProgress { .. } | AcquireOutcome::Replay(_)) => 0,
                Begin::Answered(other) => panic!("{other:?}"),
            }
        })
    });
    let mut runs = 0;
    for begun in begun.collect::<Vec<_>>() {
        runs += begun.await.expect("a task that does not panic");
    }
    assert_eq!((runs, subject.data.count().await), (1, 1));
}

/// A committed record is replayed to transactions and to verbs.
pub async fn a_committed_record_is_replayed_to_transactions_and_verbs(subject: &TransactionalSubject) {
    let request = request();
    subject.run(&request, &completed(), Writes::Keep).await;
    let begun = subject.answered(&repeat_of(&request)).await;
    let acquired = subject.store.acquire(&repeat_of(&request)).await.expect("an answer");
    assert!(matches!(begun, AcquireOutcome::Replay(_)), "{begun:?}");
    assert_eq!(begun, acquired);
}

/// A record of the verbs is replayed to transactions, because one store may serve several contracts.
pub async fn a_record_of_the_verbs_is_replayed_to_transactions(subject: &TransactionalSubject) {
    let request = request();
    let lease = subject.leased(&request).await;
    let begun = subject.answered(&repeat_of(&request)).await;
    assert!(matches!(begun, AcquireOutcome::InProgress { .. }), "{begun:?}");
    let settled = subject.store.settle(&lease, &completed(), KEPT).await;
    assert!(matches!(settled, Ok(OwnerOutcome::Applied)), "{settled:?}");
    let begun = subject.answered(&repeat_of(&request)).await;
    assert!(matches!(begun, AcquireOutcome::Replay(_)), "{begun:?}");
}

/// After a mismatch, nothing runs, and the record stays.
pub async fn a_mismatch_is_refused_before_a_transaction_begins(subject: &TransactionalSubject) {
    let request = request();
    subject.run(&request, &completed(), Writes::Keep).await;
    let before = subject.record(&request).await;
    let begun = subject.answered(&mismatch_of(&request)).await;
    assert!(matches!(begun, AcquireOutcome::Mismatch { .. }), "{begun:?}");
    assert_eq!(subject.record(&request).await, before);
}

/// After its backoff, a retryable failure runs as the next attempt.
pub async fn a_retryable_failure_runs_again_in_a_transaction(subject: &TransactionalSubject) {
    let request = request();
    subject.run(&request, &retryable(), Writes::Discard).await;
    let begun = subject.answered(&repeat_of(&request)).await;
    assert!(matches!(begun, AcquireOutcome::Backoff { .. }), "{begun:?}");
    subject.time.advance(BACKOFF + subject.precision);
    let lease = subject.run(&repeat_of(&request), &completed(), Writes::Keep).await;
    assert_eq!((lease.attempt, subject.data.count().await), (2, 1));
}

/// A lease of the verbs, which is over, as the next attempt and with its checkpoint.
pub async fn a_lease_that_is_over_is_taken_over_by_a_transaction(subject: &TransactionalSubject) {
    let request = request();
    let lease = subject.leased(&request).await;
    let noted = subject.store.checkpoint(&lease, &checkpoint("charged")).await;
    assert!(matches!(noted, Ok(OwnerOutcome::Applied)), "{noted:?}");
    subject.time.advance(LEASE + subject.precision);
    let lease = subject.run(&repeat_of(&request), &completed(), Writes::Keep).await;
    assert_eq!((lease.attempt, lease.acquisition), (2, Acquisition::Takeover));
    assert_eq!(lease.checkpoint, Some(checkpoint("charged")));
    assert_eq!(subject.data.count().await, 1);
}

/// A lease of the verbs, which is over and whose outcome counts as unknown; also for the next request.
pub async fn an_unknown_outcome_never_runs_in_a_transaction(subject: &TransactionalSubject) {
    let request = Acquire { takeover: Takeover::Unknown, ..request() };
    subject.leased(&request).await;
    subject.time.advance(LEASE + subject.precision);
    for _ in 0..2 {
        match subject.answered(&repeat_of(&request)).await {
            AcquireOutcome::Replay(replay) => assert_eq!(replay.kind, ReplayKind::OutcomeUnknown),
            other => panic!("{other:?}"),
        }
    }
    let state = subject.record(&request).await.expect("a record").state;
    assert!(matches!(state, State::Failed { failure: Failure::OutcomeUnknown, .. }), "{state:?}");
}

/// The failure becomes final.
pub async fn used_up_attempts_never_run_in_a_transaction(subject: &TransactionalSubject) {
    let request = Acquire { max_attempts: NonZeroU32::MIN, ..request() };
    subject.run(&request, &retryable(), Writes::Discard).await;
    subject.time.advance(BACKOFF + subject.precision);
    let begun = subject.answered(&repeat_of(&request)).await;
    assert!(matches!(begun, AcquireOutcome::Replay(_)), "{begun:?}");
    let state = subject.record(&request).await.expect("a record").state;
    assert!(matches!(state, State::Failed { failure: Failure::Terminal, .. }), "{state:?}");
}

/// And never runs another request.
pub async fn the_original_is_replayed_to_a_transaction_where_the_policy_says_so(subject: &TransactionalSubject) {
    let request = request();
    subject.run(&request, &completed(), Writes::Keep).await;
    let other = Acquire { on_mismatch: OnMismatch::ReplayOriginal, ..mismatch_of(&request) };
    let begun = subject.answered(&other).await;
    assert!(matches!(begun, AcquireOutcome::Replay(_)), "{begun:?}");
}

/// A transaction that outlives its lease, if it has one: its successor runs, and it commits nothing.
pub async fn a_transaction_that_was_taken_over_commits_nothing(subject: &TransactionalSubject) {
    let request = request();
    let (mut late, renew) = match subject.store.begin(&request).await {
        Ok(Begin::Acquired { transaction, renew, .. }) => (transaction, renew),
        other => panic!("a transaction should begin: {other:?}"),
    };
    subject.time.advance(LEASE + subject.precision);
    let again = repeat_of(&request);
    if !renew {
        let begun = subject.answered(&again).await;
        assert!(matches!(begun, AcquireOutcome::InProgress { .. }), "what needs no renewal was taken over: {begun:?}");
        subject.write(&mut *late).await;
        let finished = late.finish(&completed(), KEPT, Writes::Keep).await;
        assert!(matches!(finished, Ok(OwnerOutcome::Applied)), "{finished:?}");
        assert_eq!(subject.data.count().await, 1);
        return;
    }
    // The late one has written nothing yet, so that a database with one writer lets its successor in.
    let successor =
        tokio::time::timeout(Duration::from_secs(20), subject.run(&again, &completed(), Writes::Keep)).await;
    successor.expect("the successor waits for the transaction that it takes over");
    subject.write(&mut *late).await;
    let finished = late.finish(&completed(), KEPT, Writes::Keep).await;
    assert!(!matches!(finished, Ok(OwnerOutcome::Applied)), "a transaction that was taken over was committed");
    assert_eq!(subject.data.count().await, 1, "the effect is there twice");
    assert_eq!(subject.record(&request).await.map(|record| record.owner), Some(again.owner));
}

/// A live record says how long it lives, within the precision of the subject's time.
pub async fn a_live_record_says_how_long_it_lives(subject: &TransactionalSubject) {
    let request = request();
    let live = async || subject.store.live_record(&request.id).await.expect("a look at the record");
    assert_eq!(live().await, None);
    subject.run(&request, &completed(), Writes::Keep).await;
    subject.time.advance(KEPT / 2);
    let record = live().await.expect("a live record");
    assert_eq!(Some(record.record), subject.record(&request).await);
    let (left, expected) = (record.remaining, KEPT / 2);
    assert!(left.abs_diff(expected) <= subject.precision, "{left:?} are left, and should be {expected:?}");
    subject.time.advance(KEPT / 2 + subject.precision);
    assert_eq!(live().await, None, "what is over is live");
}

/// Stores of the same records have one identity, and stores of other records have another. A cache tells their records apart
/// by it.
pub async fn those_who_share_records_have_one_identity(subject: &TransactionalSubject) {
    let request = request();
    subject.run(&request, &completed(), Writes::Keep).await;
    let again = subject.data.opened_again().await;
    assert_eq!(again.identity(), subject.store.identity(), "the same store has two identities");
    let record = again.peek(&request.id).await.expect("a look at the record");
    assert_eq!(record, subject.record(&request).await, "the store that was opened again has other records");
    let another = subject.data.another_store().await;
    assert_ne!(another.identity(), subject.store.identity(), "two stores have one identity");
    assert_eq!(another.peek(&request.id).await.expect("a look at the record"), None);
}
