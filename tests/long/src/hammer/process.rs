//! Processes: each is a runtime with its own store and engine. When one dies, everything in it stops where it is.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use idem_core::engine::{Contract, Event, EventKind, Idempotency, Observer, Settings};
use idem_postgres::{PostgresConfig, PostgresStore};
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::time::{Instant, sleep};

use super::LEASE;
use crate::Error;
use crate::database::Database;
use crate::records::DAY;

/// The application names of the sessions that are cut.
pub(super) const SESSIONS: [&str; 2] = ["hammer-store", "hammer-business"];

/// One generation of a process.
#[derive(Debug, Clone)]
pub(super) struct Process {
    pub(super) handle: Handle,
    pub(super) idempotency: Idempotency,
    /// The pool for the writes of operations that have no transaction of the store.
    pub(super) business: PgPool,
}

/// The runtime of a process. When it is dropped, everything stops where it is.
#[derive(Debug)]
struct Life(Option<Runtime>);

impl Drop for Life {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(Runtime::shutdown_background);
    }
}

#[derive(Debug)]
struct Slot {
    current: RwLock<Process>,
    life: Mutex<Life>,
}

/// Two processes, and the events of their engines.
#[derive(Debug)]
pub(super) struct Processes {
    slots: [Slot; 2],
    store: PgConnectOptions,
    business: PgConnectOptions,
    contract: Contract,
    told: Arc<Told>,
}

impl Processes {
    pub(super) async fn start(database: &Database, contract: Contract) -> Result<Self, Error> {
        let [store, business] = SESSIONS.map(|name| database.options(name));
        let (store, business, told) = (store?, business?, Arc::new(Told::default()));
        let slot = || async {
            let (life, current) = born(&store, &business, contract, &told).await?;
            Ok::<_, Error>(Slot { current: RwLock::new(current), life: Mutex::new(life) })
        };
        let slots = [slot().await?, slot().await?];
        Ok(Self { slots, store, business, contract, told })
    }

    /// The current process with this number.
    pub(super) fn process(&self, number: u64) -> Process {
        let slot = &self.slots[number as usize % self.slots.len()];
        slot.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends a process abruptly and starts a new one in its place.
    pub(super) async fn die(&self, number: u64) -> Result<(), Error> {
        let slot = &self.slots[number as usize % self.slots.len()];
        *slot.life.lock().unwrap_or_else(PoisonError::into_inner) = Life(None);
        let (life, process) = born(&self.store, &self.business, self.contract, &self.told).await?;
        *slot.current.write().unwrap_or_else(PoisonError::into_inner) = process;
        *slot.life.lock().unwrap_or_else(PoisonError::into_inner) = life;
        Ok(())
    }

    /// The number of events of each kind.
    pub(super) fn told(&self) -> BTreeMap<&'static str, u64> {
        self.told.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

async fn born(
    store: &PgConnectOptions,
    business: &PgConnectOptions,
    contract: Contract,
    told: &Arc<Told>,
) -> Result<(Life, Process), Error> {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let handle = runtime.handle().clone();
    let life = Life(Some(runtime));
    let config = PostgresConfig::from_options(store.clone());
    // A process that starts while its connections are cut retries, as under a supervisor.
    let give_up_at = Instant::now() + Duration::from_secs(20);
    let store = loop {
        match handle.spawn(PostgresStore::open(config.clone())).await? {
            Err(error) if error.is_retryable() && Instant::now() < give_up_at => {
                sleep(Duration::from_millis(20)).await;
            }
            opened => break Arc::new(opened?),
        }
    };
    let settings = Settings::new()
        .lease(LEASE)
        .retention(DAY)
        // The saboteur causes the failures. They pass at once, and there are many.
        .backoff(Duration::from_millis(20), Duration::from_millis(200))
        .max_attempts(1_000_000.try_into()?)
        .observer(Arc::clone(told) as Arc<dyn Observer>);
    let idempotency = match contract {
        Contract::Transactional => Idempotency::transactional(store, settings),
        Contract::AtMostOnce => Idempotency::at_most_once(store, settings),
        Contract::AtLeastOnce => Idempotency::at_least_once(store, settings),
    };
    let business = {
        let _inside = handle.enter();
        PgPoolOptions::new().max_connections(8).connect_lazy_with(business.clone())
    };
    Ok((life, Process { handle, idempotency, business }))
}

/// Counts the events of engines.
#[derive(Default)]
struct Told(Mutex<BTreeMap<&'static str, u64>>);

impl Observer for Told {
    fn observe(&self, event: &Event<'_>) {
        let name = match event.kind {
            EventKind::Acquired(idem_core::Acquisition::Takeover) => "takeovers",
            EventKind::LeaseLost => "leases_lost",
            EventKind::Panicked => "panics",
            EventKind::SettlementDelayed => "settlements_delayed",
            EventKind::SettlementLost => "settlements_lost",
            EventKind::StoreFailed(_) => "store_failures",
            _ => return,
        };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default() += 1;
    }
}

impl fmt::Debug for Told {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Told")
    }
}
