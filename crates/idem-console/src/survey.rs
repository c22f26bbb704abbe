//! Counts all records in the background, and remembers those that are stuck.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use idem_core::{
    CountPage, Inspect, PartSize, RecordCounts, RecordFilter, RecordSummary, ScanPosition, StateName, StoreError,
    StoreErrorKind, Timestamp,
};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

/// How many stuck records are shown, the oldest ones. An operator who sees as many has one cause to look for, not a hundred records.
pub(crate) const MOST_STUCK: usize = 100;

/// How long a page waits for a survey that has just begun: those of small stores end within this time.
const PATIENCE: Duration = Duration::from_millis(300);

/// A survey is repeated after this time at the earliest.
const SHORTEST_PAUSE: Duration = Duration::from_secs(30);

/// And after this time at the latest, so that the page of a large store is not hours old.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// How much longer than the survey the pause after it is, within these limits.
const PAUSE_FACTOR: u32 = 19;

/// How often a part is read again if the store does not answer, each time after a second more.
const TRIES: u64 = 5;

/// What a survey found.
#[derive(Debug, Clone, Default)]
pub(crate) struct Findings {
    pub(crate) counts: RecordCounts,
    /// Records whose lease is over, and those whose outcome is unknown: the oldest first.
    pub(crate) stuck: Vec<RecordSummary>,
    /// The store's time at the end; `None` before the first part.
    pub(crate) now: Option<Timestamp>,
}

/// The surveys of one console.
#[derive(Debug, Clone, Default)]
pub(crate) struct State {
    /// Of the last survey that reached its end.
    pub(crate) last: Option<Arc<Findings>>,
    /// What the current survey has found so far, and how much of it is done, from 0 to 1, where the store can tell.
    pub(crate) running: Option<(Arc<Findings>, Option<f64>)>,
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
            self.running = Some((Arc::default(), Some(0.0)));
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
            let pause = (ended - began).saturating_mul(PAUSE_FACTOR).clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
            state.not_before = Some(ended + pause);
            match found {
                Ok(findings) => (state.last, state.error) = (Some(Arc::new(findings)), None),
                Err(error) => state.error = Some(Arc::new(error)),
            }
        });
    }

    async fn read(&self, store: &dyn Inspect) -> Result<Findings, StoreError> {
        let (mut found, mut from, mut part, mut failures) = (Findings::default(), None, PartSize::new(), 0);
        loop {
            let counted = match found.add(store, from.as_ref(), part).await {
                Ok(counted) => counted,
                Err(error) if error.kind() == StoreErrorKind::Timeout => {
                    part.shrink(error)?;
                    continue;
                }
                Err(error) if error.is_retryable() && failures < TRIES => {
                    failures += 1;
                    sleep(Duration::from_secs(failures)).await;
                    continue;
                }
                Err(error) => return Err(error),
            };
            failures = 0;
            match counted.next {
                Some(next) => from = Some(next),
                None => return Ok(found),
            }
            let so_far = Arc::new(found.clone());
            self.0.0.send_modify(|state| state.running = Some((so_far, counted.progress)));
        }
    }
}

impl Findings {
    /// Adds the part after `from`.
    async fn add(
        &mut self,
        store: &dyn Inspect,
        from: Option<&ScanPosition>,
        part: PartSize,
    ) -> Result<CountPage, StoreError> {
        let counted = store.count(from, part.get()).await?;
        // The database counts without sending the records, so they are only read where there are some.
        if counted.counts.abandoned + counted.counts.outcome_unknown > 0 {
            // Records that were made since the count move others out of the part. They may be read twice, since each is kept once.
            let more = part.get().saturating_add(part.get().get());
            let page = store.list(&candidates(), from, more).await?;
            let stuck = page.records.into_iter().filter(|record| is_stuck(record, page.now));
            let known: HashSet<_> = self.stuck.iter().map(|record| record.id).collect();
            let new = stuck.filter(|record| !known.contains(&record.id)).collect::<Vec<_>>();
            self.stuck.extend(new);
            self.stuck.sort_by_key(|record| (record.created_at, record.id));
            self.stuck.dedup_by_key(|record| record.id);
            self.stuck.truncate(MOST_STUCK);
        }
        self.counts.merge(&counted.counts);
        self.now = Some(counted.now);
        Ok(counted)
    }
}

/// Among these are the stuck ones.
pub(crate) fn candidates() -> RecordFilter {
    RecordFilter { states: vec![StateName::InProgress, StateName::OutcomeUnknown], ..RecordFilter::default() }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.0.send_modify(|state| state.running = None);
    }
}

/// Whether no process runs it and it has no answer.
pub(crate) fn is_stuck(record: &RecordSummary, now: Timestamp) -> bool {
    record.is_abandoned(now) || record.state.name() == StateName::OutcomeUnknown
}
