//! The server under test, and a client that sends exactly the bytes it is told to.

mod client;
mod gates;
mod postgres;
mod redis;
mod server;

use std::time::{Duration, Instant};

pub(crate) use client::{Answer, Request};
pub(crate) use gates::{Gate, Gates, Orphan};
pub(crate) use postgres::{Schemas, Sql};
pub(crate) use server::{Backend, Contract, Server, refusal};

/// Far above what anything here takes on a loaded machine, so that running into it is a failure.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Asks again and again until the answer is the one that is awaited; fails after [`PATIENCE`].
pub(crate) fn eventually<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let give_up_at = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < give_up_at, "{what} did not happen within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Makes a test of each function for each backend, such as `on_postgres::two_payments_are_two`.
macro_rules! on_every_backend {
    ($($test:ident,)+) => {
        $crate::support::on_every_backend!(@ on_sqlite Sqlite: $($test,)+);
        $crate::support::on_every_backend!(@ on_postgres Postgres: $($test,)+);
        $crate::support::on_every_backend!(@ on_pgbouncer PgBouncer: $($test,)+);
        $crate::support::on_every_backend!(@ on_redis Redis: $($test,)+);
        $crate::support::on_every_backend!(@ on_hybrid Hybrid: $($test,)+);
    };
    (@ $module:ident $backend:ident: $($test:ident,)+) => {
        mod $module {
            $(
                #[test]
                fn $test() {
                    super::$test($crate::support::Backend::$backend);
                }
            )+
        }
    };
}
pub(crate) use on_every_backend;

/// The same for what only a store has that holds payments as well, in modules such as `transactional_on_postgres`.
macro_rules! on_every_database {
    ($($test:ident,)+) => {
        $crate::support::on_every_backend!(@ transactional_on_sqlite Sqlite: $($test,)+);
        $crate::support::on_every_backend!(@ transactional_on_postgres Postgres: $($test,)+);
        $crate::support::on_every_backend!(@ transactional_on_pgbouncer PgBouncer: $($test,)+);
        $crate::support::on_every_backend!(@ transactional_on_hybrid Hybrid: $($test,)+);
    };
}
pub(crate) use on_every_database;
