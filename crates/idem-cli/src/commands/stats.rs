//! `idem stats`.

use std::error::Error;

use clap::Args;
use idem_core::{RecordCounts, Timestamp};
use serde_json::{Value, json};

use crate::Ended;
use crate::commands::scan::Parts;
use crate::output::{Progress, say, say_json};
use crate::store::Store;

/// No options yet.
#[derive(Debug, Args)]
pub(crate) struct Options {}

/// Counts all records, and says when, by the store's clock.
pub(crate) async fn counted(store: &dyn Store) -> Result<(RecordCounts, Timestamp), Box<dyn Error>> {
    let (mut counts, mut from, mut part) = (RecordCounts::default(), None, Parts::new());
    let progress = Progress::start("counting records");
    let now = loop {
        let page = match store.count(from.as_ref(), part.get()).await {
            Ok(page) => page,
            Err(error) => {
                part.failed(error)?;
                continue;
            }
        };
        part.succeeded();
        counts.merge(&page.counts);
        progress.show(counts.scanned(), page.progress);
        match page.next {
            Some(next) => from = Some(next),
            None => break page.now,
        }
    };
    progress.end();
    Ok((counts, now))
}

/// The counts as JSON.
pub(crate) fn counts_json(counts: &RecordCounts) -> Value {
    let RecordCounts { in_progress, abandoned, completed, failed, outcome_unknown, retryable, .. } = counts;
    json!({
        "in_progress": in_progress, "abandoned": abandoned, "completed": completed, "failed": failed,
        "outcome_unknown": outcome_unknown, "retryable": retryable, "expired": counts.expired,
        "unreadable": counts.unreadable, "body_bytes": counts.body_bytes,
        "oldest_in_progress": counts.oldest_in_progress.map(|time| time.to_string()),
        "oldest_expired": counts.oldest_expired.map(|time| time.to_string()),
        "made_last_hour": counts.made_last_hour, "unsuccessful_last_hour": counts.unsuccessful_last_hour,
    })
}

pub(crate) async fn run(store: &dyn Store, _: &Options, json: bool) -> Result<Ended, Box<dyn Error>> {
    let (counts, now) = counted(store).await?;
    let RecordCounts { in_progress, abandoned, completed, failed, outcome_unknown, retryable, .. } = counts;
    if json {
        say_json(&counts_json(&counts));
        return Ok(Ended::Done);
    }
    let rows = [
        ("in progress", in_progress, "under a live lease"),
        ("abandoned", abandoned, "in progress, and the lease is over"),
        ("completed", completed, ""),
        ("failed", failed, "never to run again"),
        ("outcome unknown", outcome_unknown, "see `idem list --state outcome-unknown`"),
        ("retryable", retryable, "failed, and to run again"),
        ("expired", counts.expired, "not purged yet"),
        ("unreadable", counts.unreadable, "perhaps written by a newer version"),
    ];
    for (name, count, meaning) in rows {
        say(format!("{name:<18}{count:>12}  {meaning}").trim_end());
    }
    say(&format!("{:<18}{:>12}", "bytes of bodies", counts.body_bytes));
    let (made, unsuccessful) = (counts.made_last_hour, counts.unsuccessful_last_hour);
    say(&format!("{:<18}{made:>12}  {unsuccessful} of them without success so far", "made in an hour"));
    if let Some(oldest) = counts.oldest_in_progress {
        say(&format!("the oldest record in progress was made {} ago", now.age_since(oldest)));
    }
    if let Some(oldest) = counts.oldest_expired {
        say(&format!("the oldest expired record has waited {} for the purge", now.age_since(oldest)));
    }
    Ok(Ended::Done)
}
