//! A store on a running clock passes within its precision.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use idem_core::memory::{Clock, ManualClock};
use idem_core::{MemoryStore, Timestamp};
use idem_testkit::{Subject, TimeControl};

/// Every reading moves this clock by half a millisecond, as a server's time goes on meanwhile.
#[derive(Debug)]
struct Drifting(ManualClock);

impl Clock for Drifting {
    fn now(&self) -> Timestamp {
        self.0.advance(Duration::from_micros(500));
        self.0.now()
    }
}

impl TimeControl for Drifting {
    fn advance(&self, by: Duration) {
        self.0.advance(by);
    }
}

async fn drifting() -> Subject {
    let clock = Arc::new(Drifting(ManualClock::new(Timestamp::from_unix_micros(0))));
    let store = Arc::new(MemoryStore::with_clock(NonZeroUsize::MAX, clock.clone()));
    Subject::new(store.clone(), store, clock).with_precision(Duration::from_secs(2))
}

idem_testkit::conformance!(drifting);
idem_testkit::state_machine!(drifting);
