//! What the fast store spares the durable one, and what happens when either fails.

use std::num::NonZeroUsize;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::support::{FAILS, FINE, HANGS, IS_FULL, MemoryFast, SETTLED, World, eventually};
use idem_core::memory::{ManualClock, MemoryStore};
use idem_core::{
    Acquire, AcquireOutcome, Acquisition, Begin, Capabilities, Checkpoint, DurableStore, IdempotencyStore, Lease,
    LeaseRenewer, LiveRecord, OwnerOutcome, Record, RecordId, Settlement, SettlementListener, StoreError,
    StoreTransaction, Term, Timestamp, TransactionalStore, Writes,
};
use idem_hybrid::{HybridConfig, HybridStore};
use idem_sqlite::{SqliteConfig, SqliteStore};
use idem_testkit::fixture::{KEPT, completed, mismatch_of, repeat_of, request, retryable};
use idem_testkit::{Fault, Verb};
use tempfile::TempDir;

const SECOND: Duration = Duration::from_secs(1);

fn is_replay(outcome: &Result<AcquireOutcome, StoreError>) -> bool {
    matches!(outcome, Ok(AcquireOutcome::Replay(_)))
}

#[tokio::test]
async fn duplicates_and_repeats_are_answered_without_the_durable_store() {
    let world = World::new(HybridConfig::new());
    let request = request();
    let lease = world.run(&request).await;
    for _ in 0..10 {
        let answer = world.store.acquire(&repeat_of(&request)).await.unwrap();
        assert!(matches!(answer, AcquireOutcome::InProgress { .. }), "{answer:?}");
    }
    assert_eq!(world.asked(), 1);
    world.store.settle(&lease, &completed(), KEPT).await.unwrap();
    world.copied(&request).await;
    for _ in 0..10 {
        assert!(is_replay(&world.store.acquire(&repeat_of(&request)).await));
        let answer = world.store.acquire(&mismatch_of(&request)).await.unwrap();
        assert!(matches!(answer, AcquireOutcome::Mismatch { .. }), "{answer:?}");
    }
    assert_eq!(world.asked(), 1);
    let metrics = world.store.metrics();
    assert_eq!((metrics.fast_in_progress, metrics.fast_replays), (10, 20));
    assert_eq!((metrics.durable_in_progress, metrics.durable_replays), (0, 0));
}

#[tokio::test]
async fn another_request_while_one_runs_is_the_durable_stores_to_answer() {
    let world = World::new(HybridConfig::new());
    let request = request();
    world.run(&request).await;
    let answer = world.store.acquire(&mismatch_of(&request)).await.unwrap();
    assert!(matches!(answer, AcquireOutcome::Mismatch { .. }), "{answer:?}");
    assert_eq!(world.asked(), 2);
}

#[tokio::test]
async fn what_was_forgotten_is_written_back_by_whoever_misses_it() {
    let world = World::new(HybridConfig::new());
    let request = world.settled().await;
    world.fast.inner.flush();
    assert!(is_replay(&world.store.acquire(&repeat_of(&request)).await));
    assert_eq!(world.store.metrics().durable_replays, 1);
    world.copied(&request).await;
    assert!(is_replay(&world.store.acquire(&repeat_of(&request)).await));
    assert_eq!(world.store.metrics().durable_replays, 1);
}

#[tokio::test]
async fn a_copy_does_not_outlive_its_record() {
    let world = World::new(HybridConfig::new());
    let request = world.settled().await;
    world.clock.advance(KEPT - SECOND);
    world.fast.inner.flush();
    assert!(is_replay(&world.store.acquire(&repeat_of(&request)).await));
    world.copied(&request).await;
    world.clock.advance(SECOND);
    world.run(&repeat_of(&request)).await;
}

#[tokio::test]
async fn what_may_run_again_leaves_nothing_in_front() {
    for settlement in [retryable(), Settlement::Released] {
        let world = World::new(HybridConfig::new());
        let request = request();
        let lease = world.run(&request).await;
        assert!(world.fast.inner.entry(&request.id).is_some());
        world.store.settle(&lease, &settlement, KEPT).await.unwrap();
        assert_eq!(world.fast.inner.entry(&request.id), None, "{settlement:?}");
        assert_eq!(world.durable.calls(Verb::LiveRecord), 0);
    }
}

