//! User code that panics: observers at each of their calls, handlers, panic conclusions, and probes. Also probes that take
//! longer than a lease.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use idem_core::engine::{
    Answer, Conclusion, Context, Contract, CrashedRun, Disposition, Event, ExecuteError, Idempotency, Observer,
    Operation, Probe, ProbeOutcome, Settings,
};
use idem_core::{DurableStore, Fingerprint, MemoryStore, ReplayKind, Scope, TransactionalStore, Writes};
use idem_sqlite::{SqliteConfig, SqliteStore};
use idem_testkit::fixture::response;
use idem_testkit::{Fault, FaultyStore, Verb};
use tempfile::TempDir;
use tokio::time::{sleep, timeout};

use crate::coverage::Coverage;
use crate::hold;
use crate::world::{Checked, PATIENCE};

/// The lease in real time. Renewals are due at a third of it, and other sweeps use the processors too.
const LEASE: Duration = Duration::from_millis(900);

/// How much longer than a lease a key may take until it is free or answered.
const MARGIN: Duration = Duration::from_millis(500);

/// The duration of an operation that is renewed several times.
const LONG_RUN: Duration = Duration::from_millis(2_200);

/// An engine that makes more calls than this in one scene never stops.
const MOST_CALLS: u32 = 200;

/// The number of concurrent cases; most of their time they wait for leases to expire.
const AT_ONCE: usize = 8;

/// The user code that panics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Culprit {
    Observer,
    Handler,
    OnPanic,
    Probe,
    /// It does not panic, but takes longer than its lease.
    SlowProbe,
}

/// When a handler panics.
#[derive(Debug, Clone, Copy)]
enum When {
    /// Before it returns a future.
    AtOnce,
    /// At the first poll of its future.
    BeforeItsAwait,
    AfterItsAwait,
    /// After its lease was renewed.
    Late,
}

#[derive(Debug)]
struct PanicsAt {
    call: u32,
    calls: AtomicU32,
}

impl Observer for PanicsAt {
    fn observe(&self, event: &Event<'_>) {
        let call = self.calls.fetch_add(1, Ordering::SeqCst);
        assert!(call != self.call, "an observer panics at {event:?}, its call {call}");
    }
}

/// A probe that reports that nothing happened.
#[derive(Debug)]
struct Says {
    after: Duration,
    panics: bool,
}

#[async_trait]
impl Probe for Says {
    async fn probe(&self, _: CrashedRun<'_>) -> Result<ProbeOutcome, Box<dyn std::error::Error + Send + Sync>> {
        sleep(self.after).await;
        assert!(!self.panics, "a probe panics");
        Ok(ProbeOutcome::DidNotHappen)
    }
}

type Told = Result<Answer<u32>, ExecuteError>;

/// A store whose verbs fail on demand, with a contract.
struct Scene {
    contract: Contract,
    memory: Arc<FaultyStore<dyn DurableStore>>,
    sqlite: Option<Arc<FaultyStore<dyn TransactionalStore>>>,
    _folder: TempDir,
    /// How often a handler began.
    runs: Arc<AtomicU32>,
}

