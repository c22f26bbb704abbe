//! The engine: its task dies at each of its awaits, or its caller leaves at each of the caller's.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use idem_core::engine::{Answer, Conclusion, Context, Disposition, ExecuteError, Idempotency, Operation, Settings};
use idem_core::memory::ManualClock;
use idem_core::{
    DurableStore, Fingerprint, MemoryStore, Replay, ReplayKind, Scope, Timestamp, TransactionalStore, Writes,
};
use idem_sqlite::{SqliteConfig, SqliteStore, SqliteTransaction};
use idem_testkit::fixture::{LEASE, response};
use idem_testkit::{Fault, FaultyStore, Verb, drop_at_await};
use tempfile::TempDir;
use tokio::runtime::Builder;

use crate::coverage::Coverage;
use crate::hold;
use crate::world::{Checked, PATIENCE};

/// How often each death is repeated, because the state of SQLite's threads then is random.
const SWEEPS: usize = 5;

/// Longer than any sweep, so that nothing times out.
const FOR_EVER: Duration = Duration::from_secs(3_600);

/// A contract with its store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Setting {
    AtLeastOnceInMemory,
    AtLeastOnceOnSqlite,
    AtMostOnceInMemory,
    AtMostOnceOnSqlite,
    TransactionalOnSqlite,
}

/// Where a task dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Death {
    /// Before a verb starts.
    Before(Verb),
    /// After a verb is done, before it returns.
    After(Verb),
    /// In the handler, before its effect.
    BeforeTheEffect,
    /// In the handler, after its effect.
    AfterTheEffect,
}

/// What outlives a task.
struct Remains {
    setting: Setting,
    clock: Arc<ManualClock>,
    memory: Arc<MemoryStore>,
    folder: TempDir,
    /// How often the handler had its effect, committed or not.
    effects: Arc<AtomicU32>,
    /// Whether the task has reached its death.
    is_there: Arc<AtomicBool>,
}

type Told = Result<Answer<u32>, ExecuteError>;

impl Setting {
    pub(crate) const ALL: [Self; 5] = [
        Self::AtLeastOnceInMemory,
        Self::AtLeastOnceOnSqlite,
        Self::AtMostOnceInMemory,
        Self::AtMostOnceOnSqlite,
        Self::TransactionalOnSqlite,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AtLeastOnceInMemory => "at least once, memory",
            Self::AtLeastOnceOnSqlite => "at least once, sqlite",
            Self::AtMostOnceInMemory => "at most once, memory",
            Self::AtMostOnceOnSqlite => "at most once, sqlite",
            Self::TransactionalOnSqlite => "transactional, sqlite",
        }
    }

    /// All awaits of a run: those of the store's verbs and those of the handler.
    fn deaths(self) -> Vec<Death> {
        let verbs: &[Verb] = match self {
            Self::AtLeastOnceInMemory | Self::AtLeastOnceOnSqlite => &[Verb::Acquire, Verb::Checkpoint, Verb::Settle],
            Self::AtMostOnceInMemory | Self::AtMostOnceOnSqlite => &[Verb::Acquire, Verb::Settle],
            Self::TransactionalOnSqlite => &[Verb::Begin, Verb::Finish],
        };
        let around = verbs.iter().flat_map(|verb| [Death::Before(*verb), Death::After(*verb)]);
        around.chain([Death::BeforeTheEffect, Death::AfterTheEffect]).collect()
    }

    pub(crate) async fn sweep(self) -> Coverage {
        let sweep = tokio::task::spawn_blocking(move || self.sweep_now()).await;
        sweep.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
    }

    fn sweep_now(self) -> Coverage {
        let mut coverage = Coverage { awaits: self.deaths().len(), ..Coverage::default() };
        for _ in 0..SWEEPS {
            for death in self.deaths() {
                match Remains::new(self).and_then(|remains| remains.die(death)) {
                    Ok(()) => coverage.drops += 1,
                    Err(error) => coverage.violations.push(format!("{death:?}: {error}")),
                }
            }
            for at in 0.. {
                match Remains::new(self).and_then(|remains| remains.leave(at)) {
                    Ok(true) => coverage.drops += 1,
                    Ok(false) => break,
                    Err(error) => {
                        coverage.violations.push(format!("the caller left at {at}: {error}"));
                        break;
                    }
                }
            }
        }
        coverage
    }
}

impl Remains {
    fn new(setting: Setting) -> Checked<Self> {
        let clock = Arc::new(ManualClock::new(Timestamp::from_unix_micros(1_767_225_600_000_000)));
        let memory = Arc::new(MemoryStore::with_clock(NonZeroUsize::MAX, clock.clone()));
        Ok(Self { setting, clock, memory, folder: TempDir::new()?, effects: Arc::default(), is_there: Arc::default() })
    }

