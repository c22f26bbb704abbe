//! Bugs to try the tests with: `cargo xtask planted-bugs` turns them on, one at a time, and expects a test to fail.
//!
//! They are there only in a build with `RUSTFLAGS="--cfg idem_planted_bugs"`, which no feature and no dependency can ask for,
//! and which is refused without debug assertions. In such a build the environment variable `IDEM_PLANTED_BUG` names the
//! one that is on. `next-format` is none, but a version to come, which writes records in another format, for a rolling deploy
//! in `cargo xtask faults`. In every other build [`planted!`](crate::planted!) is the right code and nothing else: neither a branch
//! nor a name is left of it.

#[cfg(all(idem_planted_bugs, not(debug_assertions)))]
compile_error!("a build with planted bugs is for tests: take `--cfg idem_planted_bugs` out of RUSTFLAGS");

/// The place of a bug. Its forms:
/// - `planted!("name")` and `planted!("name" if condition)`: whether to go wrong here; else `false`.
/// - `planted!(right, "name" => wrong)`: a value.
/// - `planted!("name" => statement)`: something that is done besides.
/// - `planted!(text; "name": "right" => "wrong", …)`: a program in another language, a part of which is replaced.
#[cfg(not(idem_planted_bugs))]
#[doc(hidden)]
#[macro_export]
macro_rules! planted {
    ($name:literal $(if $condition:expr)?) => {
        false
    };
    ($name:literal => $wrong:expr) => {{}};
    ($right:expr, $name:literal => $wrong:expr) => {
        $right
    };
    ($text:expr; $($name:literal: $right:literal => $wrong:literal),+ $(,)?) => {
        $text
    };
}

/// The same where the bugs are.
#[cfg(idem_planted_bugs)]
#[doc(hidden)]
#[macro_export]
macro_rules! planted {
    ($name:literal) => {
        $crate::planted::is_on($name)
    };
    ($name:literal if $condition:expr) => {
        ($crate::planted::is_on($name) && $condition)
    };
    ($name:literal => $wrong:expr) => {
        if $crate::planted::is_on($name) {
            $wrong
        }
    };
    ($right:expr, $name:literal => $wrong:expr) => {
        if $crate::planted::is_on($name) { $wrong } else { $right }
    };
    ($text:expr; $($name:literal: $right:literal => $wrong:literal),+ $(,)?) => {
        $crate::planted::rewritten($text, &[$(($name, $right, $wrong)),+])
    };
}

#[cfg(idem_planted_bugs)]
pub use bugs::*;

#[cfg(idem_planted_bugs)]
mod bugs {
    use std::sync::OnceLock;

    use crate::machine::Term;
    use crate::memory::{Clock, SystemClock};
    use crate::record::{Acquisition, Record, State, Takeover};
    use crate::timestamp::Timestamp;

    /// Whether it is this bug that was asked for.
    #[must_use]
    pub fn is_on(name: &str) -> bool {
        static WANTED: OnceLock<Option<String>> = OnceLock::new();
        WANTED.get_or_init(|| std::env::var("IDEM_PLANTED_BUG").ok()).as_deref() == Some(name)
    }

    /// `text` with what the bug that is on, if it is one of these, replaces in it.
    #[must_use]
    pub fn rewritten(text: &'static str, bugs: &[(&str, &str, &str)]) -> &'static str {
        let on = bugs.iter().filter(|(name, ..)| is_on(name));
        on.fold(text, |text, (_, right, wrong)| text.replace(right, wrong).leak())
    }

    /// The time by the clock of this machine.
    #[must_use]
    pub fn machines_time() -> Timestamp {
        SystemClock.now()
    }

    /// A settled record that runs again.
    pub(crate) fn revived(record: &Record, term: Term, now: Timestamp) -> Record {
        let lease_until = now.saturating_add(term.lease);
        let state = State::InProgress { lease_until, acquisition: Acquisition::Fresh, takeover: Takeover::Rerun };
        Record { expires_at: lease_until.saturating_add(term.retention), state, ..record.clone() }
    }

    /// The number at the end of a canonical form, as IEEE 754 has it.
    pub(crate) fn through_f64(form: &mut Vec<u8>) {
        let Some(at) = form.iter().rposition(|byte| *byte == b'#') else { return };
        let lexeme = String::from_utf8_lossy(&form[at + 1..]);
        if let Ok(number) = lexeme.parse::<f64>() {
            form.truncate(at + 1);
            form.extend(number.to_string().bytes());
        }
    }
}
