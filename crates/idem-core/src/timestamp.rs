//! A point in time, as a store's clock gave it.

use std::fmt;
use std::time::Duration;

/// Microseconds since 1970-01-01T00:00:00Z, as read from a *store's* clock.
///
/// Microseconds are what Postgres and Redis give, and an `i64` of them is what SQL can hold. Arithmetic saturates: a
/// lease of a million years is as good as for ever, and nothing panics. Never compare one with an application's clock
/// (law L9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Timestamp(i64);

impl Timestamp {
    /// From microseconds since the Unix epoch.
    #[must_use]
    pub const fn from_unix_micros(micros: i64) -> Self {
        Self(micros)
    }

    /// Microseconds since the Unix epoch.
    #[must_use]
    pub const fn unix_micros(self) -> i64 {
        self.0
    }

    /// Adds `duration`, at most up to the last point that exists. Fractions of a microsecond are cut off.
    #[must_use]
    pub fn saturating_add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)))
    }

    /// How long from `earlier` to this point; zero when `earlier` is not earlier.
    #[must_use]
    pub fn saturating_duration_since(self, earlier: Self) -> Duration {
        Duration::from_micros(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }

    /// How long from `earlier` to this point, as tools show it to operators: the two largest units, as in `2days 1h`, `5m 3s` and `0s`.
    ///
    /// The crate `humantime` prints all units. It would come into the core for this alone.
    #[must_use]
    pub fn age_since(self, earlier: Self) -> String {
        let seconds = self.saturating_duration_since(earlier).as_secs();
        let (minutes, hours, days) = (seconds / 60, seconds / 3_600, seconds / 86_400);
        let parts = [
            (days, if days == 1 { "day" } else { "days" }),
            (hours % 24, "h"),
            (minutes % 60, "m"),
            (seconds % 60, "s"),
        ];
        let shown =
            parts.iter().filter(|(number, _)| *number > 0).take(2).map(|(number, unit)| format!("{number}{unit}"));
        Some(shown.collect::<Vec<_>>().join(" ")).filter(|text| !text.is_empty()).unwrap_or_else(|| "0s".to_owned())
    }
}

/// RFC 3339 in UTC, or the raw number for years that RFC 3339 cannot write.
impl fmt::Display for Timestamp {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = i128::from(self.0) * 1_000;
        let text = time::OffsetDateTime::from_unix_timestamp_nanos(nanos)
            .ok()
            .and_then(|time| time.format(&time::format_description::well_known::Rfc3339).ok());
        match text {
            Some(text) => formatter.write_str(&text),
            None => write!(formatter, "{} µs since the Unix epoch", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn arithmetic_saturates_at_both_ends() {
        let last = Timestamp::from_unix_micros(i64::MAX);
        let first = Timestamp::from_unix_micros(i64::MIN);
        assert_eq!(last.saturating_add(SECOND), last);
        assert_eq!(Timestamp::from_unix_micros(5).saturating_add(Duration::MAX), last);
        assert_eq!(first.saturating_duration_since(last), Duration::ZERO);
        assert_eq!(last.saturating_duration_since(first), Duration::from_micros(i64::MAX as u64));
    }

    #[test]
    fn adding_and_subtracting_agree() {
        let start = Timestamp::from_unix_micros(1_000_000);
        let end = start.saturating_add(SECOND);
        assert_eq!(end.unix_micros(), 2_000_000);
        assert_eq!(end.saturating_duration_since(start), SECOND);
        assert_eq!(start.saturating_duration_since(end), Duration::ZERO);
    }

    #[test]
    fn an_age_has_two_units() {
        let age = |seconds: u64| {
            let start = Timestamp::from_unix_micros(5);
            start.saturating_add(Duration::from_secs(seconds)).age_since(start)
        };
        for (seconds, text) in [
            (0, "0s"),
            (5, "5s"),
            (60, "1m"),
            (303, "5m 3s"),
            (3_601, "1h 1s"),
            (90_061, "1day 1h"),
            (2 * 86_400 + 59, "2days 59s"),
            (40_000_000, "462days 23h"),
        ] {
            assert_eq!(age(seconds), text);
        }
        assert_eq!(Timestamp::from_unix_micros(0).age_since(Timestamp::from_unix_micros(1)), "0s");
        assert_eq!(Timestamp::from_unix_micros(1_999_999).age_since(Timestamp::from_unix_micros(0)), "1s");
    }

    #[test]
    fn display_is_rfc_3339_where_that_exists() {
        assert_eq!(Timestamp::from_unix_micros(1_500_000).to_string(), "1970-01-01T00:00:01.5Z");
        assert_eq!(Timestamp::from_unix_micros(i64::MAX).to_string(), format!("{} µs since the Unix epoch", i64::MAX));
    }
}
