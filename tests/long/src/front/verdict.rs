//! The conditions that must hold at the end.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use serde_json::json;
use sqlx::Row;

use super::ledger::Failure;
use super::saboteur::Sabotage;
use super::service::Cache;
use super::{Options, Part, World};
use crate::Error;
use crate::database::Database;
use crate::report::{Report, percentile, rounded};

/// How long after its return Postgres may still be reported missing: services reconnect, and requests that waited for a
/// connection run into their timeouts.
const AFTERWARDS: Duration = Duration::from_secs(4);

/// The percentage of replays, and of duplicates, that Postgres may still answer.
const REPLAYS_LEFT: f64 = 1.0;
const DUPLICATES_LEFT: f64 = 5.0;

/// The percentage of requests that must be answered correctly while Redis fails.
const AVAILABLE: f64 = 99.9;

/// Reports which store answered in the calm part.
pub(super) fn spared(report: &mut Report, before: &Cache, after: &Cache) {
    report.fact("redis_was_given_up", after.failures - before.failures);
    report.fact("breakers_opened", after.opened - before.opened);
    let percent = |fast: u64, durable: u64| rounded(100.0 * durable as f64 / (fast + durable).max(1) as f64, 2);
    let replays = (after.fast_replays - before.fast_replays, after.durable_replays - before.durable_replays);
    let duplicates =
        (after.fast_in_progress - before.fast_in_progress, after.durable_in_progress - before.durable_in_progress);
    for (what, (fast, durable), most) in
        [("replays", replays, REPLAYS_LEFT), ("concurrent duplicates", duplicates, DUPLICATES_LEFT)]
    {
        let share = percent(fast, durable);
        println!("  {what}: {fast} answered by Redis, {durable} by Postgres, which is {share} %");
        report.note(&what.replace(' ', "_"), json!({ "redis": fast, "postgres": durable, "percent": share }));
        report.expect(fast > 500, format!("{fast} {what} are too few to say anything"));
        report.expect(share <= most, format!("{share} % of the {what} reached Postgres, more than {most} %"));
    }
}

pub(super) async fn judge(
    report: &mut Report,
    database: &mut Database,
    world: &World,
    options: &Options,
    part: Part,
    sabotage: &Sabotage,
) -> Result<(), Error> {
    let cache = world.cache().await?;
    let effects = effects(database).await?;
    let mut book = std::mem::take(&mut *world.ledger.book());
    let keys = book.ends.len() as u64;
    report.fact("keys", keys);
    report.fact("answers", json!(book.answers));
    for (what, took) in &mut book.took {
        took.sort_by(f64::total_cmp);
        let of = |share| rounded(percentile(took, share), 1);
        report.fact(&format!("{what}_ms"), json!({ "p50": of(0.5), "p99": of(0.99), "max": of(1.0) }));
    }
    report.expect(keys >= options.keys.get(), format!("{keys} keys are too few"));
    let faults: u64 = sabotage.faults.values().sum();
    if part != Part::Calm {
        report.fact("faults_of_redis", json!(sabotage.faults));
        report.fact("entries_overwritten", sabotage.garbled);
        report.fact("entries_found_unreadable", cache.unreadable);
        report.fact("redis_was_given_up", cache.failures);
        report.fact("breakers_opened", cache.opened);
        report.expect(faults >= options.faults, format!("{faults} faults are too few"));
        report.expect(cache.unreadable > 0 && cache.opened > 0, "the faults were not noticed");
    }
    available(report, part, &book.failures, book.answers.values().sum(), sabotage);
    let without = book.ends.iter().filter(|end| end.is_none()).count();
    report.expect(without == 0, format!("{without} keys have no answer"));
    let differing = (book.differing.len(), book.differing.first());
    report.expect(differing.0 == 0, format!("{} answers differ, or ran again, as for {:?}", differing.0, differing.1));
    let wrong: Vec<_> = (0..keys).filter(|key| effects.get(&key.to_string()) != Some(&1)).collect();
    report.fact("keys_with_exactly_one_payment", keys - wrong.len() as u64);
    report.expect(wrong.is_empty(), format!("{} keys have none or several payments: {:?}", wrong.len(), wrong.first()));
    report.expect(effects.len() as u64 == keys, format!("{} recipients for {keys} keys", effects.len()));
    Ok(())
}

/// Checks the requests without a correct answer.
fn available(report: &mut Report, part: Part, failures: &[Failure], correct: u64, sabotage: &Sabotage) {
    let mut kinds = BTreeMap::<&str, u64>::new();
    for failure in failures {
        *kinds.entry(&failure.what).or_default() += 1;
    }
    report.fact("answers_that_were_not_correct", json!(kinds));
    let share = 100.0 * correct as f64 / (correct + failures.len() as u64).max(1) as f64;
    report.fact("answered_correctly_percent", rounded(share, 3));
    match part {
        Part::Calm => report.expect(failures.is_empty(), "there were failures without faults"),
        Part::RedisFails => report.expect(share >= AVAILABLE, format!("{share:.3} % is less than {AVAILABLE} %")),
        Part::BothFail => {
            let away: Duration = sabotage.away.iter().map(|(from, until)| *until - *from).sum();
            report.fact("restarts_of_postgres", sabotage.away.len());
            report.fact("seconds_without_postgres", rounded(away.as_secs_f64(), 1));
            let is_excused = |failure: &&Failure| {
                let overlaps = |(from, until): &(Duration, Duration)| {
                    failure.began <= *until + AFTERWARDS && failure.ended >= *from
                };
                failure.what == "503" && sabotage.away.iter().any(overlaps)
            };
            let excused = failures.iter().filter(is_excused).count();
            let others = failures.len() - excused;
            report.expect(others == 0, format!("{others} failures are no 503 or came while Postgres was there"));
            let latest = failures.iter().filter_map(|failure| {
                let ends = sabotage.away.iter().map(|(_, until)| *until).filter(|until| *until <= failure.began);
                ends.max().map(|until| failure.began - until)
            });
            let latest = latest.max().unwrap_or_default();
            report.fact("last_503_after_its_return_seconds", rounded(latest.as_secs_f64(), 2));
        }
    }
}

/// The number of payments of each recipient.
async fn effects(database: &mut Database) -> Result<HashMap<String, i64>, Error> {
    let sql = "SELECT recipient, count(*) FROM payments.payments AS payment
               JOIN payments.ledger AS ledger ON ledger.payment = payment.id GROUP BY recipient";
    let rows = database.rows(sql).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}
