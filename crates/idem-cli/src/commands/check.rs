//! `idem check`.

use std::error::Error;
use std::time::{Duration, SystemTime};

use idem_core::{RecordId, StoreError, StoreErrorKind};
use serde_json::json;

use crate::store::{Examination, Level, StoreOptions};
use crate::{Ended, with_causes};

/// From how far on the clocks of this machine and of the store are reported as different. Expiry is judged by the store's clock
/// alone, so a difference only makes logs hard to compare.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(2);

pub(crate) async fn run(options: &StoreOptions, json: bool) -> Result<Ended, Box<dyn Error>> {
    let mut lines = Vec::new();
    match options.open().await {
        Ok(store) => {
            lines.push((Level::Ok, "open", "the login and the schema are as they should be".to_owned()));
            match store.examine().await {
                Ok(Examination { version, lines: found }) => {
                    lines.push((Level::Ok, "version", version));
                    lines.push((Level::Ok, "self-test", "acquire, settle and release keep their promises".to_owned()));
                    lines.extend(found);
                }
                Err(error) => lines.push((Level::Unusable, "self-test", with_causes(error.as_ref()))),
            }
            if let Ok(inspection) = store.inspect(&RecordId::from_bytes([0; 32])).await {
                lines.push(clock(inspection.now.unix_micros()));
            }
        }
        Err(error) if is_usage(error.as_ref()) => return Err(error),
        Err(error) => lines.push((Level::Unusable, "open", with_causes(error.as_ref()))),
    }
    for (level, name, text) in &lines {
        if json {
            println!("{}", json!({ "level": label(*level), "check": name, "text": text }));
        } else {
            println!("{:<9}{name:<12}{text}", label(*level));
        }
    }
    Ok(match lines.iter().map(|(level, ..)| *level).max() {
        Some(Level::Unusable) => Ended::Unusable,
        Some(Level::Weak) => Ended::Weak,
        Some(Level::Ok) | None => Ended::Done,
    })
}

/// Whether the store was never asked, or is away: then there is nothing to say about it.
fn is_usage(error: &(dyn Error + 'static)) -> bool {
    error.downcast_ref::<StoreError>().is_none_or(|error| error.kind() == StoreErrorKind::Unavailable)
}

fn clock(store: i64) -> (Level, &'static str, String) {
    let here = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_micros();
    let apart = Duration::from_micros(i64::try_from(here).unwrap_or(i64::MAX).abs_diff(store));
    if apart <= CLOCK_TOLERANCE {
        (Level::Ok, "clock", "the store's clock agrees with this machine's".to_owned())
    } else {
        let seconds = humantime::format_duration(Duration::from_secs(apart.as_secs()));
        (Level::Weak, "clock", format!("the store's clock and this machine's are {seconds} apart"))
    }
}

fn label(level: Level) -> &'static str {
    match level {
        Level::Ok => "ok",
        Level::Weak => "weak",
        Level::Unusable => "unusable",
    }
}
