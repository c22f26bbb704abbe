//! The fault wrapper fails as scripted, and changes nothing else.

use std::any::Any;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::{
    Acquire, AcquireOutcome, Acquisition, Begin, Capabilities, Checkpoint, DurableStore, IdempotencyStore, Lease,
    LeaseRenewer, LiveRecord, MemoryStore, OwnerOutcome, Record, RecordId, Settlement, SettlementListener, State,
    StoreError, StoreErrorKind, StoreTransaction, Term, TransactionalStore, Writes,
};
use idem_testkit::fixture::{KEPT, checkpoint, completed, request};
use idem_testkit::{Fault, FaultyStore, Subject, Verb};

fn memory() -> Arc<MemoryStore> {
    Arc::new(MemoryStore::new(NonZeroUsize::MAX))
}

fn lease_of(request: &Acquire) -> Lease {
    let (id, owner) = (request.id, request.owner);
    Lease { id, fingerprint: request.fingerprint, owner, attempt: 1, acquisition: Acquisition::Fresh, checkpoint: None }
}

/// A wrapper without a script is a store like the one inside.
async fn faultless() -> Subject {
    let clock = Arc::new(idem_core::memory::ManualClock::new(idem_core::Timestamp::from_unix_micros(0)));
    let inner = Arc::new(MemoryStore::with_clock(NonZeroUsize::MAX, clock.clone()));
    Subject::new(Arc::new(FaultyStore::new(inner.clone())), inner, clock)
}

idem_testkit::conformance!(a_wrapper_without_a_script, faultless);

#[tokio::test]
async fn an_error_before_the_call_executes_nothing() {
    let store = FaultyStore::new(memory()).script(Verb::Acquire, [Fault::ErrorBefore]);
    let request = request();
    let error = store.acquire(&request).await.unwrap_err();
    assert_eq!((error.kind(), error.is_indeterminate()), (StoreErrorKind::Unavailable, false));
    assert_eq!(store.inner().peek(&request.id).await.unwrap(), None);
    assert_eq!((store.fired(), store.calls(Verb::Acquire), store.calls(Verb::Peek)), (1, 1, 0));
}

#[tokio::test]
async fn an_error_after_the_call_executes_it_and_is_indeterminate() {
    let store = FaultyStore::new(memory()).script(Verb::Settle, [Fault::ErrorAfter]);
    let request = request();
    store.acquire(&request).await.unwrap();
    let error = store.settle(&lease_of(&request), &completed(), KEPT).await.unwrap_err();
    assert_eq!((error.kind(), error.is_indeterminate()), (StoreErrorKind::Unavailable, true));
    let record = store.peek(&request.id).await.unwrap().unwrap();
    assert!(matches!(record.state, State::Completed { .. }));
}

