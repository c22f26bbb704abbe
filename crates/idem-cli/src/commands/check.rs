//! `idem check`.

use std::error::Error;
use std::time::{Duration, SystemTime};

use idem_core::{RecordId, SelfTestError, StoreError, StoreErrorKind};
use serde_json::json;

use crate::output::{say, say_json};
use crate::store::{Examination, Level, Line, Store, StoreOptions};
use crate::{Ended, with_causes};

/// From how far on the clocks of this machine and of the store are reported as different. Expiry is judged by the store's clock
/// alone, so a difference only makes logs hard to compare.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(2);

pub(crate) async fn run(options: &StoreOptions, json: bool) -> Result<Ended, Box<dyn Error>> {
    let lines = match options.open().await {
        Ok(store) => examine(&*store).await?,
        Err(error) if is_away(error.as_ref()) => return Err(error),
        Err(error) => vec![(Level::Unusable, "open", with_causes(error.as_ref()))],
    };
    for (level, name, text) in &lines {
        if json {
            say_json(&json!({ "level": label(*level), "check": name, "text": text }));
        } else {
            say(&format!("{:<9}{name:<12}{text}", label(*level)));
        }
    }
    Ok(match lines.iter().map(|(level, ..)| *level).max() {
        Some(Level::Unusable) => Ended::Unusable,
        Some(Level::Weak | Level::Unknown) => Ended::Weak,
        Some(Level::Ok) | None => Ended::Done,
    })
}

async fn examine(store: &dyn Store) -> Result<Vec<Line>, Box<dyn Error>> {
    let mut lines = vec![(Level::Ok, "open", "the login and the schema are as they should be".to_owned())];
    match store.examine().await {
        Ok(Examination { version, lines: found }) => {
            lines.push((Level::Ok, "version", version));
            lines.push((Level::Ok, "self-test", "acquire, settle and release keep their promises".to_owned()));
            lines.extend(found);
        }
        Err(error) if is_away(error.as_ref()) => return Err(error),
        Err(error) => lines.push((Level::Unusable, "self-test", with_causes(error.as_ref()))),
    }
    lines.push(clock(store.inspect(&RecordId::from_bytes([0; 32])).await?.now.unix_micros()));
    Ok(lines)
}

/// Whether the store was not asked, or did not answer: then there is nothing to say about it.
fn is_away(error: &(dyn Error + 'static)) -> bool {
    let of_store = |error: &StoreError| {
        matches!(error.kind(), StoreErrorKind::Unavailable | StoreErrorKind::Timeout | StoreErrorKind::Busy)
    };
    match (error.downcast_ref::<StoreError>(), error.downcast_ref::<SelfTestError>()) {
        (Some(error), _) | (None, Some(SelfTestError::Store(error))) => of_store(error),
        (None, Some(_)) => false,
        (None, None) => true,
    }
}

fn clock(store: i64) -> Line {
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
        Level::Unknown => "unknown",
        Level::Weak => "weak",
        Level::Unusable => "unusable",
    }
}
