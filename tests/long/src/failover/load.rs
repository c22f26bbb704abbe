//! Clients: most run operations on fresh keys, some hold leases for long, and some sleep through the failover.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use idem_core::{AcquireOutcome, IdempotencyStore, OwnerToken, RecordId, Settlement};
use idem_redis::RedisStore;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::key::Key;
use super::request::{TERM, fresh_id, request};
use super::world::{Phase, World};
use crate::Error;
use crate::random::Random;
use crate::records::DAY;

/// How many tasks hold leases, and how many leases each one holds.
const HOLDERS: u64 = 8;
const HELD: usize = 16;

/// The number of tasks in the process that sleeps through the failover: more than it has connections.
const SLEEPERS: u64 = 8;

/// How many times a verb is sent if no answer comes, as by the engine.
const REPEATS: usize = 2;

/// The longest pause between two operations of a client, and after an error, in milliseconds.
const PAUSE_MS: u64 = 50;

/// The tasks of a round, with the answers that they got.
#[derive(Debug)]
pub(super) struct Load(JoinSet<Vec<Key>>);

/// One task with its process and the process of its rivals.
struct Client {
    world: Arc<World>,
    own: RedisStore,
    rival: RedisStore,
    random: Random,
    sleeps: bool,
}

impl Load {
    /// Starts the tasks. The last of the three processes sleeps in the phase `Sleep`.
    pub(super) fn start(world: &Arc<World>, processes: &[RedisStore; 3], clients: u64) -> Self {
        let mut tasks = JoinSet::new();
        for number in 0..clients + HOLDERS + SLEEPERS {
            let sleeps = number >= clients + HOLDERS;
            let [own, rival] = match (sleeps, number % 2) {
                (true, _) => [&processes[2], &processes[2]],
                (false, 0) => [&processes[0], &processes[1]],
                (false, _) => [&processes[1], &processes[0]],
            };
            let world = Arc::clone(world);
            let client = Client { world, own: own.clone(), rival: rival.clone(), random: Random::new(), sleeps };
            if sleeps || number < clients {
                tasks.spawn(client.operate());
            } else {
                tasks.spawn(client.hold());
            }
        }
        Self(tasks)
    }

    /// Waits for pending operations and returns all keys.
    pub(super) async fn end(mut self) -> Result<BTreeMap<RecordId, Key>, Error> {
        let mut keys = BTreeMap::new();
        while let Some(ended) = self.0.join_next().await {
            keys.extend(ended?.into_iter().map(|key| (key.id, key)));
        }
        Ok(keys)
    }
}

impl Client {
    /// Runs one operation after another, each on a fresh key.
    async fn operate(mut self) -> Vec<Key> {
        let mut keys = Vec::new();
        while !self.world.is_over() {
            if self.sleeps {
                self.sleep_if_told().await;
            }
            let mut key = Key::new(fresh_id(self.world.round));
            self.operation(&mut key).await;
            if key.lease().is_some() {
                keys.push(key);
            }
            self.pause().await;
        }
        keys
    }

    async fn operation(&mut self, key: &mut Key) {
        self.acquire(key).await;
        if self.random.chance(25) {
            self.pause().await;
        }
        if self.random.chance(25) {
            self.renew(key).await;
        }
        if self.random.chance(25) {
            self.compete(key).await;
        }
        self.settle(key).await;
        // A caller may repeat an acknowledged settlement, because the answer can be lost behind the store.
        if self.random.chance(20) && key.is_settled() {
            self.settle(key).await;
        }
        if key.lease().is_some() {
            self.compete(key).await;
        }
    }

