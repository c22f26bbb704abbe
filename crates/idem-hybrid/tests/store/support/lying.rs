//! A fast store that makes every permitted mistake.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use idem_core::memory::{Clock, ManualClock};
use idem_core::{FastEntry, FastRead, FastStore, RecordId, SettlementListener, StoreError, StoreErrorKind, Timestamp};

use super::{MemoryFast, SETTLED};

/// What may be wrong with an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lie {
    /// It has forgotten the entry, or reports a change that it has not made.
    Forgets,
    /// It answers with an earlier entry, expired or not.
    IsStale,
    /// It answers with an entry of another record.
    ConfusesRecords,
    /// It answers with bytes that no client has written.
    TellsGarbage,
    /// It fails, having done it or not.
    Fails,
    /// It never answers.
    Hangs,
    /// It puts an entry much later.
    ActsLate,
    /// It lets anything replace anything.
    IgnoresRanks,
}

impl Lie {
    pub const ALL: [Self; 8] = [
        Self::Forgets,
        Self::IsStale,
        Self::ConfusesRecords,
        Self::TellsGarbage,
        Self::Fails,
        Self::Hangs,
        Self::ActsLate,
        Self::IgnoresRanks,
    ];
}

#[derive(Debug)]
pub struct LyingFast {
    honest: MemoryFast,
    clock: Arc<ManualClock>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    random: u64,
    /// Everything that was ever put.
    history: BTreeMap<RecordId, Vec<FastEntry>>,
    late: Vec<(RecordId, FastEntry)>,
    told: HashMap<Lie, u64>,
    failures_in_a_row: u32,
}

/// One fewer than opens the breaker: an open breaker would keep callers from the lies.
const MOST_FAILURES: u32 = 4;

impl LyingFast {
    pub fn new(clock: Arc<ManualClock>, seed: u64) -> Self {
        let state = State { random: seed | 1, ..State::default() };
        Self { honest: MemoryFast::new(clock.clone()), clock, state: Mutex::new(state) }
    }

    /// How often each lie was told.
    pub fn told(&self) -> HashMap<Lie, u64> {
        self.state.lock().unwrap().told.clone()
    }

    /// The ranks of the locks that were ever put for a record, and when they end.
    pub fn locks(&self, id: &RecordId) -> Vec<(u64, Timestamp)> {
        let state = self.state.lock().unwrap();
        let locks = state.history.get(id).into_iter().flatten().filter(|entry| entry.rank < SETTLED);
        locks.map(|entry| (entry.rank, entry.until)).collect()
    }

    /// The next lie; `None`, half of the time, for the truth.
    fn lie(&self) -> Option<Lie> {
        let mut state = self.state.lock().unwrap();
        let number = state.next();
        let lie = Lie::ALL.get(usize::try_from(number % 16).unwrap()).copied();
        let fails = matches!(lie, Some(Lie::Fails | Lie::Hangs));
        if fails && state.failures_in_a_row == MOST_FAILURES {
            return None;
        }
        state.failures_in_a_row = if fails { state.failures_in_a_row + 1 } else { 0 };
        lie
    }

    fn tell(&self, lie: Lie) {
        *self.state.lock().unwrap().told.entry(lie).or_default() += 1;
    }

    fn one_of<T: Clone>(&self, choices: &[T]) -> Option<T> {
        let number = self.state.lock().unwrap().next();
        choices.get(usize::try_from(number).unwrap_or(usize::MAX) % choices.len().max(1)).cloned()
    }

    /// The entries that were ever put for a record, or for all others.
    fn ever_put(&self, id: &RecordId, for_it: bool) -> Vec<Bytes> {
        let state = self.state.lock().unwrap();
        let of = state.history.iter().filter(|(other, _)| (*other == id) == for_it);
        of.flat_map(|(_, entries)| entries.iter().map(|entry| entry.bytes.clone())).collect()
    }

    async fn catch_up(&self) {
        let due = {
            let mut state = self.state.lock().unwrap();
            if state.next().is_multiple_of(4) { std::mem::take(&mut state.late) } else { Vec::new() }
        };
        for (id, entry) in due {
            let _ = self.honest.put(&id, &entry).await;
        }
    }

