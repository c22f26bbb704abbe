//! `cargo xtask bench limits`: the upper bounds of the other figures.
//!
//! Contestants do only a part of what this project does, such as the record, a script, or a call. They use the programs and
//! the servers of the goals. A goal beyond such a bound is out of reach while that part stays as it is.

use std::sync::Arc;
use std::time::Duration;

use idem_postgres::{PostgresConfig, PostgresStore};
use idem_servers::Postgres;

use crate::contest::{Contestant, Sample, hold, p50, per_second, say};
use crate::error::Error;
use crate::http::serve::Stack;
use crate::outside::pgbench;
use crate::pace::Pace;
use crate::records::Maker;
use crate::report::Report;
use crate::{growth, http, servers, store};

/// By how much handlers over HTTP are slower.
const BUSY: [(&str, Duration); 4] = [
    ("1 µs more", Duration::from_micros(1)),
    ("2 µs more", Duration::from_micros(2)),
    ("4 µs more", Duration::from_micros(4)),
    ("6 µs more", Duration::from_micros(6)),
];

pub(crate) async fn run(pace: Pace, report: &mut Report) -> Result<(), Error> {
    let server = servers::postgres()?;
    postgres(&server, pace, report).await?;
    drop(server);
    store::redis_limits(pace, report).await?;
    store::sqlite_limits(pace, report).await?;
    let handlers = http::busy_handlers(&BUSY, pace).await?;
    for (name, _) in BUSY {
        say(&handlers, name, Stack::Bare.name(), ("rate", per_second));
    }
    report.add(handlers);
    growth::selects(pace, report).await
}

async fn postgres(server: &Postgres, pace: Pace, report: &mut Report) -> Result<(), Error> {
    let mut connection = servers::connect(server).await?;
    servers::run(&mut connection, include_str!("../sql/schema.sql")).await?;
    let store = PostgresStore::open(PostgresConfig::new(server.url())).await?;
    servers::run(&mut connection, include_str!("../sql/limits.sql")).await?;
    // As many as the script of replays asks for.
    Maker::new(Arc::new(store)).fill(10_000).await?;
    servers::run(&mut connection, "VACUUM ANALYZE;\nCHECKPOINT").await?;
    let port = server.port();
    let by =
        |name, script: &'static str, clients| Contestant::new(name, move |_| pgbench(port, script, clients, pace.turn));
    let batches = |script: &'static str, rows: f64| {
        Contestant::new("the record alone", move |_| async move {
            let sample = pgbench(port, script, 2, pace.turn).await?;
            Ok(Sample { per_second: sample.per_second * rows, ..Default::default() })
        })
    };
    let contests = [
        (
            "Postgres, at most: cycles, 64 clients",
            vec![by("by hand", "two_statements.sql", 64), batches("same_record_32.sql", 32.0)],
        ),
        (
            "Postgres, at most: cycles, 256 clients",
            vec![by("by hand", "two_statements.sql", 256), batches("same_record_64.sql", 64.0)],
        ),
        (
            "Postgres, at most: cycles, 1 client",
            vec![by("by hand", "two_statements.sql", 1), by("the record alone", "same_record.sql", 1)],
        ),
        (
            "Postgres, at most: transactions, 64 clients",
            vec![
                by("by hand", "six_round_trips.sql", 64),
                by("the record alone", "same_transaction.sql", 64),
                by("bare write", "bare_transaction.sql", 64),
            ],
        ),
        (
            "Postgres, at most: replays, 1 client",
            vec![by("by hand", "replay.sql", 1), by("the lookup alone", "same_replay.sql", 1)],
        ),
    ];
    for (name, contestants) in contests {
        let outcome = hold(name, pace.rounds, contestants).await?;
        for limit in ["the record alone", "the lookup alone"] {
            say(&outcome, limit, "by hand", ("rate", per_second));
            say(&outcome, limit, "bare write", ("rate", per_second));
            say(&outcome, limit, "by hand", ("p50", p50));
        }
        report.add(outcome);
    }
    Ok(())
}
