//! The relay: sends what is in the outbox, and removes what the broker has confirmed.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::{FutureExt as _, StreamExt as _};
use futures_util::stream;
use tokio::time::{Instant, sleep, timeout};

use crate::message::MessageToSend;
use crate::outbox::{Outbox, StoredMessage};

/// How many messages are claimed at once, and how many of them are sent at once.
const BATCH: NonZeroU32 = NonZeroU32::new(256).unwrap();
const CONCURRENCY: usize = 32;

/// How long to wait for the broker's confirmation of one message, and for those of a batch. A claim lasts for longer.
const CONFIRMATION: Duration = Duration::from_secs(5);
const BATCH_TIME: Duration = Duration::from_secs(15);

/// The first and the longest wait after a failure.
const FIRST_BACKOFF: Duration = Duration::from_millis(500);
const LONGEST_BACKOFF: Duration = Duration::from_secs(30);

/// An error of a broker's client.
pub type PublisherError = Box<dyn std::error::Error + Send + Sync>;

/// Sends messages to a broker.
#[async_trait]
pub trait Publisher: fmt::Debug + Send + Sync + 'static {
    /// Sends a message, and waits until the broker has confirmed that it keeps it.
    ///
    /// The id of the message goes where consumers and the broker find it. The same message may be sent several times.
    ///
    /// # Errors
    /// [`PublisherError`]. The broker may have the message nevertheless.
    async fn publish(&self, message: &MessageToSend) -> Result<(), PublisherError>;
}

/// Sends the messages of an outbox to a broker. Any number of relays may run, in any number of processes; one of them sends at a
/// time.
///
/// Each committed message is sent at least once. Messages of one ordering key are sent in the order of their commits, each after the
/// broker has confirmed the one before it. If a message is refused, those behind it with the same key wait for it. Others do not.
#[derive(Debug)]
pub struct Relay {
    outbox: Arc<dyn Outbox>,
    publisher: Arc<dyn Publisher>,
    poll_interval: Duration,
}

/// What is held back after failures: the ordering key, or the id of a message without one.
type HeldBack = HashMap<String, Failures>;

struct Failures {
    count: u32,
    until: Instant,
}

/// How a batch went.
#[derive(Debug, PartialEq, Eq)]
enum Batch {
    /// It was full and sent: there may be more.
    Full,
    /// Nothing more is due.
    Drained,
    /// Nothing could be sent.
    Failed,
}

impl Relay {
    /// A relay from this outbox to this broker.
    #[must_use]
    pub fn new(outbox: Arc<dyn Outbox>, publisher: Arc<dyn Publisher>) -> Self {
        Self { outbox, publisher, poll_interval: Duration::from_millis(100) }
    }

    /// How often an idle relay asks the outbox, at least every 5 ms. Default 100 ms: a message waits for half of it on average, and an
    /// index lookup that finds nothing costs a database next to nothing.
    #[must_use]
    pub fn poll_interval(mut self, interval: Duration) -> Self {
        self.poll_interval = interval.max(Duration::from_millis(5));
        self
    }

    /// Sends until `shutdown` completes, and then until the messages under way are confirmed.
    ///
    /// # Cancellation safety
    /// If the future is dropped, messages that were sent and not removed are sent again, with the same ids.
    pub async fn run_until(self, shutdown: impl Future<Output = ()> + Send) {
        let mut shutdown = pin!(shutdown);
        let mut held_back = HeldBack::new();
        let mut failures = 0;
        loop {
            let batch = self.send_batch(&mut held_back).await;
            failures = if batch == Batch::Failed { failures + 1 } else { 0 };
            let pause = match batch {
                Batch::Full => Duration::ZERO,
                Batch::Drained => self.poll_interval,
                Batch::Failed => backoff(failures),
            };
            tokio::select! {
                biased;
                () = &mut shutdown => return,
                () = sleep(pause) => {}
            }
        }
    }