    fn garbage(&self, id: &RecordId) -> Bytes {
        let mut bytes = self.one_of(&self.ever_put(id, true)).unwrap_or_default().to_vec();
        let number = usize::try_from(self.state.lock().unwrap().next() >> 8).unwrap();
        match number % 3 {
            0 => bytes.truncate(number / 3 % (bytes.len() + 1)),
            1 if !bytes.is_empty() => {
                let at = number / 3 % bytes.len();
                bytes[at] ^= 1 << (number % 8);
            }
            _ => bytes = number.to_be_bytes().repeat(number % 40),
        }
        bytes.into()
    }
}

impl State {
    /// xorshift64.
    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random >> 16
    }
}

fn down() -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, "a lie").indeterminate()
}

#[async_trait]
impl FastStore for LyingFast {
    async fn get(&self, id: &RecordId, claim: Option<Duration>) -> Result<FastRead, StoreError> {
        self.catch_up().await;
        let now = self.clock.now();
        let lie = self.lie();
        let bytes = match lie {
            Some(Lie::Forgets) => None,
            Some(Lie::IsStale) => self.one_of(&self.ever_put(id, true)),
            Some(Lie::ConfusesRecords) => self.one_of(&self.ever_put(id, false)),
            Some(Lie::TellsGarbage) => Some(self.garbage(id)),
            Some(Lie::Fails) => {
                self.tell(Lie::Fails);
                return Err(down());
            }
            Some(Lie::Hangs) => {
                self.tell(Lie::Hangs);
                std::future::pending().await
            }
            Some(Lie::ActsLate | Lie::IgnoresRanks) | None => return self.honest.get(id, claim).await,
        };
        let truth = self.honest.get(id, claim).await?;
        if let Some(lie) = lie.filter(|_| bytes != truth.bytes) {
            self.tell(lie);
        }
        Ok(FastRead { now, bytes })
    }

    async fn put(&self, id: &RecordId, entry: &FastEntry) -> Result<Timestamp, StoreError> {
        self.catch_up().await;
        self.state.lock().unwrap().history.entry(*id).or_default().push(entry.clone());
        match self.lie() {
            Some(lie @ Lie::Forgets) => {
                self.tell(lie);
                Ok(self.clock.now())
            }
            Some(lie @ Lie::Fails) => {
                self.tell(lie);
                if entry.bytes.len().is_multiple_of(2) {
                    self.honest.put(id, entry).await?;
                }
                Err(down())
            }
            Some(lie @ Lie::ActsLate) => {
                self.tell(lie);
                self.state.lock().unwrap().late.push((*id, entry.clone()));
                Ok(self.clock.now())
            }
            Some(lie @ Lie::Hangs) => {
                self.tell(lie);
                self.state.lock().unwrap().late.push((*id, entry.clone()));
                std::future::pending().await
            }
            Some(lie @ Lie::IgnoresRanks) => {
                if self.honest.entry(id).is_some_and(|there| there.rank > entry.rank) {
                    self.tell(lie);
                    self.honest.forget(id);
                }
                self.honest.put(id, entry).await
            }
            _ => self.honest.put(id, entry).await,
        }
    }

    async fn remove(&self, id: &RecordId, rank: u64, claim: Option<Duration>) -> Result<Timestamp, StoreError> {
        self.catch_up().await;
        match self.lie() {
            Some(lie @ Lie::Forgets) => {
                self.tell(lie);
                Ok(self.clock.now())
            }
            Some(lie @ Lie::Fails) => {
                self.tell(lie);
                Err(down())
            }
            Some(lie @ Lie::Hangs) => {
                self.tell(lie);
                tokio::time::sleep(Duration::MAX).await;
                Err(down())
            }
            Some(lie @ Lie::IgnoresRanks) => {
                if self.honest.entry(id).is_some_and(|there| there.rank != rank) {
                    self.tell(lie);
                }
                self.honest.forget(id);
                Ok(self.clock.now())
            }
            _ => self.honest.remove(id, rank, claim).await,
        }
    }

    fn on_settled(&self, listener: Weak<dyn SettlementListener>) {
        self.honest.on_settled(listener);
    }
}
