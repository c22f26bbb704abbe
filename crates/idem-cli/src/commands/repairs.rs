//! `idem repairs`.

use std::error::Error;
use std::num::NonZeroU32;

use clap::Args;
use idem_core::Repair;
use serde_json::json;

use crate::Ended;
use crate::output::printable;
use crate::store::Store;

/// How many repairs.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The most repairs to list; the newest come first.
    #[arg(long, default_value = "50", value_name = "NUMBER")]
    limit: NonZeroU32,
}

pub(crate) async fn run(store: &dyn Store, options: &Options, json: bool) -> Result<Ended, Box<dyn Error>> {
    for Repair { at, note } in store.repairs(options.limit).await? {
        let outcome = note.outcome.as_deref().unwrap_or("not known: the tool was stopped before it was noted");
        if json {
            println!(
                "{}",
                json!({
                    "at": at.to_string(), "record": note.record.to_string(), "resolution": note.resolution,
                    "actor": note.actor, "reason": note.reason, "outcome": note.outcome,
                })
            );
        } else {
            let (actor, reason) = (printable(&note.actor), printable(&note.reason));
            println!("{}  {}  {}  {outcome}  by {actor}: {reason}", at, note.record, note.resolution);
        }
    }
    Ok(Ended::Done)
}
