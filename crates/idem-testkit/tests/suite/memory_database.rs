//! The database in memory keeps both contracts, and the suites find broken ones.

use std::any::Any;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::memory::ManualClock;
use idem_core::{
    Acquire, AcquireOutcome, Begin, Capabilities, Checkpoint, DurableStore, IdempotencyStore, Lease, LeaseRenewer,
    LiveRecord, OwnerOutcome, Record, RecordId, Settlement, SettlementListener, StoreError, StoreTransaction, Term,
    Timestamp, TransactionalStore, Writes,
};
use idem_testkit::{BusinessData, MemoryDatabase, MemoryTransaction, Subject, TransactionalSubject, transactional};

type Database = MemoryDatabase<u64>;

fn database() -> (Database, Arc<ManualClock>) {
    // 2026-01-01, far enough from the machine's clock that a mix-up shows.
    let clock = Arc::new(ManualClock::new(Timestamp::from_unix_micros(1_767_225_600_000_000)));
    (MemoryDatabase::with_clock(0, clock.clone()), clock)
}

async fn verbs() -> Subject {
    let (database, clock) = database();
    Subject::new(Arc::new(database.clone()), Arc::new(database), clock)
}

idem_testkit::conformance!(verbs);
idem_testkit::state_machine!(verbs);

/// A number that each business write raises by one.
#[derive(Debug)]
struct Count(Database);

#[async_trait]
impl BusinessData for Count {
    async fn write(&self, transaction: &mut (dyn Any + Send)) {
        **transaction.downcast_mut::<MemoryTransaction<u64>>().unwrap() += 1;
    }

    async fn count(&self) -> u64 {
        self.0.data()
    }

    async fn opened_again(&self) -> Arc<dyn TransactionalStore> {
        Arc::new(self.0.clone())
    }

    async fn another_store(&self) -> Arc<dyn TransactionalStore> {
        Arc::new(database().0)
    }
}

async fn transactions() -> TransactionalSubject {
    let (database, clock) = database();
    TransactionalSubject::new(Arc::new(database.clone()), Arc::new(Count(database)), clock)
}

idem_testkit::transactional_conformance!(transactions);

#[derive(Debug, Clone, Copy, PartialEq)]
enum Bug {
    KeepsWhatIsDiscarded,
    DiscardsWhatIsKept,
    KeepsTheRecordOfARelease,
    RunsWhatRuns,
    IdentityIsConstant,
    LiveRecordsLiveForEver,
}

/// The database behind a wrapper with one bug.
#[derive(Debug)]
struct Buggy(Database, Bug);

#[derive(Debug)]
struct BuggyTransaction(Box<dyn StoreTransaction>, Bug);

#[async_trait]
impl StoreTransaction for BuggyTransaction {
    async fn finish(
        self: Box<Self>,
        settlement: &Settlement,
        retention: Duration,
        writes: Writes,
    ) -> Result<OwnerOutcome, StoreError> {
        let Self(inner, bug) = *self;
        let writes = match bug {
            Bug::KeepsWhatIsDiscarded => Writes::Keep,
            Bug::DiscardsWhatIsKept => Writes::Discard,
            _ => writes,
        };
        match settlement {
            Settlement::Released if bug == Bug::KeepsTheRecordOfARelease => {
                inner.finish(&Settlement::OutcomeUnknown, retention, writes).await
            }
            settlement => inner.finish(settlement, retention, writes).await,
        }
    }

    fn as_any_mut(&mut self) -> &mut (dyn Any + Send) {
        self.0.as_any_mut()
    }
}

#[async_trait]
impl TransactionalStore for Buggy {
    async fn begin(&self, request: &Acquire) -> Result<Begin, StoreError> {
        let mut begun = self.0.begin(request).await?;
        if self.1 == Bug::RunsWhatRuns && matches!(begun, Begin::Answered(AcquireOutcome::InProgress { .. })) {
            begun = database().0.begin(request).await?;
        }
        Ok(match begun {
            Begin::Acquired { lease, transaction, renew } => {
                Begin::Acquired { lease, transaction: Box::new(BuggyTransaction(transaction, self.1)), renew }
            }
            answered @ Begin::Answered(_) => answered,
        })
    }
}

#[async_trait]
impl DurableStore for Buggy {
    async fn live_record(&self, id: &RecordId) -> Result<Option<LiveRecord>, StoreError> {
        let live = self.0.live_record(id).await?;
        let remaining = |live: &LiveRecord| match self.1 {
            Bug::LiveRecordsLiveForEver => Duration::MAX,
            _ => live.remaining,
        };
        Ok(live.map(|live| LiveRecord { remaining: remaining(&live), ..live }))
    }

    fn identity(&self) -> [u8; 16] {
        if self.1 == Bug::IdentityIsConstant { [0; 16] } else { self.0.identity() }
    }

    fn may_be_copied(&self) -> bool {
        self.0.may_be_copied()
    }
}

#[async_trait]
impl IdempotencyStore for Buggy {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        self.0.acquire(request).await
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.0.renew(lease, term).await
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        self.0.checkpoint(lease, checkpoint).await
    }

    async fn settle(
        &self,
        lease: &Lease,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<OwnerOutcome, StoreError> {
        self.0.settle(lease, settlement, retention).await
    }

    async fn peek(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        self.0.peek(id).await
    }

    fn on_settled(&self, listener: Weak<dyn SettlementListener>) {
        self.0.on_settled(listener);
    }

    fn renewer(&self) -> Option<Arc<dyn LeaseRenewer>> {
        self.0.renewer()
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }
}

/// The data of a database with a bug, which the stores that it opens have as well.
#[derive(Debug)]
struct BuggyCount(Count, Bug);

#[async_trait]
impl BusinessData for BuggyCount {
    async fn write(&self, transaction: &mut (dyn Any + Send)) {
        self.0.write(transaction).await;
    }

    async fn count(&self) -> u64 {
        self.0.count().await
    }

    async fn opened_again(&self) -> Arc<dyn TransactionalStore> {
        Arc::new(Buggy(self.0.0.clone(), self.1))
    }

    async fn another_store(&self) -> Arc<dyn TransactionalStore> {
        Arc::new(Buggy(database().0, self.1))
    }
}

#[test]
fn each_bug_is_found_by_its_case() {
    let find = |bug, case: transactional::TransactionalCase| {
        let harness = move || async move {
            let (database, clock) = database();
            let store = Arc::new(Buggy(database.clone(), bug));
            TransactionalSubject::new(store, Arc::new(BuggyCount(Count(database), bug)), clock)
        };
        let found = std::panic::catch_unwind(|| transactional::run(harness, case));
        assert!(found.is_err(), "{bug:?} is not found");
    };
    find(Bug::KeepsWhatIsDiscarded, |subject| Box::pin(transactional::what_is_discarded_leaves_its_record(subject)));
    find(Bug::DiscardsWhatIsKept, |subject| Box::pin(transactional::what_is_kept_commits_with_its_record(subject)));
    find(Bug::KeepsTheRecordOfARelease, |subject| Box::pin(transactional::a_release_leaves_no_record(subject)));
    find(Bug::RunsWhatRuns, |subject| Box::pin(transactional::a_running_transaction_turns_others_away(subject)));
    find(Bug::IdentityIsConstant, |subject| {
        Box::pin(transactional::those_who_share_records_have_one_identity(subject))
    });
    find(Bug::LiveRecordsLiveForEver, |subject| Box::pin(transactional::a_live_record_says_how_long_it_lives(subject)));
}