#[tokio::test(start_paused = true)]
async fn a_delay_comes_before_the_call() {
    let delay = Duration::from_secs(5);
    let store = Arc::new(FaultyStore::new(memory()).script(Verb::Acquire, [Fault::Delay(delay)]));
    let request = request();
    let (late, sent) = (Arc::clone(&store), request.clone());
    let start = tokio::time::Instant::now();
    let task = tokio::spawn(async move { late.acquire(&sent).await });
    tokio::time::sleep(delay - Duration::from_millis(2)).await;
    assert_eq!(store.peek(&request.id).await.unwrap(), None);
    task.await.unwrap().unwrap();
    assert!(start.elapsed() >= delay);
    assert!(store.peek(&request.id).await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_lost_answer_executes_the_call_and_never_ends() {
    let store = FaultyStore::new(memory()).script(Verb::Acquire, [Fault::LostAnswer]);
    let request = request();
    tokio::time::timeout(Duration::from_secs(3_600), store.acquire(&request)).await.unwrap_err();
    assert!(store.peek(&request.id).await.unwrap().is_some());
}

#[tokio::test]
async fn scripts_are_per_verb_and_in_order() {
    let store = FaultyStore::new(memory()).script(Verb::Renew, [Fault::None, Fault::ErrorBefore]);
    store.next(Verb::Checkpoint, Fault::ErrorBefore);
    let request = request();
    store.acquire(&request).await.unwrap();
    let lease = lease_of(&request);
    assert_eq!(store.renew(&lease, request.term).await.unwrap(), OwnerOutcome::Applied);
    store.renew(&lease, request.term).await.unwrap_err();
    store.renew(&lease, request.term).await.unwrap();
    store.checkpoint(&lease, &checkpoint("charged")).await.unwrap_err();
    assert_eq!((store.fired(), store.calls(Verb::Renew), store.calls(Verb::Checkpoint)), (2, 3, 1));
}

#[tokio::test]
async fn peek_can_fail_too() {
    let store = FaultyStore::new(memory()).script(Verb::Peek, [Fault::ErrorBefore]);
    store.peek(&request().id).await.unwrap_err();
    store.peek(&request().id).await.unwrap();
}

#[tokio::test]
async fn healing_forgets_scripts_and_chance() {
    let store = FaultyStore::new(memory()).random(1, 1, [Fault::ErrorBefore]);
    store.next(Verb::Acquire, Fault::ErrorBefore);
    store.acquire(&request()).await.unwrap_err();
    store.heal();
    store.acquire(&request()).await.unwrap();
    assert_eq!(store.fired(), 1);
}

async fn failures(seed: u64) -> Vec<usize> {
    let store = FaultyStore::new(memory()).random(seed, 4, [Fault::ErrorBefore, Fault::ErrorAfter]);
    let mut failures = Vec::new();
    for call in 0..400 {
        if store.acquire(&request()).await.is_err() {
            failures.push(call);
        }
    }
    assert_eq!(store.fired(), failures.len() as u64);
    failures
}

#[tokio::test]
async fn chance_is_as_likely_as_asked_and_the_same_for_the_same_seed() {
    let first = failures(7).await;
    assert!((60..140).contains(&first.len()), "{} of 400 failed", first.len());
    assert_eq!(first, failures(7).await);
    assert_ne!(first, failures(8).await);
}

/// A store whose transactions only set a flag: whether `finish` was executed.
#[derive(Debug)]
struct Flagged {
    memory: MemoryStore,
    finished: Arc<AtomicBool>,
}

#[derive(Debug)]
struct FlaggedTransaction {
    finished: Arc<AtomicBool>,
}

#[async_trait]
impl StoreTransaction for FlaggedTransaction {
    async fn finish(
        self: Box<Self>,
        _settlement: &Settlement,
        _retention: Duration,
        _writes: Writes,
    ) -> Result<OwnerOutcome, StoreError> {
        self.finished.store(true, Ordering::SeqCst);
        Ok(OwnerOutcome::Applied)
    }

    fn as_any_mut(&mut self) -> &mut (dyn Any + Send) {
        self
    }
}

#[async_trait]
impl IdempotencyStore for Flagged {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        self.memory.acquire(request).await
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.memory.renew(lease, term).await
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        self.memory.checkpoint(lease, checkpoint).await
    }

    async fn settle(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError> {
        self.memory.settle(lease, settlement, retention).await
    }

    async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        self.memory.peek(id).await
    }

    fn on_settled(&self, listener: Weak<dyn SettlementListener>) {
        self.memory.on_settled(listener);
    }

    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>> {
        None
    }

    fn capabilities(&self) -> Capabilities {
        self.memory.capabilities()
    }
}

#[async_trait]
impl DurableStore for Flagged {
    async fn live_record(&self, id: &RecordId) -> Result<Option<LiveRecord>, StoreError> {
        self.memory.live_record(id).await
    }

    fn identity(&self) -> [u8; 16] {
        self.memory.identity()
    }

    fn may_be_copied(&self) -> bool {
        self.memory.may_be_copied()
    }
}

#[async_trait]
impl TransactionalStore for Flagged {
    async fn begin(&self, request: &Acquire) -> Result<Begin, StoreError> {
        Ok(match self.acquire(request).await? {
            AcquireOutcome::Acquired(lease) => {
                let transaction = Box::new(FlaggedTransaction { finished: Arc::clone(&self.finished) });
                Begin::Acquired { lease, transaction, renew: true }
            }
            answered => Begin::Answered(answered),
        })
    }
}

/// Behind a trait object, as applications hold it.
fn transactional(verb: Verb, fault: Fault) -> (FaultyStore<dyn TransactionalStore>, Arc<AtomicBool>) {
    let finished = Arc::new(AtomicBool::new(false));
    let inner = Flagged { memory: MemoryStore::new(NonZeroUsize::MAX), finished: Arc::clone(&finished) };
    (FaultyStore::new(Arc::new(inner) as Arc<dyn TransactionalStore>).script(verb, [fault]), finished)
}

async fn begin(store: &dyn TransactionalStore) -> Box<dyn StoreTransaction> {
    match store.begin(&request()).await {
        Ok(Begin::Acquired { transaction, renew: true, .. }) => transaction,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn begin_fails_before_or_after() {
    for (fault, executed) in [(Fault::ErrorBefore, false), (Fault::ErrorAfter, true)] {
        let (store, _) = transactional(Verb::Begin, fault);
        let request = request();
        let error = store.begin(&request).await.unwrap_err();
        assert_eq!(error.is_indeterminate(), executed);
        assert_eq!(store.peek(&request.id).await.unwrap().is_some(), executed);
        assert_eq!((store.calls(Verb::Begin), store.calls(Verb::Acquire)), (1, 0));
    }
}

#[tokio::test]
async fn finish_fails_before_or_after() {
    let faults = [(Fault::ErrorBefore, false), (Fault::ErrorAfter, true)];
    for (fault, executed) in faults {
        let (store, finished) = transactional(Verb::Finish, fault);
        let transaction = begin(&store).await;
        let error = transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap_err();
        assert_eq!(error.is_indeterminate(), executed);
        assert_eq!(finished.load(Ordering::SeqCst), executed);
        assert_eq!((store.fired(), store.calls(Verb::Finish)), (1, 1));
    }
}

#[tokio::test]
async fn a_handler_sees_the_inner_transaction() {
    let (store, finished) = transactional(Verb::Finish, Fault::None);
    let mut transaction = begin(&store).await;
    assert!(transaction.as_any_mut().downcast_mut::<FlaggedTransaction>().is_some());
    assert_eq!(transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap(), OwnerOutcome::Applied);
    assert!(finished.load(Ordering::SeqCst));
}
