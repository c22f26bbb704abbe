//! Counts all records in the background, and remembers those that are stuck.

use std::sync::Arc;
use std::time::Duration;

use idem_core::{Inspect, PartSize, RecordCounts, RecordFilter, RecordSummary, StateName, StoreError, Timestamp};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

/// How many stuck records are shown, the oldest ones. An operator who sees as many has one cause to look for, not a hundred records.
pub(crate) const MOST_STUCK: usize = 100;

/// How long a page waits for a survey that has just begun: those of small stores end within this time.
const PATIENCE: Duration = Duration::from_millis(300);

/// A survey is repeated after this time at the earliest.
const SHORTEST_PAUSE: Duration = Duration::from_secs(30);

/// How much longer than the survey the pause after it is, so that surveys take at most a twentieth of the time.
const PAUSE_FACTOR: u32 = 19;

/// What a survey found.
#[derive(Debug, Clone)]
pub(crate) struct Findings {
    pub(crate) counts: RecordCounts,
    /// Records whose lease is over, and those whose outcome is unknown: the oldest first.
    pub(crate) stuck: Vec<RecordSummary>,
    /// The store's time at the end.
    pub(crate) now: Timestamp,
}

/// The surveys of one console.
#[derive(Debug, Clone, Default)]
pub(crate) struct State {
    /// Of the last survey that reached its end.
    pub(crate) last: Option<Arc<Findings>>,
    /// How many records the current survey has counted, and how much of it is done, from 0 to 1, where the store can tell.
    pub(crate) running: Option<(u64, Option<f64>)>,
    /// Why the last survey ended early.
    pub(crate) error: Option<Arc<StoreError>>,
    /// When the next one may begin.
    not_before: Option<Instant>,
}

#[derive(Debug, Default)]
pub(crate) struct Survey(watch::Sender<State>);

impl Survey {
    /// What is known. Begins a survey if the last one is too old.
    pub(crate) async fn state(self: &Arc<Self>, store: &Arc<dyn Inspect>) -> State {
        if self.0.send_if_modified(State::begin) {
            let (survey, store) = (Running(Arc::clone(self)), Arc::clone(store));
            tokio::spawn(async move { survey.run(&*store).await });
        }
        let mut state = self.0.subscribe();
        let ended = timeout(PATIENCE, state.wait_for(|state| state.running.is_none())).await;
        // Either way it is what is known now.
        drop(ended);
        state.borrow().clone()
    }
}

impl State {
    fn begin(&mut self) -> bool {
        let is_due = self.running.is_none() && self.not_before.is_none_or(|earliest| earliest <= Instant::now());
        if is_due {
            self.running = Some((0, Some(0.0)));
        }
        is_due
    }
}

/// A survey that runs. It counts as ended when this is dropped, also by a panic or the end of the runtime.
struct Running(Arc<Survey>);

impl Running {
    async fn run(&self, store: &dyn Inspect) {
        let began = Instant::now();
        let found = self.read(store).await;
        let ended = Instant::now();
        self.0.0.send_modify(|state| {
            state.not_before = Some(ended + ((ended - began) * PAUSE_FACTOR).max(SHORTEST_PAUSE));
            match found {
                Ok(findings) => (state.last, state.error) = (Some(Arc::new(findings)), None),
                Err(error) => state.error = Some(Arc::new(error)),
            }
        });
    }

    async fn read(&self, store: &dyn Inspect) -> Result<Findings, StoreError> {
        let candidates =
            RecordFilter { states: vec![StateName::InProgress, StateName::OutcomeUnknown], ..RecordFilter::default() };
        let (mut counts, mut stuck, mut from, mut part) = (RecordCounts::default(), Vec::new(), None, PartSize::new());
        loop {
            let counted = match store.count(from.as_ref(), part.get()).await {
                Ok(counted) => counted,
                Err(error) => {
                    part.shrink(error)?;
                    continue;
                }
            };
            // The database counts without sending the records, so they are only read where there are some.
            if counted.counts.abandoned + counted.counts.outcome_unknown > 0 {
                let page = match store.list(&candidates, from.as_ref(), part.get()).await {
                    Ok(page) => page,
                    Err(error) => {
                        part.shrink(error)?;
                        continue;
                    }
                };
                stuck.extend(page.records.into_iter().filter(|record| is_stuck(record, page.now)));
                stuck.sort_by_key(|record| record.created_at);
                // A scan of Redis may return a record twice.
                stuck.dedup_by_key(|record| record.id);
                stuck.truncate(MOST_STUCK);
            }
            counts.merge(&counted.counts);
            self.0.0.send_modify(|state| state.running = Some((counts.scanned(), counted.progress)));
            match counted.next {
                Some(next) => from = Some(next),
                None => return Ok(Findings { counts, stuck, now: counted.now }),
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.0.send_modify(|state| state.running = None);
    }
}

fn is_stuck(record: &RecordSummary, now: Timestamp) -> bool {
    record.is_abandoned(now) || record.state.name() == StateName::OutcomeUnknown
}
