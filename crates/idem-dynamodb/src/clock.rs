//! The time of the service, from the field `Date` of its answers.
//!
//! The field has whole seconds, and says when the service sent the answer, or less than a second before that. This process counts on
//! from there by its monotonic clock, which no one sets. The latest of these times is the store's time: it is never ahead of the service,
//! and behind it by less than a second, and after some answers by less than their delay. The wall clock of the process decides nothing
//! (law L9).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use aws_sdk_dynamodb::config::interceptors::BeforeDeserializationInterceptorContextRef;
use aws_sdk_dynamodb::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_dynamodb::error::BoxError;
use aws_sdk_dynamodb::primitives::{DateTime, DateTimeFormat};
use idem_core::{StoreError, StoreErrorKind, TimeOffset, Timestamp};

/// How long an answer counts. A monotonic clock may be off by a few milliseconds in that time.
const COUNTS_FOR: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct ServerClock {
    began: Instant,
    offset: TimeOffset,
    readings: Mutex<Readings>,
}

/// The most by which the service was ahead of the monotonic clock, in microseconds: in this span of [`COUNTS_FOR`], and in the one before.
#[derive(Debug, Default)]
struct Readings {
    since: i64,
    ahead: Option<i64>,
    before: Option<i64>,
}

impl ServerClock {
    pub(crate) fn new(offset: TimeOffset) -> Self {
        Self { began: Instant::now(), offset, readings: Mutex::default() }
    }

    /// The monotonic time since some moment, in microseconds. Tests move it as they move the time of the service.
    pub(crate) fn elapsed(&self) -> i64 {
        micros(self.began.elapsed()).saturating_add(self.offset.micros())
    }

    /// The time of the service.
    pub(crate) fn now(&self) -> Result<Timestamp, StoreError> {
        let elapsed = micros(self.began.elapsed());
        let ahead = self.with(|readings| readings.ahead.max(readings.before)).ok_or_else(|| {
            let message = "the answers of the service have no fields `Date` and `x-amzn-RequestId`, and so there is no time to go by";
            StoreError::new(StoreErrorKind::Misconfigured, message)
        })?;
        Ok(Timestamp::from_unix_micros(elapsed.saturating_add(ahead).saturating_add(self.offset.micros())))
    }

    /// Takes notice of an answer that came now.
    fn read(&self, date: &str) {
        let Ok(date) = DateTime::from_str(date, DateTimeFormat::HttpDate) else { return };
        let elapsed = micros(self.began.elapsed());
        let ahead = date.secs().saturating_mul(1_000_000).saturating_sub(elapsed);
        self.with(|readings| readings.take(elapsed, ahead));
    }

    fn with<T>(&self, change: impl FnOnce(&mut Readings) -> T) -> T {
        // No change is left half done by a panic.
        change(&mut self.readings.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Readings {
    fn take(&mut self, elapsed: i64, ahead: i64) {
        if elapsed.saturating_sub(self.since) >= micros(COUNTS_FOR) {
            (self.since, self.before, self.ahead) = (elapsed, self.ahead, None);
        }
        self.ahead = self.ahead.max(Some(ahead));
    }
}

/// Reads the time from each answer to a client.
#[derive(Debug)]
pub(crate) struct Reads(pub(crate) Arc<ServerClock>);

impl Intercept for Reads {
    fn name(&self) -> &'static str {
        "idem-dynamodb: the time of the service"
    }

    fn read_before_deserialization(
        &self,
        context: &BeforeDeserializationInterceptorContextRef<'_>,
        _components: &RuntimeComponents,
        _config: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        // A proxy between gives no such id, and its clock may be any.
        let headers = context.response().headers();
        if let (Some(date), Some(_)) = (headers.get("date"), headers.get("x-amzn-requestid")) {
            self.0.read(date);
        }
        Ok(())
    }
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_the_latest_that_an_answer_names() {
        let clock = ServerClock::new(TimeOffset::default());
        assert_eq!(clock.now().unwrap_err().kind(), StoreErrorKind::Misconfigured);
        for date in ["Sun, 06 Nov 1994 08:49:37 GMT", "Sun, 06 Nov 1994 08:49:36 GMT", "yesterday"] {
            clock.read(date);
        }
        let (now, second) = (clock.now().unwrap().unix_micros(), 784_111_777_000_000);
        assert!((second..second + 60_000_000).contains(&now), "{now}");
    }

    #[test]
    fn an_answer_does_not_count_for_ever() {
        let mut readings = Readings::default();
        let minute = micros(COUNTS_FOR);
        readings.take(0, 1_000);
        readings.take(minute, 900);
        assert_eq!(readings.ahead.max(readings.before), Some(1_000));
        readings.take(minute * 2, 800);
        assert_eq!(readings.ahead.max(readings.before), Some(900));
        // A service whose clock was set back, after a pause.
        readings.take(minute * 9, 100);
        readings.take(minute * 10, 90);
        assert_eq!(readings.ahead.max(readings.before), Some(100));
    }

    #[test]
    fn tests_move_both_clocks() {
        let offset = TimeOffset::default();
        let clock = ServerClock::new(offset.clone());
        clock.read("Sun, 06 Nov 1994 08:49:37 GMT");
        let (now, elapsed) = (clock.now().unwrap(), clock.elapsed());
        offset.advance(Duration::from_secs(3_600));
        assert!(clock.now().unwrap().unix_micros() - now.unix_micros() >= 3_600_000_000);
        assert!(clock.elapsed() - elapsed >= 3_600_000_000);
    }
}