#[tokio::test]
async fn replays_go_on_while_the_durable_store_is_down_and_nothing_else_does() {
    let world = World::new(HybridConfig::new());
    let settled = world.settled().await;
    for _ in 0..3 {
        world.durable.next(Verb::Acquire, Fault::ErrorBefore);
        assert!(world.store.acquire(&request()).await.is_err());
        assert!(is_replay(&world.store.acquire(&repeat_of(&settled)).await));
    }
}

#[tokio::test]
async fn replays_end_with_the_durable_store_where_that_was_asked_for() {
    let world = World::new(HybridConfig::new().without_replays_while_durable_fails());
    let settled = world.settled().await;
    assert!(is_replay(&world.store.acquire(&repeat_of(&settled)).await));
    assert_eq!(world.asked(), 1, "as long as it answers, it is not asked");
    world.durable.next(Verb::Acquire, Fault::ErrorBefore);
    assert!(world.store.acquire(&request()).await.is_err());
    world.durable.next(Verb::Acquire, Fault::ErrorBefore);
    let refused = world.store.acquire(&repeat_of(&settled)).await.unwrap_err();
    assert!(refused.has_existing_record(), "it must not run without protection either");
    assert!(is_replay(&world.store.acquire(&repeat_of(&settled)).await), "it answers again");
    let asked = world.asked();
    assert!(is_replay(&world.store.acquire(&repeat_of(&settled)).await));
    assert_eq!(world.asked(), asked);
}