impl Culprit {
    pub(crate) const ALL: [Self; 5] = [Self::Observer, Self::Handler, Self::OnPanic, Self::Probe, Self::SlowProbe];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Observer => "an observer panics",
            Self::Handler => "a handler panics",
            Self::OnPanic => "what concludes panics",
            Self::Probe => "a probe panics",
            Self::SlowProbe => "a probe outlives its lease",
        }
    }

    pub(crate) async fn sweep(self) -> Coverage {
        let mut coverage = Coverage::default();
        let contracts = match self {
            Self::Probe | Self::SlowProbe => &[Contract::AtMostOnce][..],
            _ => &[Contract::AtLeastOnce, Contract::AtMostOnce, Contract::Transactional],
        };
        for &contract in contracts {
            for first in (0..MOST_CALLS).step_by(AT_ONCE) {
                let turns = first..first + AT_ONCE as u32;
                // Each in its own task, because a panic may end the task.
                let tried: Vec<_> = turns.map(|turn| (turn, tokio::spawn(self.one(contract, turn)))).collect();
                let mut is_over = false;
                for (turn, tried) in tried {
                    let tried = match timeout(PATIENCE * 3, tried).await {
                        Ok(Ok(tried)) => tried,
                        Ok(Err(error)) => Err(format!("the sweep itself: {error}").into()),
                        Err(_) => Err("it hangs".into()),
                    };
                    match tried {
                        Ok(true) => coverage.drops += 1,
                        Ok(false) => is_over = true,
                        Err(error) => coverage.violations.push(format!("{contract:?}, {self:?} {turn}: {error}")),
                    }
                }
                if is_over {
                    break;
                }
            }
        }
        coverage
    }

    /// Runs one case; `false` if there is none with this number.
    async fn one(self, contract: Contract, turn: u32) -> Checked<bool> {
        const WHEN: [When; 4] = [When::AtOnce, When::BeforeItsAwait, When::AfterItsAwait, When::Late];
        let scene = Scene::open(contract).await?;
        match (self, WHEN.get(turn as usize)) {
            (Self::Observer, _) => return scene.observed(turn).await,
            (Self::Handler, Some(when)) => scene.handled(*when).await?,
            (Self::OnPanic, Some(when)) => scene.concluded(*when).await?,
            (Self::Probe, _) if turn == 0 => scene.probed().await?,
            (Self::SlowProbe, _) if turn == 0 => scene.probed_slowly().await?,
            _ => return Ok(false),
        }
        Ok(true)
    }
}

impl Scene {
    async fn open(contract: Contract) -> Checked<Self> {
        let folder = TempDir::new()?;
        let memory: Arc<dyn DurableStore> = Arc::new(MemoryStore::new(NonZeroUsize::MAX));
        let sqlite = match contract {
            Contract::Transactional => {
                let url = format!("sqlite://{}", folder.path().join("records.db").display());
                let store = SqliteStore::open(SqliteConfig::new(url).dangerous_synchronous_normal()).await?;
                let store: Arc<dyn TransactionalStore> = Arc::new(store);
                Some(Arc::new(FaultyStore::new(store)))
            }
            _ => None,
        };
        let memory = Arc::new(FaultyStore::new(memory));
        Ok(Self { contract, memory, sqlite, _folder: folder, runs: Arc::default() })
    }

    fn engine(&self, settings: Settings) -> Idempotency {
        let settings = settings.lease(LEASE).backoff(Duration::from_millis(10), Duration::from_millis(10));
        match (self.contract, &self.sqlite) {
            (Contract::Transactional, Some(sqlite)) => Idempotency::transactional(sqlite.clone(), settings),
            (Contract::AtMostOnce, _) => Idempotency::at_most_once(self.memory.clone(), settings),
            _ => Idempotency::at_least_once(self.memory.clone(), settings),
        }
    }

    fn fail_next(&self, verb: Verb) {
        match &self.sqlite {
            Some(sqlite) => sqlite.next(verb, Fault::ErrorBefore),
            None => self.memory.next(verb, Fault::ErrorBefore),
        }
    }

    /// Runs an operation for this long, unless it loses its lease.
    async fn run(&self, engine: &Idempotency, key: &str, lasts: Duration, is_told: &Arc<AtomicBool>) -> Told {
        let (runs, is_told) = (Arc::clone(&self.runs), Arc::clone(is_told));
        let handler = async move |context: Context| {
            runs.fetch_add(1, Ordering::SeqCst);
            tokio::select! {
                () = sleep(lasts) => {}
                () = context.lease_lost() => is_told.store(true, Ordering::SeqCst),
            }
            concluded(context.attempt())
        };
        bounded(engine.execute(operation(key, b"pay"), handler, failed)).await
    }

    async fn runs_at_once(&self, engine: &Idempotency, key: &str) -> Told {
        self.run(engine, key, Duration::ZERO, &Arc::default()).await
    }

