//! The server under test, and a client that sends exact bytes.

mod gates;
mod postgres;
mod redis;
mod server;

pub(crate) use gates::{Gate, Gates, Orphan};
pub(crate) use idem_http_suite::{Answer, Contract, Request, eventually};
pub(crate) use postgres::{Schemas, Sql};
pub(crate) use server::{Backend, Framework, OPERATOR, Server, Setup, refusal};

/// Makes a test of each function for each framework and backend, such as `actix_on_postgres::two_payments_are_two`.
macro_rules! on_every_backend {
    ($($test:ident,)+) => {
        $crate::support::on_every_backend!(@ axum_on_sqlite Axum Sqlite: $($test,)+);
        $crate::support::on_every_backend!(@ axum_on_postgres Axum Postgres: $($test,)+);
        $crate::support::on_every_backend!(@ axum_on_pgbouncer Axum PgBouncer: $($test,)+);
        $crate::support::on_every_backend!(@ axum_on_redis Axum Redis: $($test,)+);
        $crate::support::on_every_backend!(@ axum_on_hybrid Axum Hybrid: $($test,)+);
        $crate::support::on_every_backend!(@ actix_on_sqlite Actix Sqlite: $($test,)+);
        $crate::support::on_every_backend!(@ actix_on_postgres Actix Postgres: $($test,)+);
        $crate::support::on_every_backend!(@ actix_on_pgbouncer Actix PgBouncer: $($test,)+);
        $crate::support::on_every_backend!(@ actix_on_redis Actix Redis: $($test,)+);
        $crate::support::on_every_backend!(@ actix_on_hybrid Actix Hybrid: $($test,)+);
    };
    (@ $module:ident $framework:ident $backend:ident: $($test:ident,)+) => {
        mod $module {
            $(
                #[test]
                fn $test() {
                    use $crate::support::{Backend, Framework, Setup};
                    super::$test(Setup { framework: Framework::$framework, backend: Backend::$backend });
                }
            )+
        }
    };
}
pub(crate) use on_every_backend;

/// The same, for stores that also hold the payments, in modules such as `transactional_actix_on_sqlite`.
macro_rules! on_every_database {
    ($($test:ident,)+) => {
        $crate::support::on_every_backend!(@ transactional_axum_on_sqlite Axum Sqlite: $($test,)+);
        $crate::support::on_every_backend!(@ transactional_axum_on_postgres Axum Postgres: $($test,)+);
        $crate::support::on_every_backend!(@ transactional_axum_on_pgbouncer Axum PgBouncer: $($test,)+);
        $crate::support::on_every_backend!(@ transactional_axum_on_hybrid Axum Hybrid: $($test,)+);
        $crate::support::on_every_backend!(@ transactional_actix_on_sqlite Actix Sqlite: $($test,)+);
        $crate::support::on_every_backend!(@ transactional_actix_on_postgres Actix Postgres: $($test,)+);
        $crate::support::on_every_backend!(@ transactional_actix_on_pgbouncer Actix PgBouncer: $($test,)+);
        $crate::support::on_every_backend!(@ transactional_actix_on_hybrid Actix Hybrid: $($test,)+);
    };
}
pub(crate) use on_every_database;

/// Makes a test of each function for each framework, on SQLite.
macro_rules! on_every_framework {
    ($($test:ident,)+) => {
        $crate::support::on_every_backend!(@ axum Axum Sqlite: $($test,)+);
        $crate::support::on_every_backend!(@ actix Actix Sqlite: $($test,)+);
    };
}
pub(crate) use on_every_framework;