    /// Holds leases and renews them in turn, while rivals ask for them.
    async fn hold(mut self) -> Vec<Key> {
        let (mut keys, mut held) = (Vec::new(), Vec::new());
        while !self.world.is_over() {
            if held.len() < HELD {
                let mut key = Key::new(fresh_id(self.world.round));
                self.acquire(&mut key).await;
                if let Some(lease) = key.lease().cloned() {
                    self.world.held(lease);
                    held.push(key);
                }
            }
            // This lease is not renewed any more, but must still hold.
            if self.random.chance(10) && !held.is_empty() {
                keys.push(held.swap_remove(self.random.below(held.len() as u64) as usize));
            }
            for _ in 0..4 {
                let at = self.random.below(held.len() as u64) as usize;
                let Some(key) = held.get_mut(at) else { break };
                self.renew(key).await;
                if self.random.chance(25) {
                    self.compete(key).await;
                }
                if key.breach().is_some() {
                    keys.push(held.swap_remove(at));
                }
            }
            self.pause().await;
        }
        keys.extend(held);
        keys
    }

    /// Acquires a fresh key, sometimes by two requests at once, as when a client did not wait for its answer.
    async fn acquire(&mut self, key: &mut Key) {
        let [own, other] = [OwnerToken::random(), OwnerToken::random()];
        let [asked, asked_too] = [request(key.id, own), request(key.id, other)];
        for _ in 0..REPEATS {
            let (first, second) = if self.random.chance(25) {
                let (first, second) = tokio::join!(self.own.acquire(&asked), self.rival.acquire(&asked_too));
                (first, Some(second))
            } else {
                (self.own.acquire(&asked).await, None)
            };
            for (owner, answer) in [(own, Some(first)), (other, second)] {
                let Some(outcome) = answer.and_then(|answer| self.world.hear(answer)) else { continue };
                let is_fact = key.acquired(owner, outcome);
                self.world.fact(is_fact);
            }
            if let Some(lease) = key.lease() {
                return self.world.owned(lease.clone());
            }
            self.pause().await;
        }
    }

    async fn renew(&mut self, key: &mut Key) {
        let Some(lease) = key.lease().filter(|_| key.is_running()).cloned() else { return };
        if let Some(outcome) = self.world.hear(self.own.renew(&lease, TERM).await) {
            let is_fact = key.renewed(outcome);
            self.world.fact(is_fact);
        }
    }

    async fn settle(&mut self, key: &mut Key) {
        let Some(lease) = key.lease().cloned() else { return };
        let settlement = Settlement::Completed(key.answer());
        for _ in 0..REPEATS {
            let outcome = self.world.hear(self.own.settle(&lease, &settlement, DAY).await);
            let is_fact = key.settled(outcome);
            self.world.fact(is_fact);
            if outcome.is_some() {
                return;
            }
            self.pause().await;
        }
    }

    /// Asks for the key as another client.
    async fn compete(&mut self, key: &mut Key) {
        let owner = OwnerToken::random();
        if let Some(outcome) = self.world.hear(self.rival.acquire(&request(key.id, owner)).await) {
            key.acquired(owner, outcome);
        }
    }

    /// Suspends the process until the phase changes. Afterwards it works, on the connections that it has, on keys that were
    /// acquired meanwhile: as an owner whose store has such a connection among others, and as a rival.
    async fn sleep_if_told(&mut self) {
        let mut phase = self.world.phase();
        if *phase.borrow() != Phase::Sleep {
            return;
        }
        // It fails only if the round cannot end any more.
        let _ = phase.wait_for(|phase| *phase != Phase::Sleep).await;
        for lease in self.world.recently_held() {
            if !self.random.chance(100 / SLEEPERS) || self.world.is_over() {
                continue;
            }
            if let Some(outcome) = self.world.hear(self.own.renew(&lease, TERM).await) {
                self.world.renewed(lease.id, outcome);
            }
        }
        for lease in self.world.recent() {
            if !self.random.chance(100 / SLEEPERS) || self.world.is_over() {
                continue;
            }
            let answer = self.own.acquire(&request(lease.id, OwnerToken::random())).await;
            if let Some(AcquireOutcome::Acquired(_)) = self.world.hear(answer) {
                self.world.intruded(lease.id);
            }
        }
    }

    async fn pause(&mut self) {
        sleep(Duration::from_millis(self.random.below(PAUSE_MS))).await;
    }
}