#[tokio::test]
async fn a_fast_store_that_fails_is_left_alone_and_tried_again() {
    let world = World::new(HybridConfig::new());
    let settled = world.settled().await;
    world.fast.is(FAILS);
    for _ in 0..20 {
        assert!(is_replay(&world.store.acquire(&repeat_of(&settled)).await));
    }
    let metrics = world.store.metrics();
    assert!(metrics.is_open && metrics.opened == 1, "{metrics:?}");
    // Copies are written in the background, and may have begun to fail before the breaker opened.
    assert!(metrics.fast_failures <= 10 && metrics.fast_skipped >= 15, "{metrics:?}");
    assert!(world.store.health().await.fast.is_err());
    world.fast.is(FINE);
    let before = world.store.metrics().fast_replays;
    eventually("the breaker closes", async || {
        assert!(is_replay(&world.store.acquire(&repeat_of(&settled)).await));
        (!world.store.metrics().is_open).then_some(())
    })
    .await;
    assert!(is_replay(&world.store.acquire(&repeat_of(&settled)).await));
    assert!(world.store.metrics().fast_replays > before);
    assert!(world.store.health().await.fast.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_fast_store_that_hangs_costs_a_moment() {
    let world = World::new(HybridConfig::new());
    let settled = world.settled().await;
    world.fast.is(HANGS);
    let began = tokio::time::Instant::now();
    assert!(is_replay(&world.store.acquire(&repeat_of(&settled)).await));
    assert_eq!(began.elapsed().as_millis(), 200);
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_could_not_be_removed_goes_as_soon_as_it_can_be() {
    let world = World::new(HybridConfig::new().without_cache());
    let request = request();
    let lease = world.run(&request).await;
    world.fast.is(FAILS);
    world.store.settle(&lease, &retryable(), KEPT).await.unwrap();
    world.fast.is(FINE);
    assert!(world.fast.inner.entry(&request.id).is_some());
    tokio::time::sleep(SECOND * 2).await;
    assert_eq!(world.fast.inner.entry(&request.id), None);
}

#[tokio::test]
async fn a_lock_ends_with_the_lease_of_an_owner_that_died() {
    let world = World::new(HybridConfig::new());
    let request = request();
    let lease = world.run(&request).await;
    world.clock.advance(request.term.lease - SECOND);
    assert!(matches!(world.store.acquire(&repeat_of(&request)).await, Ok(AcquireOutcome::InProgress { .. })));
    world.clock.advance(SECOND);
    let successor = world.run(&repeat_of(&request)).await;
    assert_eq!((lease.attempt, successor.attempt), (1, 2));
}

#[tokio::test]
async fn a_lost_answer_does_not_make_the_lock_last_longer() {
    let world = World::new(HybridConfig::new());
    let request = request();
    world.durable.next(Verb::Acquire, Fault::ErrorAfter);
    assert!(world.store.acquire(&request).await.is_err());
    world.clock.advance(SECOND * 10);
    world.run(&request).await;
    let until = world.fast.inner.entry(&request.id).unwrap().until;
    let record = world.durable.peek(&request.id).await.unwrap().unwrap();
    assert!(matches!(record.state, idem_core::State::InProgress { lease_until, .. } if lease_until == until));
}

/// A hybrid in front of SQLite, which has transactions.
async fn on_a_file() -> (HybridStore<SqliteStore>, Arc<MemoryFast>, TempDir) {
    let folder = TempDir::new().unwrap();
    let url = format!("sqlite://{}", folder.path().join("records.db").display());
    let durable = Arc::new(SqliteStore::open(SqliteConfig::new(url)).await.unwrap());
    let clock = Arc::new(ManualClock::new(Timestamp::from_unix_micros(1_767_225_600_000_000)));
    let fast = Arc::new(MemoryFast::new(clock));
    (HybridStore::new(durable, fast.clone(), HybridConfig::new()), fast, folder)
}

async fn begin(store: &HybridStore<SqliteStore>, request: &Acquire) -> Box<dyn StoreTransaction> {
    match store.begin(request).await.unwrap() {
        Begin::Acquired { transaction, .. } => transaction,
        Begin::Answered(other) => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_transaction_is_locked_while_it_lasts_and_copied_when_it_commits() {
    let (store, fast, _folder) = on_a_file().await;
    let request = request();
    let mut transaction = begin(&store, &request).await;
    assert!(transaction.as_any_mut().is::<idem_sqlite::SqliteTransaction>(), "handlers are shown what they know");
    let answer = store.begin(&repeat_of(&request)).await.unwrap();
    assert!(matches!(answer, Begin::Answered(AcquireOutcome::InProgress { .. })), "{answer:?}");
    transaction.finish(&completed(), KEPT, Writes::Keep).await.unwrap();
    eventually("the copy", async || fast.entry(&request.id).filter(|entry| entry.rank >= SETTLED)).await;
    let answer = store.begin(&repeat_of(&request)).await.unwrap();
    assert!(matches!(answer, Begin::Answered(AcquireOutcome::Replay(_))), "{answer:?}");
    let metrics = store.metrics();
    assert_eq!((metrics.fast_in_progress, metrics.fast_replays), (1, 1));
}

#[tokio::test]
async fn the_lock_of_a_transaction_that_is_dropped_goes() {
    let (store, fast, _folder) = on_a_file().await;
    let request = request();
    let transaction = begin(&store, &request).await;
    assert!(fast.entry(&request.id).is_some());
    drop(transaction);
    eventually("the lock goes", async || fast.entry(&request.id).is_none().then_some(())).await;
}

#[tokio::test]
async fn whoever_waits_is_told_of_settlements_by_the_fast_store() {
    let world = World::new(HybridConfig::new());
    let heard = world.listener();
    let request = request();
    let lease = world.run(&request).await;
    assert_eq!(heard.0.load(Ordering::SeqCst), 0);
    // A waiter asks again, and removes its claim each time.
    world.fast.inner.flush();
    let asked_again = world.store.acquire(&repeat_of(&request)).await.unwrap();
    assert!(matches!(asked_again, AcquireOutcome::InProgress { .. }), "{asked_again:?}");
    assert_eq!((world.fast.inner.entry(&request.id), heard.0.load(Ordering::SeqCst)), (None, 0));
    world.store.settle(&lease, &completed(), KEPT).await.unwrap();
    assert_eq!(heard.0.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn the_self_test_passes_and_says_how_the_fast_store_is() {
    let world = World::new(HybridConfig::new());
    assert!(world.store.self_test().await.unwrap().fast.is_ok());
    for mode in [FAILS, IS_FULL] {
        world.fast.is(mode);
        assert!(world.store.self_test().await.unwrap().fast.is_err());
    }
    assert!(world.store.durable().live_record(&request().id).await.unwrap().is_none());
}

/// A store that lets a second request run during a run.
#[derive(Debug)]
struct Generous(MemoryStore);

#[async_trait::async_trait]
impl IdempotencyStore for Generous {
    async fn acquire(&self, request: &Acquire) -> Result<AcquireOutcome, StoreError> {
        Ok(match self.0.acquire(request).await? {
            AcquireOutcome::InProgress { .. } => AcquireOutcome::Acquired(Lease {
                id: request.id,
                fingerprint: request.fingerprint,
                owner: request.owner,
                attempt: 1,
                acquisition: Acquisition::Fresh,
                checkpoint: None,
            }),
            outcome => outcome,
        })
    }

    async fn renew(&self, lease: &Lease, term: Term) -> Result<OwnerOutcome, StoreError> {
        self.0.renew(lease, term).await
    }

    async fn checkpoint(&self, lease: &Lease, checkpoint: &Checkpoint) -> Result<OwnerOutcome, StoreError> {
        self.0.checkpoint(lease, checkpoint).await
    }

    async fn settle(&self, lease: &Lease, end: &Settlement, retention: Duration) -> Result<OwnerOutcome, StoreError> {
        self.0.settle(lease, end, retention).await
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

#[async_trait::async_trait]
impl DurableStore for Generous {
    async fn live_record(&self, id: &RecordId) -> Result<Option<LiveRecord>, StoreError> {
        self.0.live_record(id).await
    }

    fn identity(&self) -> [u8; 16] {
        self.0.identity()
    }

    fn may_be_copied(&self) -> bool {
        self.0.may_be_copied()
    }
}

#[tokio::test]
async fn the_self_test_finds_a_durable_store_that_only_the_locks_hide() {
    let clock = Arc::new(ManualClock::new(Timestamp::from_unix_micros(1_767_225_600_000_000)));
    let durable = Generous(MemoryStore::with_clock(NonZeroUsize::new(100).unwrap(), clock.clone()));
    let store = HybridStore::new(Arc::new(durable), Arc::new(MemoryFast::new(clock)), HybridConfig::new());
    idem_core::self_test(&store).await.unwrap();
    store.self_test().await.unwrap_err();
}

#[tokio::test(start_paused = true)]
async fn a_durable_store_that_hangs_does_not_hide_that_a_record_exists() {
    let world = World::new(HybridConfig::new().without_replays_while_durable_fails());
    let settled = world.settled().await;
    world.durable.next(Verb::Acquire, Fault::ErrorBefore);
    assert!(world.store.acquire(&request()).await.is_err());
    world.durable.next(Verb::Acquire, Fault::LostAnswer);
    // The engine's default `store_timeout`.
    let repeat = repeat_of(&settled);
    let refused = tokio::time::timeout(2 * SECOND, world.store.acquire(&repeat)).await.expect("an answer in time");
    let refused = refused.unwrap_err();
    assert!(refused.has_existing_record() && refused.is_indeterminate(), "{refused:?}");
}

#[tokio::test]
async fn another_stores_records_are_not_believed() {
    let world = World::new(HybridConfig::new());
    let request = world.settled().await;
    let memory = MemoryStore::with_clock(NonZeroUsize::new(1_000).unwrap(), world.clock.clone());
    let elsewhere = HybridStore::new(Arc::new(memory), world.fast.clone(), HybridConfig::new());
    let answer = elsewhere.acquire(&repeat_of(&request)).await.unwrap();
    assert!(matches!(answer, AcquireOutcome::Acquired(_)), "{answer:?}");
}

#[tokio::test]
async fn what_was_missed_by_many_is_looked_up_once() {
    let world = World::new(HybridConfig::new());
    let request = world.settled().await;
    world.fast.inner.flush();
    let before = world.durable.calls(Verb::LiveRecord);
    for _ in 0..20 {
        assert!(is_replay(&world.store.acquire(&repeat_of(&request)).await));
        world.fast.inner.flush();
    }
    // On one thread, background tasks have had no turn so far.
    assert_eq!(world.store.metrics().durable_replays, 20);
    world.copied(&request).await;
    assert_eq!(world.durable.calls(Verb::LiveRecord), before + 1);
}

#[tokio::test(start_paused = true)]
async fn a_copy_that_does_not_arrive_is_not_made_again_at_once() {
    let world = World::new(HybridConfig::new());
    let request = world.settled().await;
    world.fast.inner.flush();
    world.fast.is(IS_FULL);
    let before = world.durable.calls(Verb::LiveRecord);
    for _ in 0..10 {
        assert!(is_replay(&world.store.acquire(&repeat_of(&request)).await));
        tokio::time::sleep(SECOND / 100).await;
    }
    assert_eq!(world.durable.calls(Verb::LiveRecord), before + 1);
    world.fast.is(FINE);
    tokio::time::sleep(5 * SECOND).await;
    assert!(is_replay(&world.store.acquire(&repeat_of(&request)).await));
    world.copied(&request).await;
}

#[tokio::test(start_paused = true)]
async fn a_fast_store_without_room_does_not_multiply_the_work() {
    let world = World::new(HybridConfig::new());
    world.fast.is(IS_FULL);
    for _ in 0..100 {
        let lease = world.run(&request()).await;
        world.store.settle(&lease, &completed(), KEPT).await.unwrap();
    }
    tokio::time::sleep(SECOND * 60).await;
    assert!(world.durable.calls(Verb::LiveRecord) <= 100, "{}", world.durable.calls(Verb::LiveRecord));
}

#[tokio::test(start_paused = true)]
async fn a_durable_store_that_hangs_is_noticed() {
    let world = World::new(HybridConfig::new().without_replays_while_durable_fails());
    let settled = world.settled().await;
    world.durable.next(Verb::Acquire, Fault::LostAnswer);
    assert!(tokio::time::timeout(SECOND * 2, world.store.acquire(&request())).await.is_err());
    let asked = world.asked();
    assert!(is_replay(&world.store.acquire(&repeat_of(&settled)).await));
    assert_eq!(world.asked(), asked + 1, "it was not asked");
}

/// The engine gives up the slower of two renewals.
#[tokio::test(start_paused = true)]
async fn a_renewal_that_is_given_up_says_nothing_of_the_durable_store() {
    let world = World::new(HybridConfig::new().without_replays_while_durable_fails());
    let settled = world.settled().await;
    let lease = world.run(&request()).await;
    world.durable.next(Verb::Renew, Fault::LostAnswer);
    assert!(tokio::time::timeout(SECOND * 2, world.store.renew(&lease, request().term)).await.is_err());
    let asked = world.asked();
    assert!(is_replay(&world.store.acquire(&repeat_of(&settled)).await));
    assert_eq!(world.asked(), asked, "the copy was not believed");
    world.durable.next(Verb::Renew, Fault::ErrorBefore);
    assert!(world.store.renew(&lease, request().term).await.is_err());
    assert!(is_replay(&world.store.acquire(&repeat_of(&settled)).await));
    assert_eq!(world.asked(), asked + 1, "one that fails says that the store does not answer");
}

/// A caller that goes away learns nothing about the durable store; the next one that asks it does.
#[tokio::test(start_paused = true)]
async fn a_caller_that_goes_away_costs_one_question_to_the_durable_store() {
    let world = World::new(HybridConfig::new().without_replays_while_durable_fails());
    let settled = world.settled().await;
    for _ in 0..3 {
        world.durable.next(Verb::Acquire, Fault::LostAnswer);
        assert!(tokio::time::timeout(Duration::from_millis(1), world.store.acquire(&request())).await.is_err());
        let asked = world.asked();
        for _ in 0..10 {
            assert!(is_replay(&world.store.acquire(&repeat_of(&settled)).await));
        }
        assert_eq!(world.asked(), asked + 1);
    }
}

/// A background task ends with the runtime of its caller; the next caller starts it again.
#[test]
fn a_copy_whose_runtime_has_ended_is_made_by_the_next_that_misses_it() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (world, request) = (World::new(HybridConfig::new()), request());
    let first = runtime();
    first.block_on(async {
        let lease = world.run(&request).await;
        world.store.settle(&lease, &completed(), KEPT).await.unwrap();
    });
    // Its one thread had no turn for anything else.
    drop(first);
    assert_eq!(world.durable.calls(Verb::LiveRecord), 0);
    runtime().block_on(async {
        assert!(is_replay(&world.store.acquire(&repeat_of(&request)).await));
        world.copied(&request).await;
    });
}

#[tokio::test(start_paused = true)]
async fn what_is_done_behind_the_callers_is_limited() {
    let world = World::new(HybridConfig::new());
    let settled = world.settled().await;
    let before = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    for _ in 0..500 {
        let mut ended = Vec::new();
        for _ in 0..4 {
            let request = request();
            ended.push(world.run(&request).await);
        }
        world.fast.is(FAILS);
        for lease in ended {
            // Its lock cannot be removed, so a background task tries again.
            world.store.settle(&lease, &Settlement::Released, KEPT).await.unwrap();
        }
        world.fast.is(FINE);
        // Keeps the breaker closed.
        assert!(is_replay(&world.store.acquire(&repeat_of(&settled)).await));
    }
    let alive = tokio::runtime::Handle::current().metrics().num_alive_tasks() - before;
    assert_eq!(alive, 1024);
    tokio::time::sleep(SECOND * 60).await;
    assert_eq!(tokio::runtime::Handle::current().metrics().num_alive_tasks(), before);
}

#[tokio::test(start_paused = true)]
async fn one_caller_tries_whether_the_fast_store_is_back() {
    let world = World::new(HybridConfig::new());
    world.fast.is(FAILS);
    for _ in 0..5 {
        world.run(&request()).await;
    }
    assert!(world.store.metrics().is_open);
    // The breaker uses the machine's clock, which is not paused.
    std::thread::sleep(SECOND + Duration::from_millis(100));
    world.fast.is(HANGS);
    let callers: Vec<_> = (0..100)
        .map(|_| {
            let store = world.store.clone();
            tokio::spawn(async move {
                let began = tokio::time::Instant::now();
                store.acquire(&request()).await.unwrap();
                !began.elapsed().is_zero()
            })
        })
        .collect();
    let mut waited = 0;
    for caller in callers {
        waited += u32::from(caller.await.unwrap());
    }
    assert_eq!(waited, 1);
}

/// Asks from many callers at once.
async fn all_at_once(world: &World, requests: Vec<Acquire>) -> Vec<AcquireOutcome> {
    let asked = requests.into_iter().map(|request| {
        let store = world.store.clone();
        tokio::spawn(async move { store.acquire(&request).await.unwrap() })
    });
    let mut answers = Vec::new();
    for asked in asked.collect::<Vec<_>>() {
        answers.push(asked.await.unwrap());
    }
    answers
}

#[tokio::test(start_paused = true)]
async fn duplicates_wait_for_the_first_while_the_durable_store_is_asked() {
    let world = World::new(HybridConfig::new());
    world.durable.next(Verb::Acquire, Fault::Delay(Duration::from_millis(50)));
    let first = request();
    let requests = std::iter::once(first.clone()).chain((0..20).map(|_| repeat_of(&first))).collect();
    let answers = all_at_once(&world, requests).await;
    assert!(matches!(answers[0], AcquireOutcome::Acquired(_)));
    assert!(answers[1..].iter().all(|answer| matches!(answer, AcquireOutcome::InProgress { .. })), "{answers:?}");
    assert_eq!(world.asked(), 1);
}

#[tokio::test(start_paused = true)]
async fn what_was_forgotten_is_asked_for_once_however_many_want_it() {
    let world = World::new(HybridConfig::new());
    let request = world.settled().await;
    world.fast.inner.flush();
    world.durable.next(Verb::Acquire, Fault::Delay(Duration::from_millis(50)));
    let answers = all_at_once(&world, (0..20).map(|_| repeat_of(&request)).collect()).await;
    assert!(answers.iter().all(|answer| matches!(answer, AcquireOutcome::Replay(_))), "{answers:?}");
    assert_eq!(world.asked(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_nobody_keeps_is_waited_for_no_longer_than_the_fast_store() {
    let world = World::new(HybridConfig::new());
    let request = request();
    world.durable.next(Verb::Acquire, Fault::LostAnswer);
    assert!(tokio::time::timeout(SECOND, world.store.acquire(&request)).await.is_err());
    let began = tokio::time::Instant::now();
    // The durable store has granted the lease to the caller that gave up.
    let answer = world.store.acquire(&repeat_of(&request)).await.unwrap();
    assert!(matches!(answer, AcquireOutcome::InProgress { .. }), "{answer:?}");
    assert!((180..=200).contains(&began.elapsed().as_millis()), "{:?}", began.elapsed());
    // The caller that gave up does not wait for its claim.
    let (began, again) = (tokio::time::Instant::now(), world.run(&request).await);
    assert_eq!((again.attempt, began.elapsed()), (1, Duration::ZERO));
}
