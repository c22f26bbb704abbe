//! What the commands print.

use std::io::{IsTerminal as _, Write as _};

use idem_core::{OwnerToken, RecordState, RecordSummary, Takeover, Timestamp};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

/// The progress of a scan, on a terminal only.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Parts of a thousand, because the bar counts in whole numbers.
    const WHOLE: u64 = 1_000;

    pub(crate) fn start(what: &'static str) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(ProgressBar::hidden());
        }
        let bar = ProgressBar::new(Self::WHOLE).with_message(what);
        if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {percent:>3} % {prefix}") {
            bar.set_style(style);
        }
        Self(bar)
    }

    pub(crate) fn show(&self, records: u64, done: Option<f64>) {
        self.0.set_prefix(records.to_string());
        if let Some(done) = done {
            self.0.set_position((done * Self::WHOLE as f64) as u64);
        }
    }

    /// Prints to standard output above the bar.
    pub(crate) fn print(&self, print: impl FnOnce()) {
        self.0.suspend(print);
    }

    pub(crate) fn end(&self) {
        self.0.finish_and_clear();
    }
}

/// A token in hexadecimal digits.
pub(crate) fn token(token: &OwnerToken) -> String {
    format!("{:032x}", u128::from_be_bytes(*token.as_bytes()))
}

/// A record in one line.
pub(crate) fn row(record: &RecordSummary, now: Timestamp) -> String {
    let scope = record.origin.as_ref().map(|origin| &origin.scope);
    let operation = scope.map_or("", |scope| scope.operation());
    let principal = scope.and_then(|scope| scope.principal()).unwrap_or("-");
    let state = if record.is_abandoned(now) { "abandoned" } else { record.state.name().as_str() };
    format!(
        "{}  {state:<15}  {:>9}  attempt {}  {principal:?}  {operation:?}",
        record.id,
        now.age_since(record.created_at),
        record.attempt,
    )
}

/// Text for a terminal. A client chooses principals and operations, and must neither move the cursor nor change the order of letters.
pub(crate) fn printable(text: &str) -> String {
    text.escape_debug().to_string()
}

/// Prints a line to standard output. If nothing reads it any more, the program ends as by SIGPIPE.
pub(crate) fn say(line: &str) {
    if writeln!(std::io::stdout(), "{line}").is_err() {
        std::process::exit(141);
    }
}

/// Prints a JSON document in one line. Control characters that JSON permits are escaped too: a terminal may obey them.
pub(crate) fn say_json(document: &Value) {
    say(&escaped(&document.to_string()));
}

fn escaped(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for letter in json.chars() {
        // Outside of strings a document has only ASCII, and inside of them this is the same letter.
        if letter.is_control() || !letter.is_ascii() && letter.escape_debug().count() > 1 {
            let mut units = [0; 2];
            letter.encode_utf16(&mut units).iter().for_each(|unit| text.push_str(&format!("\\u{unit:04x}")));
        } else {
            text.push(letter);
        }
    }
    text
}

/// A record as JSON. It has no stored answer.
pub(crate) fn summary_json(record: &RecordSummary, now: Timestamp) -> Value {
    let scope = record.origin.as_ref().map(|origin| &origin.scope);
    let (lease_until, not_before) = match record.state {
        RecordState::InProgress { lease_until } => (Some(lease_until.to_string()), None),
        RecordState::Retryable { not_before } => (None, Some(not_before.to_string())),
        RecordState::Completed | RecordState::Failed | RecordState::OutcomeUnknown => (None, None),
    };
    let takeover = record.takeover.map(|takeover| match takeover {
        Takeover::Rerun => "rerun",
        Takeover::Unknown => "unknown",
        Takeover::Probe => "probe",
    });
    json!({
        "id": record.id.to_string(),
        "version": record.version.to_string(),
        "state": record.state.name().as_str(),
        "abandoned": record.is_abandoned(now),
        "namespace": record.origin.as_ref().map(|origin| &*origin.namespace),
        "principal": scope.and_then(|scope| scope.principal()),
        "operation": scope.map(|scope| scope.operation()),
        "attempt": record.attempt,
        "takeover": takeover,
        "lease_until": lease_until,
        "not_before": not_before,
        "checkpoint": record.checkpoint.as_deref(),
        "status": record.status,
        "body_bytes": record.body_bytes,
        "trace": record.trace.as_ref().map(ToString::to_string),
        "created_at": record.created_at.to_string(),
        "updated_at": record.updated_at.to_string(),
        "expires_at": record.expires_at.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_of_a_client_moves_the_cursor_or_turns_letters_around() {
        assert_eq!(printable("a\u{1b}[31mb\n\u{202e}\u{9b}é"), "a\\u{1b}[31mb\\n\\u{202e}\\u{9b}é");
        let document = json!({ "a": "\u{202e}\u{9b}\u{7f}é\n" }).to_string();
        assert_eq!(escaped(&document), "{\"a\":\"\\u202e\\u009b\\u007fé\\n\"}");
        assert_eq!(serde_json::from_str::<Value>(&escaped(&document)).unwrap()["a"], "\u{202e}\u{9b}\u{7f}é\n");
    }
}
