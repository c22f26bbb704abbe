//! `idem purge`.

use std::error::Error;

use clap::Args;
use serde_json::json;

use crate::Ended;
use crate::commands::PART;
use crate::output::Progress;
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
    let mut removed = 0;
    loop {
        let left = options.limit.map_or(u64::from(PART.get()), |limit| limit.saturating_sub(removed));
        let Some(part) = u32::try_from(left.min(PART.get().into())).ok().and_then(|part| part.try_into().ok()) else {
            break;
        };
        let some = purge.purge(part).await?;
        removed += u64::from(some);
        progress.show(removed, None);
        if some < part.get() {
            break;
        }
    }
    progress.end();
    if json {
        println!("{}", json!({ "removed": removed }))
    } else {
        println!("{removed} records removed")
    }
    Ok(Ended::Done)
}
