//! `idem watch`.

use std::error::Error;
use std::io::IsTerminal as _;
use std::time::Duration;

use clap::Args;
use idem_core::{RecordCounts, Timestamp};

use crate::Ended;
use crate::commands::stats::{counted, counts_json};
use crate::output::{say, say_json};
use crate::store::Store;

/// How often.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The pause between two counts. Each reads all records.
    #[arg(long, default_value = "10s", value_name = "TIME", value_parser = humantime::parse_duration)]
    every: Duration,
}

/// A shorter pause would keep the store busy with counts.
const SHORTEST: Duration = Duration::from_secs(1);

pub(crate) async fn run(store: &dyn Store, options: &Options, json: bool) -> Result<Ended, Box<dyn Error>> {
    let watching = async {
        let mut before = None;
        loop {
            let (counts, now) = counted(store).await?;
            match json {
                true => say_json(&counts_json(&counts)),
                false => show(&counts, before.as_ref(), now),
            }
            before = Some(counts);
            tokio::time::sleep(options.every.max(SHORTEST)).await;
        }
    };
    tokio::select! {
        ended = watching => ended,
        interrupted = tokio::signal::ctrl_c() => interrupted.map(|()| Ended::Done).map_err(Into::into),
    }
}

fn show(counts: &RecordCounts, before: Option<&RecordCounts>, now: Timestamp) {
    let of = |counts: &RecordCounts| {
        [
            ("in progress", counts.in_progress),
            ("abandoned", counts.abandoned),
            ("completed", counts.completed),
            ("failed", counts.failed),
            ("outcome unknown", counts.outcome_unknown),
            ("retryable", counts.retryable),
            ("expired", counts.expired),
            ("unreadable", counts.unreadable),
        ]
    };
    let previous = of(before.unwrap_or(counts));
    let cell =
        |((name, count), (_, previous)): ((&str, u64), (&str, u64))| match i128::from(count) - i128::from(previous) {
            0 => format!("{name} {count}"),
            change => format!("{name} {count} ({change:+})"),
        };
    let cells: Vec<String> = of(counts).into_iter().zip(previous).map(cell).collect();
    if std::io::stdout().is_terminal() {
        // Clears the screen.
        say(&format!("\u{1b}[2J\u{1b}[H{now}\n{}\nCtrl-C ends it.", cells.join("\n")));
    } else {
        say(&format!("{now}  {}", cells.join("  ")));
    }
}
