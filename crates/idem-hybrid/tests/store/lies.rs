//! Whatever the fast store does, every answer is the durable store's, or "in progress" for no longer than a lease.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use crate::support::{Lie, LyingFast};
use idem_core::memory::{Clock, ManualClock, MemoryStore};
use idem_core::{
    Acquire, AcquireOutcome, IdempotencyStore, Lease, OnMismatch, OwnerAction, OwnerToken, Record, RecordId,
    Settlement, State, StoredResponse, Takeover, Term, Timestamp, machine,
};
use idem_hybrid::{HybridConfig, HybridMetrics, HybridStore};
use idem_testkit::{Fault, FaultyStore, Verb, fixture};

const SECOND: Duration = Duration::from_secs(1);
const IDS: usize = 5;
const OWNERS: usize = 4;

/// Steps of one run. `IDEM_STEPS` asks for more.
const STEPS: u32 = 5_000;
const SEEDS: u64 = 6;

struct World {
    /// The stores of two processes.
    stores: [HybridStore<FaultyStore<MemoryStore>>; 2],
    durable: Arc<FaultyStore<MemoryStore>>,
    fast: Arc<LyingFast>,
    clock: Arc<ManualClock>,
    ids: Vec<RecordId>,
    owners: Vec<OwnerToken>,
    dice: Dice,
    /// The latest end of each lease that the durable store has granted, by record and attempt.
    leases: HashMap<(RecordId, u64), Timestamp>,
    put_off: u64,
    lost_answers: u64,
    longest: Duration,
}

/// xorshift64, so that a run can be repeated.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 20).unwrap() % limit
    }

    /// A fresh token, from the seed.
    fn token(&mut self) -> OwnerToken {
        self.below(2);
        OwnerToken::from_bytes([self.0.to_be_bytes(), self.0.to_le_bytes()].concat().try_into().unwrap())
    }
}

impl World {
    fn new(seed: u64, config: HybridConfig) -> Self {
        let clock = Arc::new(ManualClock::new(Timestamp::from_unix_micros(1_767_225_600_000_000)));
        let memory = MemoryStore::with_clock(NonZeroUsize::new(1_000).unwrap(), clock.clone());
        let durable = Arc::new(FaultyStore::new(Arc::new(memory)));
        let fast = Arc::new(LyingFast::new(clock.clone(), seed));
        Self {
            stores: [0, 1].map(|_| HybridStore::new(durable.clone(), fast.clone(), config.clone())),
            durable,
            fast,
            clock,
            ids: (0..IDS).map(|number| RecordId::from_bytes([u8::try_from(number).unwrap(); 32])).collect(),
            // As many in each process, see `store`.
            owners: (0..OWNERS).map(|number| OwnerToken::from_bytes([u8::try_from(number + 1).unwrap(); 16])).collect(),
            dice: Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1),
            leases: HashMap::new(),
            put_off: 0,
            lost_answers: 0,
            longest: Duration::ZERO,
        }
    }

    async fn record(&self, id: &RecordId) -> Option<Record> {
        self.durable.inner().peek(id).await.unwrap()
    }

    /// The store of the owner's process: an owner repeats its acquire in the same process.
    fn store(&self, owner: &OwnerToken) -> HybridStore<FaultyStore<MemoryStore>> {
        self.stores[usize::from(owner.as_bytes()[0] & 1)].clone()
    }

    fn metrics(&self, of: fn(&HybridMetrics) -> u64) -> u64 {
        self.stores.iter().map(|store| of(&store.metrics())).sum()
    }

    async fn acquire(&mut self) {
        let id = self.ids[self.dice.below(IDS)];
        let request = Acquire {
            id,
            // Mostly one of a few tokens, so that some are used again, as after a lost answer.
            owner: if self.dice.below(4) == 0 { self.dice.token() } else { self.owners[self.dice.below(OWNERS)] },
            term: Term { lease: SECOND * 2, retention: SECOND * 3 },
            takeover: [Takeover::Rerun, Takeover::Unknown][self.dice.below(2)],
            on_mismatch: [OnMismatch::Refuse, OnMismatch::Refuse, OnMismatch::ReplayOriginal][self.dice.below(3)],
            ..fixture::request()
        };
        let request = if self.dice.below(6) == 0 {
            Acquire { fingerprint: fixture::mismatch_of(&request).fingerprint, ..request }
        } else {
            request
        };
        let before = self.record(&id).await;
        let now = self.clock.now();
        let (next, truth) = machine::acquire(before.as_ref(), &request, now);
        let store = self.store(&request.owner);
        // Asked or not, the durable store's answer may get lost.
        let lost = self.dice.below(12) == 0;
        if lost {
            self.durable.next(Verb::Acquire, Fault::ErrorAfter);
        }
        let answer = store.acquire(&request).await;
        self.durable.heal();
        let after = self.record(&id).await;
        let Ok(answer) = answer else {
            assert!(lost);
            assert_eq!(after, next, "the record is not what the state machine makes of it");
            self.lost_answers += 1;
            return;
        };
        if answer == truth {
            // A replay from the fast store leaves the durable record alone; so does the durable one's.
            assert_eq!(after, next, "the record is not what the state machine makes of it");
        } else {
            let AcquireOutcome::InProgress { lease_left, .. } = answer else {
                panic!("answered {answer:?}, and the truth is {truth:?}")
            };
            assert_eq!(after, before, "somebody was turned away, and the record changed");
            let owns = before.as_ref().is_some_and(|record| record.owner == request.owner);
            assert!(!(owns && matches!(truth, AcquireOutcome::Acquired(_))), "the owner of a record was turned away");
            let until = now.saturating_add(lease_left);
            let lock = self.fast.locks(&id).into_iter().map(|(_, until)| until).max();
            let lock = lock.expect("turned away by a lock that nobody put");
            assert!(until <= lock, "turned away until {until} by a lock until {lock}");
            self.put_off += 1;
            self.longest = self.longest.max(lease_left);
        }
    }

    async fn act(&mut self) {
        let (id, owner) = (self.ids[self.dice.below(IDS)], self.owners[self.dice.below(OWNERS)]);
        let before = self.record(&id).await;
        let attempt = before.as_ref().map_or(1, |record| record.attempt);
        let acquisition = idem_core::Acquisition::Fresh;
        let lease =
            Lease { id, fingerprint: fixture::request().fingerprint, owner, attempt, acquisition, checkpoint: None };
        let term = Term { lease: SECOND * 2, retention: SECOND * 3 };
        let response = StoredResponse::new(200, self.dice.below(1_000).to_string());
        let settlement = match self.dice.below(5) {
            0 => Settlement::Released,
            1 => Settlement::FailedRetryable { response, retry_after: SECOND },
            2 => Settlement::OutcomeUnknown,
            3 => Settlement::FailedTerminal(response),
            _ => Settlement::Completed(response),
        };
        let renews = self.dice.below(4) == 0;
        let action = if renews { OwnerAction::Renew(term) } else { OwnerAction::Settle(&settlement, SECOND * 4) };
        let (next, truth) = machine::apply(before.as_ref(), owner, action, self.clock.now());
        let outcome = match renews {
            true => self.store(&owner).renew(&lease, term).await,
            false => self.store(&owner).settle(&lease, &settlement, SECOND * 4).await,
        };
        assert_eq!(outcome.unwrap(), truth);
        assert_eq!(self.record(&id).await, next, "the record is not what the state machine makes of it");
    }

    async fn step(&mut self) {
        match self.dice.below(10) {
            0..5 => self.acquire().await,
            5..8 => self.act().await,
            8 => self.clock.advance(Duration::from_millis(300)),
            // Gives the background tasks a turn.
            _ => tokio::time::sleep(SECOND).await,
        }
        for id in self.ids.clone() {
            if let Some(Record { state: State::InProgress { lease_until, .. }, attempt, .. }) = self.record(&id).await {
                let last = self.leases.entry((id, u64::from(attempt))).or_insert(lease_until);
                *last = lease_until.max(*last);
            }
            for (rank, until) in self.fast.locks(&id) {
                assert!(Some(until) <= self.leases.get(&(id, rank)).copied(), "a lock outlives the lease of its run");
            }
        }
    }
}

