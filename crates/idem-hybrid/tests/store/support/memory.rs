//! A fast store in memory, on a clock that the test moves.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use idem_core::memory::{Clock, ManualClock};
use idem_core::{FastEntry, FastRead, FastStore, RecordId, SettlementListener, StoreError, Timestamp};

#[derive(Debug)]
pub struct MemoryFast {
    clock: Arc<ManualClock>,
    entries: Mutex<HashMap<RecordId, FastEntry>>,
    listeners: Listeners,
}

#[derive(Default)]
struct Listeners(Mutex<Vec<Weak<dyn SettlementListener>>>);

impl std::fmt::Debug for Listeners {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Listeners")
    }
}

impl Listeners {
    fn tell(&self, id: &RecordId) {
        let listeners = self.0.lock().unwrap().clone();
        listeners.iter().filter_map(Weak::upgrade).for_each(|listener| listener.settled(id));
    }
}

impl MemoryFast {
    pub fn new(clock: Arc<ManualClock>) -> Self {
        Self { clock, entries: Mutex::default(), listeners: Listeners::default() }
    }

    pub fn entry(&self, id: &RecordId) -> Option<FastEntry> {
        self.entries.lock().unwrap().get(id).filter(|entry| self.clock.now() < entry.until).cloned()
    }

    pub fn forget(&self, id: &RecordId) {
        self.entries.lock().unwrap().remove(id);
    }

    /// Forgets everything, as a server does that is flushed.
    pub fn flush(&self) {
        self.entries.lock().unwrap().clear();
    }
}

#[async_trait]
impl FastStore for MemoryFast {
    async fn get(&self, id: &RecordId, claim: Option<Duration>) -> Result<FastRead, StoreError> {
        let (now, there) = (self.clock.now(), self.entry(id));
        if let (None, Some(life)) = (&there, claim) {
            let entry = FastEntry { rank: 0, bytes: Bytes::new(), until: now.saturating_add(life) };
            self.entries.lock().unwrap().insert(*id, entry);
        }
        Ok(FastRead { now, bytes: there.map(|entry| entry.bytes) })
    }

    async fn put(&self, id: &RecordId, entry: &FastEntry) -> Result<Timestamp, StoreError> {
        if self.entry(id).is_none_or(|there| there.rank <= entry.rank) && self.clock.now() < entry.until {
            self.entries.lock().unwrap().insert(*id, entry.clone());
        }
        Ok(self.clock.now())
    }

    async fn remove(&self, id: &RecordId, rank: u64, claim: Option<Duration>) -> Result<Timestamp, StoreError> {
        if self.entry(id).is_some_and(|there| there.rank == rank) {
            self.entries.lock().unwrap().remove(id);
        }
        self.get(id, claim).await?;
        if rank > 0 {
            self.listeners.tell(id);
        }
        Ok(self.clock.now())
    }

    fn on_settled(&self, listener: Weak<dyn SettlementListener>) {
        self.listeners.0.lock().unwrap().push(listener);
    }
}
