//! Messages that wait: in the parking of an inbox, and in an outbox.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use metrics::{Gauge, Label, Recorder};

use crate::register::{INBOX_OBSERVED_AT, INBOX_PARKED, OUTBOX_LAG, OUTBOX_MESSAGES, OUTBOX_OBSERVED_AT, Register};

/// The gauges of an inbox. Record them at an interval of a minute or less: an alert says if ten have passed since.
pub struct InboxGauges {
    parked: Gauge,
    observed_at: Gauge,
}

impl InboxGauges {
    /// The gauges with the label `subscriber="name"`, in the recorder that is installed for the process: install it first.
    #[must_use]
    pub fn new(subscriber: &str) -> Self {
        Self::of(&Register::Installed, subscriber)
    }

    /// The same in this recorder.
    #[must_use]
    pub fn with_recorder(recorder: Arc<dyn Recorder + Send + Sync>, subscriber: &str) -> Self {
        Self::of(&Register::Of(recorder), subscriber)
    }

    fn of(register: &Register, subscriber: &str) -> Self {
        register.describe();
        let labels = || vec![Label::new("subscriber", subscriber.to_owned())];
        let [parked, observed_at] = [INBOX_PARKED, INBOX_OBSERVED_AT].map(|name| register.gauge(name, labels()));
        Self { parked, observed_at }
    }

    /// Records how many messages are parked, such as the length of `Parking::list`.
    ///
    /// `list` reads the payloads, so ask for 100 at most: the gauge then says "100 or more".
    pub fn record(&self, parked: usize) {
        self.parked.set(parked as f64);
        self.observed_at.set(now());
    }
}

impl fmt::Debug for InboxGauges {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("InboxGauges").finish_non_exhaustive()
    }
}

/// The gauges of an outbox. Record them at an interval of a minute or less: an alert says if ten have passed since.
pub struct OutboxGauges {
    messages: Gauge,
    lag: Gauge,
    observed_at: Gauge,
}

impl OutboxGauges {
    /// The gauges with the label `outbox="name"`, in the recorder that is installed for the process: install it first.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self::of(&Register::Installed, name)
    }

    /// The same in this recorder.
    #[must_use]
    pub fn with_recorder(recorder: Arc<dyn Recorder + Send + Sync>, name: &str) -> Self {
        Self::of(&Register::Of(recorder), name)
    }

    fn of(register: &Register, name: &str) -> Self {
        register.describe();
        let labels = || vec![Label::new("outbox", name.to_owned())];
        let gauges = [OUTBOX_MESSAGES, OUTBOX_LAG, OUTBOX_OBSERVED_AT];
        let [messages, lag, observed_at] = gauges.map(|name| register.gauge(name, labels()));
        Self { messages, lag, observed_at }
    }

    /// Records the `messages` and the `lag` of a `Backlog`, which `Outbox::backlog` returns.
    pub fn record(&self, messages: u64, lag: Duration) {
        self.messages.set(messages as f64);
        self.lag.set(lag.as_secs_f64());
        self.observed_at.set(now());
    }
}

impl fmt::Debug for OutboxGauges {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("OutboxGauges").finish_non_exhaustive()
    }
}

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