async fn run(config: impl Fn() -> HybridConfig) -> Vec<World> {
    let steps = std::env::var("IDEM_STEPS").map_or(STEPS, |steps| steps.parse().unwrap());
    let mut worlds = Vec::new();
    for seed in 1..=SEEDS {
        let mut world = World::new(seed, config());
        for _ in 0..steps {
            world.step().await;
        }
        worlds.push(world);
    }
    worlds
}

#[tokio::test(start_paused = true)]
async fn lies_cost_time_and_nothing_else() {
    let worlds = run(HybridConfig::new).await;
    let total = |of: fn(&World) -> u64| worlds.iter().map(of).sum::<u64>();
    for lie in Lie::ALL {
        let told: u64 = worlds.iter().filter_map(|world| world.fast.told().get(&lie).copied()).sum();
        println!("{lie:?}: {told}");
        // Ranks matter only where a lock comes too late.
        let least = if lie == Lie::IgnoresRanks { 1 } else { 100 };
        assert!(told >= least, "{lie:?} was told {told} times only");
    }
    let replays = total(|world| world.metrics(|metrics| metrics.fast_replays));
    let turned_away = total(|world| world.metrics(|metrics| metrics.fast_in_progress));
    let unreadable = total(|world| world.metrics(|metrics| metrics.unreadable));
    let lost_answers = total(|world| world.lost_answers);
    let put_off = total(|world| world.put_off);
    let longest = worlds.iter().map(|world| world.longest).max().unwrap();
    println!(
        "{replays} replays and {turned_away} locks of the fast store were believed, {unreadable} entries were not"
    );
    println!("{put_off} were put off for nothing, by {longest:?} at most");
    println!("{lost_answers} answers of the durable store were lost");
    assert!(lost_answers >= 100);
    assert!(replays >= 500 && turned_away >= 500 && unreadable >= 500 && put_off >= 20);
    assert!(longest <= SECOND * 2, "put off by more than a lease");
}

#[tokio::test(start_paused = true)]
async fn without_locks_every_answer_is_the_durable_stores() {
    for world in run(|| HybridConfig::new().without_locks()).await {
        assert_eq!(world.put_off, 0);
        assert!(world.metrics(|metrics| metrics.fast_replays) > 100);
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_cache_no_replay_is_the_fast_stores() {
    for world in run(|| HybridConfig::new().without_cache()).await {
        assert_eq!(world.metrics(|metrics| metrics.fast_replays), 0);
        assert!(world.metrics(|metrics| metrics.fast_in_progress) > 100);
    }
}