    /// Kills a run's task with its runtime at a death. Then checks that its repeat gets what the contract says.
    fn die(&self, death: Death) -> Checked {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        runtime.block_on(async {
            let engine = self.engine(Some(death)).await?;
            let dead = async {
                while !self.is_there.load(Ordering::SeqCst) {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            tokio::select! {
                told = self.run(&engine, Some(death)) => Err(format!("it did not die: {told:?}").into()),
                () = dead => Checked::Ok(()),
                () = tokio::time::sleep(PATIENCE) => Err("it did not get there".into()),
            }
        })?;
        runtime.shutdown_timeout(PATIENCE);
        self.clock.advance(LEASE + Duration::from_secs(1));
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        runtime.block_on(async {
            let engine = self.engine(None).await?;
            let second = self.run(&engine, None).await;
            self.judge(death, &second).await?;
            let third = self.run(&engine, None).await;
            hold!(is_the_same(&second, &third), "{second:?} was repeated as {third:?}");
            engine.shutdown(PATIENCE).await?;
            Ok(())
        })
    }

    /// Checks a repeat after a death against the contract.
    async fn judge(&self, death: Death, second: &Told) -> Checked {
        let effects = self.effects().await?;
        let is_acquired = death != Death::Before(Verb::Acquire) && death != Death::Before(Verb::Begin);
        match (self.setting, second) {
            (Setting::TransactionalOnSqlite, Ok(Answer::Ran { .. })) => {
                hold!(death != Death::After(Verb::Finish), "it ran again, and had committed");
                hold!(effects == 1, "{effects} effects in the transaction");
            }
            (Setting::TransactionalOnSqlite, Ok(Answer::Replay(replay))) => {
                hold!(is_answer(replay) && effects == 1, "{effects} effects, and {replay:?}");
            }
            (Setting::AtMostOnceInMemory | Setting::AtMostOnceOnSqlite, Ok(Answer::Ran { .. })) => {
                hold!(!is_acquired && effects == 1, "it ran again");
            }
            (Setting::AtMostOnceInMemory | Setting::AtMostOnceOnSqlite, Ok(Answer::Replay(replay))) => {
                let is_settled = death == Death::After(Verb::Settle);
                hold!(is_answer(replay) == is_settled && effects <= 1, "{effects} effects, and {replay:?}");
                hold!(is_settled || replay.kind == ReplayKind::OutcomeUnknown, "told {replay:?}");
            }
            (_, Ok(Answer::Ran { attempt, .. })) => {
                hold!(death != Death::After(Verb::Settle), "it ran again, and was settled");
                hold!(*attempt == 1 + u32::from(is_acquired), "it is attempt {attempt}");
            }
            (_, Ok(Answer::Replay(replay))) => {
                hold!(is_answer(replay) && death == Death::After(Verb::Settle), "told {replay:?}");
            }
            (_, told) => return Err(format!("told {told:?}").into()),
        }
        Ok(())
    }

    /// Checks that a caller that leaves at an await cancels nothing. Returns `false` if it was answered before.
    fn leave(&self, at: usize) -> Checked<bool> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        runtime.block_on(async {
            let engine = self.engine(None).await?;
            let told = drop_at_await(at, self.run(&engine, None)).await;
            engine.shutdown(PATIENCE).await?;
            let engine = self.engine(None).await?;
            let again = self.run(&engine, None).await;
            match &again {
                Ok(Answer::Replay(replay)) => hold!(is_answer(replay), "told {replay:?}"),
                // The first run never began.
                Ok(Answer::Ran { .. }) if at == 0 => {}
                other => return Err(format!("told {other:?}").into()),
            }
            let effects = self.effects().await?;
            hold!(effects == 1, "{effects} effects");
            engine.shutdown(PATIENCE).await?;
            Ok(told.is_none())
        })
    }

    async fn engine(&self, death: Option<Death>) -> Checked<Idempotency> {
        let settings = Settings::new().lease(LEASE).store_timeout(FOR_EVER);
        if self.setting == Setting::TransactionalOnSqlite {
            let store: Arc<dyn TransactionalStore> = Arc::new(self.sqlite().await?);
            let store = Arc::new(FaultyStore::new(store));
            self.script(death, store.clone(), |store, verb, fault| store.next(verb, fault), FaultyStore::fired);
            return Ok(Idempotency::transactional(store, settings));
        }
        let store: Arc<dyn DurableStore> = match self.setting {
            Setting::AtLeastOnceInMemory | Setting::AtMostOnceInMemory => Arc::clone(&self.memory) as _,
            _ => Arc::new(self.sqlite().await?),
        };
        let store = Arc::new(FaultyStore::new(store));
        self.script(death, store.clone(), |store, verb, fault| store.next(verb, fault), FaultyStore::fired);
        Ok(match self.setting {
            Setting::AtLeastOnceInMemory | Setting::AtLeastOnceOnSqlite => Idempotency::at_least_once(store, settings),
            _ => Idempotency::at_most_once(store, settings),
        })
    }

    /// Makes a verb of the store hang at this death, and watches until it does.
    fn script<S: Send + Sync + 'static>(
        &self,
        death: Option<Death>,
        store: Arc<S>,
        next: impl Fn(&S, Verb, Fault),
        fired: impl Fn(&S) -> u64 + Send + 'static,
    ) {
        let (verb, fault) = match death {
            Some(Death::Before(verb)) => (verb, Fault::Delay(FOR_EVER)),
            Some(Death::After(verb)) => (verb, Fault::LostAnswer),
            _ => return,
        };
        next(&store, verb, fault);
        let is_there = Arc::clone(&self.is_there);
        tokio::spawn(async move {
            while fired(&store) == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            is_there.store(true, Ordering::SeqCst);
        });
    }

