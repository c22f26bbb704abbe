//! `idem sweep`.

use std::error::Error;
use std::time::Duration;

use clap::Args;
use idem_core::{OwnerToken, PartSize, RecordFilter, Resolution, Resolve, ResolveOutcome, Takeover, repair};
use serde_json::json;

use crate::Ended;
use crate::output::{Progress, say, say_json};
use crate::store::Store;

/// What to sweep.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// How long the records are kept from now; not for less than before.
    #[arg(long, default_value = "24h", value_name = "TIME", value_parser = humantime::parse_duration)]
    retention: Duration,
    /// Counts them, and changes nothing.
    #[arg(long)]
    dry_run: bool,
}

pub(crate) async fn run(store: &dyn Store, options: &Options, json: bool) -> Result<Ended, Box<dyn Error>> {
    let filter = RecordFilter { abandoned: true, ..RecordFilter::default() };
    let (mut found, mut swept, mut left, mut unreadable, mut scanned, mut from) = (0_u64, 0_u64, 0_u64, 0, 0, None);
    let mut part = PartSize::new();
    let progress = Progress::start("reading records");
    loop {
        let page = match store.list(&filter, from.as_ref(), part.get()).await {
            Ok(page) => page,
            Err(error) => {
                part.shrink(error)?;
                continue;
            }
        };
        scanned += page.scanned;
        unreadable += page.unreadable;
        progress.show(scanned, page.progress);
        for record in page.records {
            // Under other contracts the next caller runs it again, or its probe finds out.
            if record.takeover != Some(Takeover::Unknown) {
                left += 1;
                continue;
            }
            found += 1;
            if options.dry_run {
                continue;
            }
            let request = Resolve {
                id: record.id,
                action: OwnerToken::random(),
                seen: record.version,
                resolution: Resolution::OutcomeUnknown,
                retention: options.retention,
            };
            let outcome = repair(store, &request, "idem sweep", "its lease is over").await?;
            swept += u64::from(outcome == ResolveOutcome::Resolved);
        }
        match page.next {
            Some(next) => from = Some(next),
            None => break,
        }
    }
    progress.end();
    if json {
        say_json(
            &json!({ "abandoned_at_most_once": found, "swept": swept, "left_to_their_next_caller": left, "unreadable": unreadable }),
        );
    } else {
        say(&format!("{found} abandoned under AtMostOnce, {swept} of them marked as unknown"));
        say(&format!("{left} abandoned under other contracts, left to their next caller"));
        if unreadable > 0 {
            eprintln!("{unreadable} records cannot be read, perhaps because a newer version wrote them");
        }
    }
    Ok(Ended::Done)
}
