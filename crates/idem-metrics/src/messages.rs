//! Messages that wait: in the parking of an inbox, and in an outbox.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use metrics::{Gauge, Label, Recorder};

use crate::register::{INBOX_PARKED, OUTBOX_LAG, OUTBOX_MESSAGES, Register};

/// The gauge of an inbox. Record it at an interval.
pub struct InboxGauges {
    parked: Gauge,
}

impl InboxGauges {
    /// The gauge with the label `subscriber="name"`, in the recorder that is installed for the process: install it first.
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
        Self { parked: register.gauge(INBOX_PARKED, vec![Label::new("subscriber", subscriber.to_owned())]) }
    }

    /// Records how many messages are parked, such as the length of `Parking::list`.
    ///
    /// `list` reads the payloads, so ask for 100 at most: the gauge then says "100 or more".
    pub fn record(&self, parked: usize) {
        self.parked.set(parked as f64);
    }
}

impl fmt::Debug for InboxGauges {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("InboxGauges").finish_non_exhaustive()
    }
}

/// The gauges of an outbox. Record them at an interval.
pub struct OutboxGauges {
    messages: Gauge,
    lag: Gauge,
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
        Self { messages: register.gauge(OUTBOX_MESSAGES, labels()), lag: register.gauge(OUTBOX_LAG, labels()) }
    }

    /// Records the `messages` and the `lag` of a `Backlog`, which `Outbox::backlog` returns.
    pub fn record(&self, messages: u64, lag: Duration) {
        self.messages.set(messages as f64);
        self.lag.set(lag.as_secs_f64());
    }
}

impl fmt::Debug for OutboxGauges {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("OutboxGauges").finish_non_exhaustive()
    }
}