    async fn sqlite(&self) -> Checked<SqliteStore> {
        let url = format!("sqlite://{}", self.folder.path().join("records.db").display());
        let store = SqliteStore::open(SqliteConfig::new(url).dangerous_synchronous_normal().clock(self.clock.clone()));
        let store = store.await?;
        sqlx::raw_sql("CREATE TABLE IF NOT EXISTS effects (id INTEGER PRIMARY KEY)").execute(store.pool()).await?;
        Ok(store)
    }

    /// How often the handler had an effect that was kept.
    async fn effects(&self) -> Checked<u32> {
        if self.setting != Setting::TransactionalOnSqlite {
            return Ok(self.effects.load(Ordering::SeqCst));
        }
        let store = self.sqlite().await?;
        Ok(sqlx::query_scalar("SELECT count(*) FROM effects").fetch_one(store.pool()).await?)
    }

    async fn run(&self, engine: &Idempotency, death: Option<Death>) -> Told {
        let (setting, effects, is_there) = (self.setting, Arc::clone(&self.effects), Arc::clone(&self.is_there));
        let die_at = move |here: Death| {
            let is_there = Arc::clone(&is_there);
            async move {
                if death == Some(here) {
                    is_there.store(true, Ordering::SeqCst);
                    std::future::pending::<()>().await;
                }
            }
        };
        let handler = async move |context: Context| {
            die_at(Death::BeforeTheEffect).await;
            effects.fetch_add(1, Ordering::SeqCst);
            let written = match setting {
                Setting::TransactionalOnSqlite => write(&context).await,
                Setting::AtLeastOnceInMemory | Setting::AtLeastOnceOnSqlite => {
                    context.checkpoint("charged", "ch_1").await.map_err(Into::into)
                }
                _ => Ok(()),
            };
            die_at(Death::AfterTheEffect).await;
            match written {
                Ok(()) => concluded(context.attempt()),
                Err(_) => failed(),
            }
        };
        let Ok(key) = "k".parse() else { return Err(ExecuteError::Interrupted) };
        let operation = Operation::new(Scope::new("acme", "pay"), key, Fingerprint::of_bytes("pay", b"12.50 EUR"));
        engine.execute(operation, handler, failed).await
    }
}

async fn write(context: &Context) -> Checked {
    let mut transaction = context.transaction::<SqliteTransaction>()?;
    sqlx::raw_sql("INSERT INTO effects DEFAULT VALUES").execute(&mut **transaction).await?;
    Ok(())
}

fn concluded(attempt: u32) -> Conclusion<u32> {
    let disposition = Disposition::Complete { response: response(), writes: Writes::Keep };
    Conclusion { value: attempt, disposition, retention: None }
}

fn failed() -> Conclusion<u32> {
    Conclusion { value: 0, disposition: Disposition::Release { writes: Writes::Discard }, retention: None }
}

fn is_answer(replay: &Replay) -> bool {
    replay.kind == ReplayKind::Completed && replay.response == response()
}

/// Whether the third answer replays the second.
fn is_the_same(second: &Told, third: &Told) -> bool {
    match (second, third) {
        (Ok(Answer::Ran { .. }), Ok(Answer::Replay(replay))) => is_answer(replay),
        (Ok(Answer::Replay(second)), Ok(Answer::Replay(third))) => second == third,
        _ => false,
    }
}
