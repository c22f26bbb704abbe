//! The conditions that must hold at the end.

use std::collections::HashMap;
use std::time::Duration;

use idem_core::engine::Contract;
use idem_core::{ReplayKind, StoredBody};
use serde_json::json;
use sqlx::Row;
use tokio::time::{Instant, sleep};

use super::ledger::{Book, End};
use super::process::SESSIONS;
use super::saboteur::Sabotage;
use super::{LEASE, MARGIN, Options, World};
use crate::Error;
use crate::database::Database;
use crate::report::{Report, rounded};

/// How soon after the last request transactions and locks must be gone.
const QUIET: Duration = Duration::from_secs(5);

/// The rows that each operation wrote: attempt and nonce.
type Rows = HashMap<String, Vec<(i64, String)>>;

pub(super) async fn judge(
    report: &mut Report,
    database: &mut Database,
    world: &World,
    options: &Options,
    worked: Duration,
    sabotage: &Sabotage,
) -> Result<(), Error> {
    report.note("contract", format!("{:?}", world.contract));
    quiet(report, database).await?;
    let rows = rows(database).await?;
    let book = world.ledger.book();
    let operations = book.counts.get("operations").copied().unwrap_or_default();
    report.fact("keys", book.ends.len());
    report.fact("answers", json!(book.counts));
    report.fact("errors", json!(book.errors));
    report.fact("told_by_the_engines", json!(world.processes.told()));
    report.fact("terminations_by_state", json!(sabotage.terminations));
    report.fact("deaths", sabotage.deaths);
    report.fact("operations_per_second", rounded(operations as f64 / worked.as_secs_f64(), 0));
    report.fact("slowest_answer_seconds", rounded(book.slowest.as_secs_f64(), 2));
    sabotaged(report, options, sabotage);
    let limit = LEASE + MARGIN;
    let (slowest, key) = (book.slowest, book.slowest_key);
    report.expect(slowest <= limit, format!("key {key} got its answer after {slowest:?}, later than {limit:?}"));
    let without = book.ends.iter().filter(|end| end.is_none()).count();
    report.expect(without == 0, format!("{without} keys never got a definite answer"));
    let differing = book.differing.len();
    report.expect(
        differing == 0,
        format!("{differing} answers differ from the first, as for {:?}", book.differing.first()),
    );
    businesslike(report, world, &book, &rows);
    Ok(())
}

/// Checks that there was enough sabotage for the run to count.
fn sabotaged(report: &mut Report, options: &Options, sabotage: &Sabotage) {
    let all: u64 = sabotage.terminations.values().sum();
    let idle = sabotage.terminations.get("idle").copied().unwrap_or_default();
    report.fact("terminations", all);
    let (enough, enough_busy) = (options.seconds * 3, options.seconds);
    report.expect(all >= enough, format!("only {all} sessions were terminated, fewer than {enough}"));
    report.expect(all - idle >= enough_busy, format!("only {} of them did something at the time", all - idle));
}

/// Checks that every key has the rows that its contract and its answer demand.
fn businesslike(report: &mut Report, world: &World, book: &Book, rows: &Rows) {
    let (mut wrong, mut kinds, mut more) = (Vec::new(), [0_u64; 3], 0_u64);
    for (number, end) in book.ends.iter().enumerate() {
        let Some(end) = end else { continue };
        kinds[match end.kind {
            ReplayKind::Completed => 0,
            ReplayKind::Failed => 1,
            ReplayKind::OutcomeUnknown => 2,
        }] += 1;
        let written = rows.get(&format!("{}-{number}", world.name)).map_or(&[][..], Vec::as_slice);
        more += u64::from(written.len() > 1);
        if let Some(problem) = problem(world.contract, end, written) {
            wrong.push(format!("key {number}: {problem}"));
        }
    }
    report.fact("keys_by_answer", json!({"completed": kinds[0], "failed": kinds[1], "outcome_unknown": kinds[2]}));
    report.fact("keys_with_several_rows", more);
    report.expect(kinds[0] > 0, "no operation was completed");
    report.expect(
        wrong.is_empty(),
        format!("{} keys are wrong: {:?}", wrong.len(), wrong.iter().take(5).collect::<Vec<_>>()),
    );
}

fn problem(contract: Contract, end: &End, rows: &[(i64, String)]) -> Option<String> {
    let completed = end.kind == ReplayKind::Completed;
    let body: &[u8] = match &end.response.body {
        StoredBody::Retained(body) => body,
        StoredBody::NotRetained => return Some("its answer was not kept".into()),
    };
    let answered = rows.iter().filter(|(_, nonce)| body.starts_with(nonce.as_bytes())).count();
    if completed && answered != 1 {
        return Some(format!("{answered} rows are of the run that it answers with, of {} in all", rows.len()));
    }
    match contract {
        Contract::Transactional if !completed => Some(format!("it ended as {:?}", end.kind)),
        Contract::Transactional if rows.len() != 1 => Some(format!("it has {} rows", rows.len())),
        Contract::AtMostOnce if rows.len() > 1 => Some(format!("it has {} rows", rows.len())),
        Contract::AtLeastOnce if !completed => Some(format!("it ended as {:?}", end.kind)),
        Contract::AtLeastOnce => {
            let mut attempts: Vec<i64> = rows.iter().map(|(attempt, _)| *attempt).collect();
            attempts.sort_unstable();
            attempts.windows(2).any(|two| two[0] == two[1]).then(|| format!("it has the attempts {attempts:?}"))
        }
        _ => None,
    }
}

async fn rows(database: &mut Database) -> Result<Rows, Error> {
    let mut rows = Rows::new();
    for row in database.rows("SELECT key, attempt, nonce FROM business").await? {
        rows.entry(row.try_get(0)?).or_default().push((row.try_get(1)?, row.try_get(2)?));
    }
    Ok(rows)
}

/// Checks that no transaction and no lock is left.
async fn quiet(report: &mut Report, database: &mut Database) -> Result<(), Error> {
    let open = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name IN ('{}') AND state LIKE 'idle in transaction%'",
        SESSIONS.join("', '")
    );
    let locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'";
    let give_up_at = Instant::now() + QUIET;
    let (open, locks) = loop {
        let left = (database.number(&open).await?, database.number(locks).await?);
        if left == (0, 0) || Instant::now() > give_up_at {
            break left;
        }
        sleep(Duration::from_millis(100)).await;
    };
    report.fact("sessions_left_idle_in_transaction", open);
    report.fact("advisory_locks_left", locks);
    report.expect(open == 0, format!("{open} sessions are idle in a transaction"));
    report.expect(locks == 0, format!("{locks} advisory locks are held"));
    Ok(())
}
