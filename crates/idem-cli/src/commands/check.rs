//! `idem check`.

use std::error::Error;
use std::num::NonZeroU32;
use std::time::{Duration, SystemTime};

use idem_core::{MissingPrivilege, RecordId, SelfTestError, StoreError, StoreErrorKind};
use serde_json::json;

use crate::output::{say, say_json};
use crate::store::{Examination, Level, Line, StoreOptions};
use crate::{Ended, with_causes};

/// From how far on the clocks of this machine and of the store are reported as different. Expiry is judged by the store's clock
/// alone, so a difference only makes logs hard to compare.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(2);

pub(crate) async fn run(options: &StoreOptions, json: bool) -> Result<Ended, Box<dyn Error>> {
    let mut lines = Vec::new();
    let examined = examine(options, &mut lines).await;
    for (level, name, text) in &lines {
        if json {
            say_json(&json!({ "level": label(*level), "check": name, "text": text }));
        } else {
            say(&format!("{:<9}{name:<12}{text}", label(*level)));
        }
    }
    examined?;
    Ok(match lines.iter().map(|(level, ..)| *level).max() {
        Some(Level::Unusable) => Ended::Unusable,
        Some(Level::Weak | Level::Unknown) => Ended::Weak,
        Some(Level::Ok) | None => Ended::Done,
    })
}

/// Finds lines, until the store does not answer.
async fn examine(options: &StoreOptions, lines: &mut Vec<Line>) -> Result<(), Box<dyn Error>> {
    let store = match options.open().await {
        Ok(store) => store,
        Err(error) => {
            lines.push((Level::Unusable, "open", unless_away(error)?));
            return Ok(());
        }
    };
    lines.push((Level::Ok, "open", "the login is accepted, and the schema is current".to_owned()));
    match store.missing_privileges().await {
        Ok(None) => {}
        Ok(Some(missing)) => lines.push(privileges(&missing)),
        Err(error) => lines.push((Level::Unusable, "privileges", unless_away(error.into())?)),
    }
    match store.examine().await {
        Ok(Examination { version, lines: found }) => {
            lines.push((Level::Ok, "version", version));
            lines.push((Level::Ok, "self-test", "acquire, settle and release keep their promises".to_owned()));
            lines.extend(found);
        }
        Err(error) => lines.push((Level::Unusable, "self-test", unless_away(error)?)),
    }
    if let Err(error) = store.repairs(NonZeroU32::MIN).await {
        let text = unless_away(error.into())?;
        lines.push((Level::Weak, "repairs", format!("this login cannot read the notes of repairs: {text}")));
    }
    lines.push(match store.inspect(&RecordId::from_bytes([0; 32])).await {
        Ok(inspection) => clock(inspection.now.unix_micros()),
        Err(error) => (Level::Unusable, "clock", unless_away(error.into())?),
    });
    Ok(())
}

/// The line about missing privileges. It is no more than weak if only those on the notes of repairs are missing.
fn privileges(missing: &[MissingPrivilege]) -> Line {
    const NAME: &str = "privileges";
    if missing.is_empty() {
        return (Level::Ok, NAME, "this login has each privilege that the store needs".to_owned());
    }
    let is_of_repairs = |missing: &MissingPrivilege| missing.object == "idem_repairs";
    let level = if missing.iter().all(is_of_repairs) { Level::Weak } else { Level::Unusable };
    let missing: Vec<_> = missing.iter().map(ToString::to_string).collect();
    let for_whom = if level == Level::Weak { "; only tools of operators need that" } else { "" };
    (level, NAME, format!("this login lacks {}{for_whom}", missing.join(", ")))
}

/// The text of an error, unless the store was not asked or did not answer: then there is nothing to say about it.
fn unless_away(error: Box<dyn Error>) -> Result<String, Box<dyn Error>> {
    if is_away(error.as_ref()) { Err(error) } else { Ok(with_causes(error.as_ref())) }
}

fn is_away(error: &(dyn Error + 'static)) -> bool {
    let of_store = |error: &StoreError| match error.kind() {
        StoreErrorKind::Timeout | StoreErrorKind::Busy => true,
        StoreErrorKind::Unavailable => !is_refusal(error),
        _ => false,
    };
    match (error.downcast_ref::<StoreError>(), error.downcast_ref::<SelfTestError>()) {
        (Some(error), _) | (None, Some(SelfTestError::Store(error))) => of_store(error),
        (None, Some(_)) => false,
        (None, None) => true,
    }
}

/// Whether a database has answered that a privilege or a table is missing, or that it takes no writes: an open store takes that for a
/// state that may pass.
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
fn is_refusal(error: &StoreError) -> bool {
    let of_server = error.source().and_then(|source| source.downcast_ref::<sqlx::Error>()?.as_database_error()?.code());
    // SQLSTATE, class 42 and two more.
    of_server.is_some_and(|code| code.starts_with("42") || matches!(&*code, "3F000" | "25006"))
}

#[cfg(not(any(feature = "postgres", feature = "mysql", feature = "sqlite")))]
fn is_refusal(_: &StoreError) -> bool {
    false
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
