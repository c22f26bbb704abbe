//! Schemas for tests in the Postgres server that they share.

use std::sync::{Mutex, MutexGuard, PoisonError};

use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions as _};

/// A schema that only one test uses. It is dropped with this value, unless the test fails.
#[derive(Debug)]
pub struct Schema {
    /// It begins with `test_` unless it was [named](Self::named).
    pub name: String,
    reuse: Option<&'static str>,
}

/// The reusable schemas of this process.
struct Reused {
    in_use: usize,
    /// Free schemas with their kinds.
    free: Vec<(&'static str, String)>,
}

static REUSED: Mutex<Reused> = Mutex::new(Reused { in_use: 0, free: Vec::new() });

fn reused() -> MutexGuard<'static, Reused> {
    // Nothing panics while it is held.
    REUSED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Schema {
    /// A schema that does not exist yet.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "each is another one")]
    pub fn new() -> Self {
        Self::named(fresh_name())
    }

    /// A schema of this name.
    #[must_use]
    pub fn named(name: String) -> Self {
        Self { name, reuse: None }
    }

    /// A schema that an earlier test of the same kind may have used, without its records. Making the tables and functions takes
    /// longer than most tests.
    ///
    /// Free schemas are dropped once no test uses one.
    #[must_use]
    pub fn of_kind(kind: &'static str) -> Self {
        let mut reused = reused();
        reused.in_use += 1;
        let free = reused.free.iter().position(|(of, _)| *of == kind);
        let name = free.map_or_else(fresh_name, |place| reused.free.swap_remove(place).1);
        Self { name, reuse: Some(kind) }
    }
}

fn fresh_name() -> String {
    format!("test_{}", uuid::Uuid::new_v4().simple())
}

impl Drop for Schema {
    fn drop(&mut self) {
        let has_failed = std::thread::panicking();
        let Some(kind) = self.reuse else {
            if !has_failed {
                remove(&[&self.name]);
            }
            return;
        };
        let delete = format!("SET lock_timeout = '2s'; DELETE FROM \"{}\".idem_records", self.name);
        let is_empty = !has_failed && run(delete);
        let mut reused = reused();
        reused.in_use -= 1;
        if is_empty {
            reused.free.push((kind, self.name.clone()));
        }
        let over = if reused.in_use == 0 { std::mem::take(&mut reused.free) } else { Vec::new() };
        drop(reused);
        let names = over.iter().map(|(_, name)| name.as_str());
        remove(&names.chain((!is_empty && !has_failed).then_some(self.name.as_str())).collect::<Vec<_>>());
    }
}

/// Drops schemas. A failure to do so does not fail the test.
fn remove(names: &[&str]) {
    for name in names {
        run(format!("SET lock_timeout = '2s'; DROP SCHEMA IF EXISTS \"{name}\" CASCADE"));
    }
}

/// Runs statements, and returns whether they succeeded. It uses a separate thread, because a test may drop its schema inside a
/// runtime.
fn run(statements: String) -> bool {
    let work = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
        let options: PgConnectOptions = idem_servers::postgres_url().parse().ok()?;
        runtime.block_on(async {
            let mut connection = options.disable_statement_logging().connect().await.ok()?;
            sqlx::raw_sql(AssertSqlSafe(statements)).execute(&mut connection).await.ok()
        })
    });
    work.join().is_ok_and(|done| done.is_some())
}