    /// Checks that an observer that panics at one of its calls changes no caller's answer.
    async fn observed(self, call: u32) -> Checked<bool> {
        let observer = Arc::new(PanicsAt { call, calls: AtomicU32::new(0) });
        let engine = self.engine(Settings::new().observer(observer.clone()));
        let is_told = Arc::new(AtomicBool::new(false));
        if self.contract != Contract::Transactional {
            self.fail_next(Verb::Renew);
        }
        let asked = async {
            sleep(LEASE / 3).await;
            let busy = self.runs_at_once(&engine, "long").await;
            hold!(matches!(busy, Ok(Answer::InProgress { .. })), "while it runs, a repeat is told {busy:?}");
            // Wait beyond the first lease.
            sleep(LEASE).await;
            let rival = self.runs_at_once(&self.engine(Settings::new()), "long").await;
            let is_free = is_told.load(Ordering::SeqCst);
            hold!(
                is_free || matches!(rival, Ok(Answer::InProgress { .. })),
                "its lease is lost, and nobody says so: {rival:?}"
            );
            Checked::Ok(())
        };
        let (first, asked) = tokio::join!(self.run(&engine, "long", LONG_RUN, &is_told), asked);
        asked?;
        hold!(matches!(first, Ok(Answer::Ran { attempt: 1, .. })), "who ran was told {first:?}");
        let again = self.runs_at_once(&engine, "long").await;
        hold!(is_replay(&again), "a repeat was told {again:?}");
        let other = bounded(engine.execute(operation("long", b"other"), async |_| concluded(1), failed)).await;
        hold!(matches!(other, Ok(Answer::Mismatch)), "another request was told {other:?}");
        for verb in [Verb::Acquire, Verb::Begin, Verb::Settle, Verb::Finish] {
            self.fail_next(verb);
            let ran = self.runs_at_once(&engine, &format!("{verb:?}")).await;
            hold!(
                !matches!(ran, Err(ExecuteError::Interrupted)),
                "{verb:?} failed once, and its caller was told {ran:?}"
            );
        }
        self.panics(&engine, When::AfterItsAwait, false).await?;
        let retry = bounded(engine.execute(operation("retry", b"pay"), async |_| again_later(), failed)).await;
        hold!(matches!(retry, Ok(Answer::Ran { .. })), "who failed was told {retry:?}");
        let early = self.runs_at_once(&engine, "retry").await;
        hold!(early.is_ok(), "after a failure, a repeat is told {early:?}");
        self.is_over(engine, &["long", "Acquire", "Begin", "Settle", "Finish", "panics", "retry"]).await?;
        Ok(observer.calls.load(Ordering::SeqCst) > call)
    }

    /// Checks that a handler that panics is concluded, and its caller answered.
    async fn handled(self, when: When) -> Checked {
        let engine = self.engine(Settings::new());
        self.panics(&engine, when, false).await?;
        let next = self.runs_at_once(&engine, "panics").await;
        hold!(matches!(next, Ok(Answer::Ran { .. })), "it was released, and a repeat is told {next:?}");
        self.is_over(engine, &["panics"]).await
    }

    /// Checks that the key is free or answered one lease later, if the conclusion panics too.
    async fn concluded(self, when: When) -> Checked {
        let engine = self.engine(Settings::new());
        self.panics(&engine, when, true).await?;
        self.is_over(engine, &["panics"]).await
    }

    async fn panics(&self, engine: &Idempotency, when: When, is_twice: bool) -> Checked {
        let handler = move |context: Context| {
            assert!(!matches!(when, When::AtOnce), "a handler panics");
            async move {
                assert!(!matches!(when, When::BeforeItsAwait), "a handler panics");
                sleep(if matches!(when, When::Late) { LEASE * 3 / 2 } else { Duration::from_millis(5) }).await;
                assert!(context.attempt() == 0, "a handler panics");
                concluded(0)
            }
        };
        let conclude = move || {
            assert!(!is_twice, "what concludes panics");
            failed()
        };
        let told = bounded(engine.execute(operation("panics", b"pay"), handler, conclude)).await;
        let is_concluded = matches!(told, Ok(Answer::Ran { value: 0, .. }));
        hold!(is_twice || is_concluded, "a handler panicked, and its caller was told {told:?}");
        let is_error = matches!(told, Err(ExecuteError::Interrupted) | Ok(Answer::Ran { value: 0, .. }));
        hold!(is_error, "what concludes panicked, and its caller was told {told:?}");
        Ok(())
    }

