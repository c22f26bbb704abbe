//! One client, one verb after another, on the stores that need no server.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use idem_core::{IdempotencyStore, MemoryStore};
use idem_sqlite::{SqliteConfig, SqliteStore};
use tempfile::TempDir;
use tokio::runtime::Runtime;

#[path = "../src/records.rs"]
#[allow(dead_code, reason = "contests use the rest")]
mod records;

use records::Maker;

#[path = "../src/error.rs"]
mod error;

use error::Error;

/// Stands for the module of this name in the contests, which `records` uses.
mod drive {
    pub(crate) type Work = std::pin::Pin<Box<dyn Future<Output = Result<(), crate::Error>> + Send>>;
}

const STORES: [&str; 2] = ["memory", "sqlite"];

fn main() {
    divan::main();
}

struct World {
    runtime: Runtime,
    maker: Arc<Maker>,
    numbers: AtomicU64,
    _folder: TempDir,
}

impl World {
    fn new(name: &str) -> Result<Self, Error> {
        let (runtime, folder) = (Runtime::new()?, TempDir::new()?);
        let store: Arc<dyn IdempotencyStore> = match name {
            "memory" => Arc::new(MemoryStore::new(NonZeroUsize::MAX)),
            _ => {
                let url = format!("sqlite://{}", folder.path().join("records.db").display());
                Arc::new(runtime.block_on(SqliteStore::open(SqliteConfig::new(url)))?)
            }
        };
        Ok(Self { runtime, maker: Maker::new(store), numbers: AtomicU64::new(1), _folder: folder })
    }

    fn of(name: &str) -> Self {
        Self::new(name).unwrap_or_else(|error| panic!("the store could not be opened: {error}"))
    }
}

#[divan::bench(args = STORES)]
fn cycle(bencher: divan::Bencher<'_, '_>, name: &str) {
    let world = World::of(name);
    bencher.bench_local(|| {
        let number = world.numbers.fetch_add(1, Ordering::Relaxed);
        world.runtime.block_on(world.maker.cycle(number))
    });
}

#[divan::bench(args = STORES)]
fn replay(bencher: divan::Bencher<'_, '_>, name: &str) {
    let world = World::of(name);
    let made = world.runtime.block_on(world.maker.cycle(0));
    made.unwrap_or_else(|error| panic!("there is no record to replay: {error}"));
    bencher.bench_local(|| world.runtime.block_on(world.maker.replay(0)));
}
