//! How long a client prefers to wait (RFC 7240 section 4.3).

use std::time::Duration;

/// The `wait` preference in the values of the `Prefer` field lines; the first one counts (RFC 7240 section 2), and what
/// cannot be understood is ignored, as a preference may be.
pub(crate) fn wait<'a>(values: impl Iterator<Item = &'a [u8]>) -> Option<Duration> {
    values
        .filter_map(|value| std::str::from_utf8(value).ok())
        .flat_map(|value| value.split(','))
        .filter_map(|preference| preference.split(';').next()?.split_once('='))
        .find(|(name, _)| name.trim().eq_ignore_ascii_case("wait"))
        .and_then(|(_, seconds)| seconds.trim().trim_matches('"').parse().ok())
        .map(Duration::from_secs)
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
    }
}
