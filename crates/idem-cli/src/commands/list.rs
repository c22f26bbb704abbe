//! `idem list`.

use std::error::Error;
use std::ops::ControlFlow;
use std::time::Duration;

use clap::Args;
use idem_core::{RecordFilter, StateName, TraceId};

use crate::Ended;
use crate::commands::scan::scan;
use crate::output::{row, say, say_json, summary_json};
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
    /// Only records whose answer was given in this trace: a request, its job, and what consumers of its messages did.
    #[arg(long, value_name = "ID")]
    trace: Option<TraceId>,
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
        trace: options.trace,
    };
    let (mut listed, mut is_full) = (0, false);
    let scanned = scan(store, &filter, async |progress, page| {
        let left = options.limit - listed;
        is_full = page.records.len() > left;
        for record in page.records.iter().take(left) {
            progress.print(|| match json {
                true => say_json(&summary_json(record, page.now)),
                false => say(&row(record, page.now)),
            });
            listed += 1;
        }
        Ok(if is_full { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })
    .await?;
    if is_full {
        eprintln!("there are more; see --limit");
    }
    if listed == 0 && !json {
        eprintln!("no record is selected; {} were read", scanned.records);
    }
    scanned.report_unreadable();
    Ok(Ended::Done)
}
