//! `idem purge`.

use std::error::Error;

use clap::Args;
use idem_core::PartSize;
use serde_json::json;

use crate::Ended;
use crate::output::{Progress, say, say_json};
use crate::store::Store;

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
    progress.end();
    if json {
        say_json(&json!({ "removed": removed }))
    } else {
        say(&format!("{removed} records removed"))
    }
    Ok(Ended::Done)
}
