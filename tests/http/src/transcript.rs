//! Answers without what may differ between runs: names, times, and the framing of bodies.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::client::Answer;

/// Longer bodies are shown as their length and a digest.
const SHOWN_BYTES: usize = 2000;

/// One answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry(String);

impl Entry {
    pub(crate) fn of(answer: &Answer, tenant: &str) -> Self {
        let mut text = answer.status.to_string();
        if answer.is_replay() {
            text.push_str(" replayed");
        }
        for (name, value) in answer.essence().headers {
            // It is the rest of a lease, which a slow machine shortens.
            let value = if name == "retry-after" { "N".to_owned() } else { steady(&value, tenant) };
            text.push_str(&format!("\n{name}: {value}"));
        }
        text.push_str(&format!("\n\n{}", body(&answer.body, tenant)));
        Self(text)
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

fn body(body: &[u8], tenant: &str) -> String {
    if body.len() <= SHOWN_BYTES {
        return steady(body, tenant);
    }
    let mut digest = DefaultHasher::new();
    body.hash(&mut digest);
    format!("{} bytes, {:016x}", body.len(), digest.finish())
}

/// Replaces UUIDs and times in the text.
fn steady(bytes: &[u8], tenant: &str) -> String {
    let text = bytes.escape_ascii().to_string().replace(tenant, "TENANT");
    let mut steady = String::new();
    let mut rest = text.as_str();
    while let Some(first) = rest.chars().next() {
        let (replacement, length) = match (is_uuid(rest), time_length(rest)) {
            (true, _) => ("UUID", 36),
            (_, Some(length)) => ("TIME", length),
            _ => ("", first.len_utf8()),
        };
        steady.push_str(if replacement.is_empty() { &rest[..length] } else { replacement });
        rest = &rest[length..];
    }
    steady
}

fn is_uuid(text: &str) -> bool {
    let Some(text) = text.get(..36) else { return false };
    let hyphen = |at| [8, 13, 18, 23].contains(&at);
    text.bytes().enumerate().all(|(at, byte)| if hyphen(at) { byte == b'-' } else { byte.is_ascii_hexdigit() })
}

/// The length of an RFC 3339 time, if the text begins with one.
fn time_length(text: &str) -> Option<usize> {
    let shape = "dddd-dd-ddTdd:dd:dd";
    let is_time = text.get(..shape.len())?.bytes().zip(shape.bytes()).all(|(byte, shape)| match shape {
        b'd' => byte.is_ascii_digit(),
        shape => byte == shape,
    });
    let end = text.find('Z').filter(|&end| is_time && end <= shape.len() + 10)?;
    Some(end + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_times_are_replaced_and_nothing_else() {
        let text = r#"{"id":"4711aaaa-bbbb-4ccc-8ddd-eeeeffff0000","at":"2026-11-21T19:06:52.123456789Z","n":4711,"x":"\u00e9"}"#;
        let steadied = steady(text.as_bytes(), "tenant-1");
        assert_eq!(steadied.replace('\\', ""), r#"{"id":"UUID","at":"TIME","n":4711,"x":"u00e9"}"#);
        assert_eq!(steady(b"tenant-1 \xFF", "tenant-1"), "TENANT \\xff");
    }
}
