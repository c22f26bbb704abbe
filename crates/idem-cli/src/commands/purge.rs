//! `idem purge`. In partitions it also makes the coming ones and drops the past ones.

use std::error::Error;
use std::num::NonZeroU32;

use clap::Args;
use idem_core::PartSize;
use serde_json::json;

use crate::output::{Progress, say, say_json};
use crate::store::Store;
use crate::{Ended, with_causes};

/// How much to purge.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The most records to remove. Default: all that have expired.
    #[arg(long, value_name = "NUMBER")]
    limit: Option<u64>,
}

pub(crate) async fn run(store: &dyn Store, options: &Options, json: bool) -> Result<Ended, Box<dyn Error>> {
    let Some(purge) = store.purge() else {
        eprintln!("nothing to do: Redis removes expired records itself");
        if json {
            say_json(&json!({ "removed": 0 }));
        }
        return Ok(Ended::Done);
    };
    let progress = Progress::start("removing expired records");
    let (mut removed, mut part) = (0_u64, PartSize::new());
    while let Some(most) = options.limit.map_or(Some(part.get()), |limit| part.up_to(limit - removed)) {
        match purge.purge(most).await {
            Ok(some) => {
                removed += u64::from(some);
                progress.show(removed, None);
                if some < most.get() {
                    break;
                }
            }
            Err(error) => part.shrink(error)?,
        }
    }
    let mut is_maintained = true;
    if options.limit.is_none_or(|limit| removed < limit) {
        match purge.maintain(NonZeroU32::MIN).await {
            Ok(some) => removed += u64::from(some),
            // A role that does not own the tables can still remove records.
            Err(error) => {
                eprintln!("partitions, if there are any, were not made or dropped: {}", with_causes(&error));
                is_maintained = false;
            }
        }
    }
    progress.end();
    if json {
        say_json(&json!({ "removed": removed }))
    } else {
        say(&format!("{removed} records removed"))
    }
    Ok(if is_maintained { Ended::Done } else { Ended::Unchanged })
}
