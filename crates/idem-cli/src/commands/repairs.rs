//! `idem repairs`.

use std::error::Error;
use std::num::NonZeroU32;

use clap::Args;
use idem_core::Repair;
use serde_json::json;

use crate::Ended;
use crate::output::{printable, say, say_json, token};
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
        let action = token(&note.action);
        if json {
            say_json(&json!({
                "at": at.to_string(), "record": note.record.to_string(), "action": action, "resolution": note.resolution,
                "actor": note.actor, "reason": note.reason, "outcome": note.outcome,
            }));
            continue;
        }
        let (actor, reason) = (printable(&note.actor), printable(&note.reason));
        let outcome =
            note.outcome.unwrap_or_else(|| format!("not known: see whether `idem show` names the owner {action}"));
        say(&format!("{at}  {}  {}  {outcome}  by {actor}: {reason}", note.record, note.resolution));
    }
    Ok(Ended::Done)
}