    async fn send_batch(&self, held_back: &mut HeldBack) -> Batch {
        let now = Instant::now();
        // Another relay may have sent what failed here.
        held_back.retain(|_, failures| failures.until + LONGEST_BACKOFF > now);
        let held: Vec<String> =
            held_back.iter().filter(|(_, failures)| failures.until > now).map(|(key, _)| key.clone()).collect();
        let claim = match timeout(BATCH_TIME, self.outbox.claim(BATCH, &held)).await {
            Ok(Ok(Some(claim))) => claim,
            Ok(Ok(None)) => return Batch::Drained,
            Ok(Err(error)) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "the outbox could not be read");
                return Batch::Failed;
            }
            Err(_) => {
                tracing::warn!("the outbox did not answer within {BATCH_TIME:?}");
                return Batch::Failed;
            }
        };
        let claimed = claim.messages().len();
        if claimed == 0 {
            return Batch::Drained;
        }
        let (sent, refused) = self.send(claim.messages()).await;
        for key in refused {
            let failures = held_back.entry(key).or_insert(Failures { count: 0, until: now });
            failures.count += 1;
            failures.until = Instant::now() + backoff(failures.count);
        }
        for (key, _) in &sent {
            held_back.remove(key);
        }
        let sequences: Vec<i64> = sent.iter().map(|(_, sequence)| *sequence).collect();
        if let Err(error) = claim.finish(&sequences).await {
            tracing::warn!(error = &error as &dyn std::error::Error, messages = sequences.len(), "sent messages could not be removed, and are sent again");
            return Batch::Failed;
        }
        match sequences.len() {
            0 => Batch::Failed,
            _ if claimed == BATCH.get() as usize => Batch::Full,
            _ => Batch::Drained,
        }
    }

    /// Sends messages: those of a key one after the other, up to the first that fails. Returns the keys and places of those that were
    /// sent, and the keys of those that failed.
    async fn send(&self, messages: &[StoredMessage]) -> (Vec<(String, i64)>, Vec<String>) {
        let end = Instant::now() + BATCH_TIME;
        let mut lanes: Vec<(&str, Vec<&StoredMessage>)> = Vec::new();
        let mut places: HashMap<&str, usize> = HashMap::new();
        for stored in messages {
            let key = key_of(&stored.message);
            let place = *places.entry(key).or_insert_with(|| {
                lanes.push((key, Vec::new()));
                lanes.len() - 1
            });
            lanes[place].1.push(stored);
        }
        let (mut all, mut refused) = (Vec::new(), Vec::new());
        let lanes: Vec<_> = lanes.into_iter().map(|(key, lane)| self.send_lane(key, lane, end).boxed()).collect();
        let mut lanes = stream::iter(lanes).buffer_unordered(CONCURRENCY);
        while let Some(Lane { key, sent, has_failed }) = lanes.next().await {
            all.extend(sent.into_iter().map(|sequence| (key.to_owned(), sequence)));
            if has_failed {
                refused.push(key.to_owned());
            }
        }
        (all, refused)
    }

    /// Sends the messages of a key until one fails, or until this time.
    async fn send_lane<'a>(&self, key: &'a str, messages: Vec<&StoredMessage>, end: Instant) -> Lane<'a> {
        let mut sent = Vec::new();
        for StoredMessage { sequence, message } in messages {
            if Instant::now() >= end {
                break;
            }
            let confirmed = timeout(CONFIRMATION, self.publisher.publish(message)).await;
            if let Err(error) = confirmed.unwrap_or_else(|late| Err(late.into())) {
                let (id, topic) = (&message.id, &message.topic);
                tracing::warn!(error = &*error as &dyn std::error::Error, message = id, topic, "a message could not be sent; it is tried again");
                return Lane { key, sent, has_failed: true };
            }
            sent.push(*sequence);
        }
        Lane { key, sent, has_failed: false }
    }
}

/// How it went with the messages of a key.
struct Lane<'a> {
    key: &'a str,
    sent: Vec<i64>,
    has_failed: bool,
}

/// What has to wait for a message: those with its ordering key, or itself.
pub(crate) fn key_of(message: &MessageToSend) -> &str {
    message.ordering_key.as_deref().unwrap_or(&message.id)
}

fn backoff(failures: u32) -> Duration {
    FIRST_BACKOFF.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(LONGEST_BACKOFF)
}
