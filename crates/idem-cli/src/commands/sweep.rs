//! `idem sweep`.

use std::error::Error;
use std::ops::ControlFlow;
use std::time::Duration;

use clap::Args;
use idem_core::{OwnerToken, RecordFilter, Resolution, Resolve, ResolveOutcome, Takeover, repair};
use serde_json::json;

use crate::Ended;
use crate::commands::scan::scan;
use crate::output::{say, say_json};
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
    let (mut found, mut swept, mut left) = (0_u64, 0_u64, 0_u64);
    let scanned = scan(store, &filter, async |_, page| {
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
            let outcome = repair(store, &request, "idem sweep", "its lease is over").await.inspect_err(|_| {
                eprintln!("{swept} were marked as unknown before the error; another sweep goes on from there");
            })?;
            swept += u64::from(outcome == ResolveOutcome::Resolved);
        }
        Ok(ControlFlow::Continue(()))
    })
    .await?;
    if json {
        let unreadable = scanned.unreadable;
        say_json(
            &json!({ "abandoned_at_most_once": found, "swept": swept, "left_to_their_next_caller": left, "unreadable": unreadable }),
        );
    } else {
        say(&format!("{found} abandoned under AtMostOnce, {swept} of them marked as unknown"));
        say(&format!("{left} abandoned under other contracts, left to their next caller"));
        scanned.report_unreadable();
    }
    // A record that changed meanwhile was not swept, and one that cannot be read may be abandoned.
    let is_whole = scanned.unreadable == 0 && (options.dry_run || swept == found);
    Ok(if is_whole { Ended::Done } else { Ended::Unchanged })
}
