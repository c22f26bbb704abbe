//! An engine under test.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idem_core::engine::{
    Answer, Conclusion, Context, Disposition, Durations, Event, ExecuteError, Idempotency, Observer, Operation,
    Settings,
};
use idem_core::memory::ManualClock;
use idem_core::{
    Fingerprint, IdempotencyStore, MemoryStore, Record, RecordId, RecordIdentity, Scope, StoredBody, StoredResponse,
    Timestamp, TraceParent, Writes,
};
use idem_testkit::FaultyStore;
use tokio::runtime::Handle;

pub(crate) type Result = std::result::Result<Answer<&'static str>, ExecuteError>;

/// A store, its clock, and how often the operation really ran.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) store: Arc<FaultyStore<MemoryStore>>,
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) runs: Arc<AtomicUsize>,
    pub(crate) events: Arc<Events>,
}

/// The events that an engine reported.
#[derive(Debug, Default)]
pub(crate) struct Events(Mutex<Vec<Told>>);

/// An event, without what it borrows.
#[derive(Debug, Clone)]
pub(crate) struct Told {
    pub(crate) name: &'static str,
    pub(crate) is_decision: bool,
    pub(crate) about: String,
    pub(crate) record: Option<RecordId>,
    pub(crate) attempt: Option<u32>,
    pub(crate) durations: Durations,
    pub(crate) traces: [Option<TraceParent>; 2],
}

impl Observer for Events {
    fn observe(&self, event: &Event<'_>) {
        self.0.lock().unwrap().push(Told {
            name: event.kind.name(),
            is_decision: event.kind.is_decision(),
            about: format!("{:?} {} {:?}", event.principal, event.operation, event.contract),
            record: event.record.copied(),
            attempt: event.attempt,
            durations: event.durations,
            traces: [event.trace, event.original_trace],
        });
    }
}

impl Events {
    pub(crate) fn count(&self, name: &str) -> usize {
        self.0.lock().unwrap().iter().filter(|event| event.name == name).count()
    }

    /// Takes the events since the last call.
    pub(crate) fn take(&self) -> Vec<Told> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }

    /// Takes the events since the last call, and returns their names.
    pub(crate) fn take_names(&self) -> Vec<&'static str> {
        self.take().iter().map(|event| event.name).collect()
    }
}

impl World {
    pub(crate) fn new() -> Self {
        let clock = Arc::new(ManualClock::new(Timestamp::from_unix_micros(0)));
        let memory = MemoryStore::with_clock(NonZeroUsize::MAX, clock.clone());
        let store = Arc::new(FaultyStore::new(Arc::new(memory)));
        Self { store, clock, runs: Arc::default(), events: Arc::default() }
    }

    /// Leases are renewed on the runtime of the test, whose clock may be paused.
    pub(crate) fn settings(&self) -> Settings {
        let settings = Settings::new().observer(self.events.clone());
        match Handle::try_current() {
            Ok(runtime) => settings.renewals_on(runtime),
            Err(_) => settings,
        }
    }

    pub(crate) fn at_least_once(&self) -> Idempotency {
        Idempotency::at_least_once(self.store.clone(), self.settings())
    }

    pub(crate) fn at_most_once(&self) -> Idempotency {
        Idempotency::at_most_once(self.store.clone(), self.settings())
    }

    pub(crate) fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    /// What the record says, read past the faults.
    pub(crate) async fn record(&self) -> Option<Record> {
        self.store.inner().peek(&self.record_id()).await.unwrap()
    }

    pub(crate) fn record_id(&self) -> RecordId {
        RecordIdentity::new("idem").record_id(&Scope::new("acme", "pay"), &"k".parse().unwrap())
    }

    /// Runs the operation: it takes `takes`, and concludes with `disposition`.
    pub(crate) async fn run(&self, engine: &Idempotency, takes: Duration, disposition: Disposition) -> Result {
        self.run_as(engine, operation(), takes, disposition).await
    }

    pub(crate) async fn run_as(
        &self,
        engine: &Idempotency,
        operation: Operation,
        takes: Duration,
        disposition: Disposition,
    ) -> Result {
        let runs = Arc::clone(&self.runs);
        let run = move |_: Context| async move {
            tokio::time::sleep(takes).await;
            runs.fetch_add(1, Ordering::SeqCst);
            Conclusion { value: "ran", disposition, retention: None }
        };
        engine.execute(operation, run, panicked).await
    }
}

pub(crate) fn operation() -> Operation {
    operation_with(b"12.50 EUR")
}

pub(crate) fn operation_with(input: &[u8]) -> Operation {
    Operation::new(Scope::new("acme", "pay"), "k".parse().unwrap(), Fingerprint::of_bytes("pay", input))
}

pub(crate) fn panicked() -> Conclusion<&'static str> {
    let response = StoredResponse::new(500, "panicked");
    Conclusion { value: "panicked", disposition: Disposition::Fault { response }, retention: None }
}

pub(crate) fn done() -> Disposition {
    Disposition::Complete { response: StoredResponse::new(201, "paid"), writes: Writes::Keep }
}

pub(crate) fn fault() -> Disposition {
    Disposition::Fault { response: StoredResponse::new(500, "fault") }
}

#[track_caller]
pub(crate) fn assert_ran(result: &Result) {
    assert!(matches!(result, Ok(Answer::Ran { value: "ran", protected: true, .. })), "{result:?}");
}

#[track_caller]
pub(crate) fn assert_replays(result: &Result, body: &'static str) {
    let Ok(Answer::Replay(replay)) = result else { panic!("expected a replay, got {result:?}") };
    assert_eq!(replay.response.body, StoredBody::Retained(body.into()));
}

#[track_caller]
pub(crate) fn assert_in_progress(result: &Result) {
    assert!(matches!(result, Ok(Answer::InProgress { .. })), "{result:?}");
}
