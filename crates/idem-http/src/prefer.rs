//! How long a client prefers to wait (RFC 7240 section 4.3).

use std::time::Duration;

use crate::syntax::{BLANKS, split_outside_quotes, unquoted};

/// The `wait` preference in the values of the `Prefer` field lines. The first one counts (RFC 7240 section 2). If it is
/// malformed, it is ignored.
pub(crate) fn wait<'a>(values: impl Iterator<Item = &'a [u8]>) -> Option<Duration> {
    values
        .filter_map(|value| std::str::from_utf8(value).ok())
        .flat_map(|value| split_outside_quotes(value, ','))
        .filter_map(|preference| split_outside_quotes(preference, ';').next()?.split_once('='))
        .find(|(name, _)| name.trim_matches(BLANKS).eq_ignore_ascii_case("wait"))
        .and_then(|(_, seconds)| whole_number(seconds.trim_matches(BLANKS)))
        .map(Duration::from_secs)
}

/// A token or quoted string that consists of digits; `str::parse` would also accept a plus sign.
fn whole_number(text: &str) -> Option<u64> {
    let text = unquoted(text).unwrap_or(text);
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(values: &[&str]) -> Option<u64> {
        wait(values.iter().map(|value| value.as_bytes())).map(|wait| wait.as_secs())
    }

    #[test]
    fn the_first_wait_counts() {
        assert_eq!(seconds(&["wait=5"]), Some(5));
        assert_eq!(seconds(&["respond-async, Wait = \"10\"; x=1, wait=2"]), Some(10));
        assert_eq!(seconds(&["return=minimal", "wait=0"]), Some(0));
    }

    #[test]
    fn what_is_not_a_wait_is_ignored() {
        for value in ["", "wait", "wait=", "wait=-1", "wait=soon", "wait=1.5", "waits=3", "\u{e9}=1"] {
            assert_eq!(seconds(&[value]), None, "{value:?}");
        }
        for value in ["wait=\"5", "wait=5\"", "foo=\"a, wait=5\"", "foo=\"\\\", wait=5\"", "foo=\"x;wait=5\""] {
            assert_eq!(seconds(&[value]), None, "{value:?}");
        }
        for value in ["wait=+5", "wait=\"+5\"", "wait=5\r", "\u{a0}wait=5", "wait=\u{2003}5"] {
            assert_eq!(seconds(&[value]), None, "{value:?}");
        }
        assert_eq!(seconds(&["foo=\"a\\\\\", wait=5"]), Some(5), "an escaped backslash does not escape the quote");
    }
}
