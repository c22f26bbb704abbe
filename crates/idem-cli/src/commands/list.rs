//! `idem list`.

use std::error::Error;
use std::time::Duration;

use clap::Args;
use idem_core::{PartSize, RecordFilter, StateName};

use crate::Ended;
use crate::output::{Progress, row, say, say_json, summary_json};
use crate::store::Store;

/// Which records.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Only this state: in-progress, completed, failed, outcome-unknown or retryable. May be repeated.
    #[arg(long = "state", value_name = "STATE")]
    states: Vec<StateName>,
    /// Only records that were made at least this long ago, such as 5m.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    older_than: Option<Duration>,
    /// Only records in progress whose lease is over.
    #[arg(long)]
    abandoned: bool,
    /// Only records of this principal.
    #[arg(long)]
    principal: Option<String>,
    /// Only records of this operation.
    #[arg(long)]
    operation: Option<String>,
    /// Only records of this namespace.
    #[arg(long)]
    namespace: Option<String>,
    /// The most records to list.
    #[arg(long, default_value_t = 50, value_name = "NUMBER")]
    limit: usize,
}

pub(crate) async fn run(store: &dyn Store, options: &Options, json: bool) -> Result<Ended, Box<dyn Error>> {
    let filter = RecordFilter {
        states: options.states.clone(),
        older_than: options.older_than,
        abandoned: options.abandoned,
        namespace: options.namespace.clone(),
        principal: options.principal.clone(),
        operation: options.operation.clone(),
    };
    let (mut listed, mut scanned, mut unreadable, mut from) = (0, 0, 0, None);
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
        let left = options.limit - listed;
        let is_full = page.records.len() > left;
        for record in page.records.iter().take(left) {
            progress.print(|| match json {
                true => say_json(&summary_json(record, page.now)),
                false => say(&row(record, page.now)),
            });
            listed += 1;
        }
        if is_full {
            progress.end();
            eprintln!("there are more; see --limit");
            break;
        }
        match page.next {
            Some(next) => from = Some(next),
            None => {
                progress.end();
                break;
            }
        }
    }
    if listed == 0 && !json {
        eprintln!("no record is selected; {scanned} were read");
    }
    if unreadable > 0 {
        eprintln!("{unreadable} records cannot be read, perhaps because a newer version wrote them");
    }
    Ok(Ended::Done)
}
