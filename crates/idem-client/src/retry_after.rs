//! How long a server asks to wait (RFC 9110 section 10.2.3).

use std::time::{Duration, SystemTime};

use http::HeaderMap;
use http::header::{DATE, RETRY_AFTER};

/// The wait of a `Retry-After`: seconds, or a date. A date counts from the answer's `Date`, so that the clocks of client and
/// server need not agree; without one, it counts from `received_at`. A past date is a wait of zero. `None` if the field is
/// missing, repeated or malformed.
pub(crate) fn retry_after(headers: &HeaderMap, received_at: SystemTime) -> Option<Duration> {
    let value = only(headers, RETRY_AFTER)?;
    if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        // A number that is too large is a wait without end.
        return Some(Duration::from_secs(value.parse().unwrap_or(u64::MAX)));
    }
    let until = httpdate::parse_http_date(value).ok()?;
    let from = only(headers, DATE).and_then(|date| httpdate::parse_http_date(date).ok()).unwrap_or(received_at);
    Some(until.duration_since(from).unwrap_or_default())
}

/// The value of a header that a response has once.
pub(crate) fn only(headers: &HeaderMap, name: impl http::header::AsHeaderName) -> Option<&str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?.to_str().ok()?.trim();
    values.next().is_none().then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wait(fields: &[(&'static str, &str)], now_s: u64) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, value.parse().unwrap());
        }
        retry_after(&headers, SystemTime::UNIX_EPOCH + Duration::from_secs(now_s))
    }

    #[test]
    fn seconds_and_dates_are_understood() {
        assert_eq!(wait(&[("retry-after", "7")], 0), Some(Duration::from_secs(7)));
        assert_eq!(wait(&[("retry-after", "0")], 0), Some(Duration::ZERO));
        assert_eq!(wait(&[("retry-after", "Thu, 01 Jan 1970 00:01:00 GMT")], 20), Some(Duration::from_secs(40)));
        assert_eq!(wait(&[("retry-after", "Thursday, 01-Jan-70 00:01:00 GMT")], 20), Some(Duration::from_secs(40)));
        assert_eq!(wait(&[("retry-after", "Thu, 01 Jan 1970 00:00:10 GMT")], 20), Some(Duration::ZERO));
        assert_eq!(wait(&[("retry-after", "99999999999999999999999")], 0), Some(Duration::from_secs(u64::MAX)));
    }

    #[test]
    fn a_date_counts_from_the_clock_of_the_server() {
        let fields = [("retry-after", "Thu, 01 Jan 1970 00:01:00 GMT"), ("date", "Thu, 01 Jan 1970 00:00:55 GMT")];
        assert_eq!(wait(&fields, 1_000_000), Some(Duration::from_secs(5)), "the client's clock is wrong by days");
    }

    #[test]
    fn what_is_no_wait_is_ignored() {
        for value in ["", "-1", "+1", "1.5", "soon", "1, 2", "1s"] {
            assert_eq!(wait(&[("retry-after", value)], 0), None, "{value:?}");
        }
        assert_eq!(wait(&[("retry-after", "1"), ("retry-after", "9")], 0), None, "repeated");
        assert_eq!(wait(&[], 0), None);
    }
}