    /// Leaves a key whose owner died during its run.
    async fn crash(&self) -> Checked {
        let engine = self.engine(Settings::new());
        self.panics(&engine, When::AfterItsAwait, true).await?;
        sleep(LEASE + MARGIN).await;
        Ok(())
    }

    /// Checks that the engine asks the next probe after one that panicked.
    async fn probed(self) -> Checked {
        self.crash().await?;
        let panics = Says { after: Duration::from_millis(5), panics: true };
        let engine = self.engine(Settings::new().probe(Arc::new(panics)));
        let told = self.runs_at_once(&engine, "panics").await;
        hold!(matches!(told, Ok(Answer::InProgress { .. })), "a probe panicked, and its caller was told {told:?}");
        let says = Says { after: Duration::ZERO, panics: false };
        let next = self.runs_at_once(&self.engine(Settings::new().probe(Arc::new(says))), "panics").await;
        hold!(matches!(next, Ok(Answer::Ran { .. })), "the next one was told {next:?}");
        self.is_over(engine, &["panics"]).await
    }

    /// Checks that a probe's answer under a lost lease allows nothing: the next owner may have run.
    async fn probed_slowly(self) -> Checked {
        self.crash().await?;
        let slow = Says { after: LEASE * 3, panics: false };
        // Its renewals stop early, like those of a process that is held up.
        let engine = self.engine(Settings::new().probe(Arc::new(slow)).renewal_limit(LEASE / 2));
        let quick = Says { after: Duration::ZERO, panics: false };
        let rival = self.engine(Settings::new().probe(Arc::new(quick)));
        let taken_over = async {
            sleep(LEASE + MARGIN * 2).await;
            self.runs_at_once(&rival, "panics").await
        };
        let (first, second) = tokio::join!(self.runs_at_once(&engine, "panics"), taken_over);
        hold!(matches!(second, Ok(Answer::Ran { .. })), "who took it over was told {second:?}");
        let runs = self.runs.load(Ordering::SeqCst);
        hold!(runs == 1, "it ran {runs} times, and who had lost the lease was told {first:?}");
        self.is_over(engine, &["panics"]).await
    }

    /// Checks that one lease later each key is free or answered, no caller waits, and the engine shuts down.
    async fn is_over(&self, engine: Idempotency, keys: &[&str]) -> Checked {
        sleep(LEASE + MARGIN).await;
        let other = self.engine(Settings::new());
        for key in keys {
            let told = self.runs_at_once(&other, key).await;
            let is_known = match &told {
                Ok(Answer::Ran { .. }) => true,
                Ok(Answer::Replay(replay)) => {
                    replay.kind != ReplayKind::OutcomeUnknown || self.contract == Contract::AtMostOnce
                }
                _ => false,
            };
            hold!(is_known, "one lease later, {key} is told {told:?}");
        }
        hold!(engine.waiting() == 0, "{} still wait", engine.waiting());
        hold!(engine.shutdown(PATIENCE).await.is_ok(), "it does not shut down");
        Ok(())
    }
}

/// Limits the waiting time.
async fn bounded(told: impl Future<Output = Told>) -> Told {
    match timeout(PATIENCE, told).await {
        Ok(told) => told,
        Err(_) => Err(ExecuteError::TransactionHeld),
    }
}

fn operation(key: &str, body: &[u8]) -> Operation {
    let key = key.parse().unwrap_or_else(|_| unreachable!("{key} is a key"));
    Operation::new(Scope::new("acme", "pay"), key, Fingerprint::of_bytes("pay", body))
}

fn concluded(value: u32) -> Conclusion<u32> {
    let disposition = Disposition::Complete { response: response(), writes: Writes::Keep };
    Conclusion { value, disposition, retention: None }
}

fn failed() -> Conclusion<u32> {
    Conclusion { value: 0, disposition: Disposition::Release { writes: Writes::Discard }, retention: None }
}

fn again_later() -> Conclusion<u32> {
    Conclusion { value: 0, disposition: Disposition::Retry { response: response(), after: None }, retention: None }
}

fn is_replay(told: &Told) -> bool {
    matches!(told, Ok(Answer::Replay(replay)) if replay.kind == ReplayKind::Completed && replay.response == response())
}
