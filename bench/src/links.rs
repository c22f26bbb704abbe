//! Links with a delay, as between machines: what one client waits for, by the store and by hand. Without a delay, the number
//! of round trips does not show.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crate::contest::{Outcome, p50};
use crate::delay::link;
use crate::error::Error;
use crate::judged::Goal;
use crate::pace::Pace;
use crate::report::Report;
use crate::servers;
use crate::store::{PostgresContestants, replays};

/// Round trips within a datacenter, and between two that are near.
const ROUND_TRIPS: [(&str, Duration); 2] = [("0.5 ms", Duration::from_micros(500)), ("2 ms", Duration::from_millis(2))];

pub(crate) async fn run(pace: Pace, report: &mut Report) -> Result<(), Error> {
    let server = servers::postgres()?;
    let mut connection = servers::connect(&server).await?;
    servers::run(&mut connection, include_str!("../sql/schema.sql")).await?;
    let numbers = Arc::new(AtomicU64::new(replays(pace)));
    PostgresContestants::open(server.port(), pace, Arc::clone(&numbers)).await?.fill().await?;
    for (name, round_trip) in ROUND_TRIPS {
        let port = link(server.port(), round_trip)?;
        let contestants = PostgresContestants::open(port, pace, Arc::clone(&numbers)).await?;
        let how = format!(", over {name}");
        let transactions = contestants.transactions(1, &how).await?;
        judge(report, "transactional request", name, 0.6, &transactions);
        let cycles = contestants.cycles(1, &how).await?;
        judge(report, "leased cycle", name, 1.15, &cycles);
        let replays = contestants.replays(1, &how).await?;
        judge(report, "replay", name, 1.15, &replays);
        for outcome in [transactions, cycles, replays] {
            report.add(outcome);
        }
    }
    Ok(())
}

fn judge(report: &mut Report, what: &str, link: &str, most: f64, outcome: &Outcome) {
    let what = format!("Postgres over {link}, 1 client: p50 of a {what} against by hand");
    report.judge(&what, Goal::AtMost(most), outcome.ratio("idem", "by hand", p50));
}
