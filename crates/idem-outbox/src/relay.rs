//! The relay: sends what is in the outbox, and removes what the broker has confirmed.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream;
use futures_util::{FutureExt as _, StreamExt as _};
use tokio::time::{Instant, sleep, timeout};

use crate::message::MessageToSend;
use crate::outbox::{Outbox, StoredMessage};

/// How many messages are claimed at once, and how many of them are sent at once.
const BATCH: NonZeroU32 = NonZeroU32::new(256).unwrap();
const CONCURRENCY: usize = 32;

/// How long to wait for the broker's confirmation of one message, and for those of a batch. A claim lasts for longer.
const CONFIRMATION: Duration = Duration::from_secs(5);
const BATCH_TIME: Duration = Duration::from_secs(10);

/// The first and the longest wait after a failure.
const FIRST_BACKOFF: Duration = Duration::from_millis(500);
const LONGEST_BACKOFF: Duration = Duration::from_secs(30);

/// How many batches without a single success are tried one after the other, before the broker counts as unavailable.
const MOST_REFUSED: u32 = 16;

/// From how many failures on a message does not count as a victim of an outage any more.
const REFUSED: u32 = 3;

/// An error of a broker's client.
pub type PublisherError = Box<dyn std::error::Error + Send + Sync>;

/// Sends messages to a broker.
#[async_trait]
pub trait Publisher: fmt::Debug + Send + Sync + 'static {
    /// Sends a message, and waits until the broker has confirmed that it keeps it.
    ///
    /// The id of the message goes where consumers and the broker find it. The same message may be sent several times. Several messages
    /// are sent at once. The future is dropped if the confirmation takes longer than five seconds.
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

/// Keys that are held back after failures.
#[derive(Debug, Default)]
struct HeldBack(HashMap<String, Failures>);

#[derive(Debug)]
struct Failures {
    count: u32,
    until: Instant,
}

/// How a batch went.
enum Batch {
    /// Some messages were sent: there may be more.
    Sent,
    /// There is nothing to send.
    Empty,
    /// Nothing could be read or removed.
    Unavailable,
    /// Messages were claimed, and none of them could be sent.
    Refused,
}

/// How it went with the messages of a key.
struct Lane<'a> {
    key: &'a str,
    sent: Vec<i64>,
    has_failed: bool,
}

impl Relay {
    /// A relay from this outbox to this broker.
    #[must_use]
    pub fn new(outbox: Arc<dyn Outbox>, publisher: Arc<dyn Publisher>) -> Self {
        Self { outbox, publisher, poll_interval: Duration::from_millis(100) }
    }

    /// How often an idle relay asks the outbox, at least every 5 ms. Default 100 ms: a message waits for half of it on average, and a
    /// lookup that finds nothing costs a database next to nothing.
    #[must_use]
    pub fn poll_interval(mut self, interval: Duration) -> Self {
        self.poll_interval = interval.max(Duration::from_millis(5));
        self
    }

    /// Sends until `shutdown` completes, and then until the messages under way are confirmed, which takes five seconds at most, and
    /// removed.
    ///
    /// # Cancellation safety
    /// If the future is dropped, messages that were sent and not removed are sent again, with the same ids.
    pub async fn run_until(self, shutdown: impl Future<Output = ()> + Send) {
        let mut shutdown = pin!(shutdown);
        let is_stopping = AtomicBool::new(false);
        let mut held_back = HeldBack::default();
        let (mut failures, mut refused) = (0, 0);
        loop {
            let batch = {
                let mut batch = pin!(self.send_batch(&mut held_back, failures, &is_stopping));
                tokio::select! {
                    biased;
                    () = &mut shutdown => {
                        is_stopping.store(true, Ordering::Relaxed);
                        batch.await;
                        return;
                    }
                    batch = &mut batch => batch,
                }
            };
            let pause = match batch {
                Batch::Sent => {
                    (failures, refused) = (0, 0);
                    continue;
                }
                Batch::Empty => {
                    refused = 0;
                    self.poll_interval
                }
                // The next ones have other keys.
                Batch::Refused if refused < MOST_REFUSED => {
                    refused += 1;
                    continue;
                }
                Batch::Refused | Batch::Unavailable => {
                    failures += 1;
                    refused = 0;
                    backoff(failures)
                }
            };
            tokio::select! {
                biased;
                () = &mut shutdown => return,
                () = sleep(pause) => {}
            }
        }
    }

    /// Sends a batch, after so many failures.
    async fn send_batch(&self, held_back: &mut HeldBack, failures: u32, is_stopping: &AtomicBool) -> Batch {
        let claim = match timeout(BATCH_TIME, self.outbox.claim(BATCH, &held_back.keys())).await {
            Ok(Ok(Some(claim))) => claim,
            Ok(Ok(None)) => return Batch::Empty,
            Ok(Err(error)) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "the outbox could not be read");
                return Batch::Unavailable;
            }
            Err(_) => {
                tracing::warn!("the outbox did not answer within {BATCH_TIME:?}");
                return Batch::Unavailable;
            }
        };
        let mut sent = Vec::new();
        let mut refused = Vec::new();
        for lane in self.send(claim.messages(), is_stopping).await {
            if !lane.sent.is_empty() {
                held_back.0.remove(lane.key);
            }
            sent.extend(lane.sent);
            if lane.has_failed {
                refused.push(lane.key.to_owned());
            }
        }
        // If nothing was sent, the next batches have other messages: these may be refused, and the broker well.
        let least = if sent.is_empty() { 2 * backoff(failures + 1) } else { Duration::ZERO };
        held_back.hold(refused, least);
        if failures > 0 && !sent.is_empty() {
            held_back.release_victims();
        }
        if let Err(error) = claim.finish(&sent).await {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                messages = sent.len(),
                "sent messages could not be removed, and are sent again"
            );
            return Batch::Unavailable;
        }
        if sent.is_empty() { Batch::Refused } else { Batch::Sent }
    }

    /// Sends messages: those of a key one after the other, up to the first that fails.
    async fn send<'a>(&self, messages: &'a [StoredMessage], is_stopping: &AtomicBool) -> Vec<Lane<'a>> {
        let end = Instant::now() + BATCH_TIME;
        let mut lanes: Vec<(&str, Vec<&StoredMessage>)> = Vec::new();
        let mut places: HashMap<&str, usize> = HashMap::new();
        for stored in messages {
            let place = *places.entry(&stored.key).or_insert_with(|| {
                lanes.push((&stored.key, Vec::new()));
                lanes.len() - 1
            });
            lanes[place].1.push(stored);
        }
        let lanes = lanes.into_iter().map(|(key, lane)| self.send_lane(key, lane, end, is_stopping).boxed());
        stream::iter(lanes.collect::<Vec<_>>()).buffer_unordered(CONCURRENCY).collect().await
    }

    /// Sends the messages of a key until one fails, until this time, or until the relay stops.
    async fn send_lane<'a>(
        &self,
        key: &'a str,
        messages: Vec<&StoredMessage>,
        end: Instant,
        is_stopping: &AtomicBool,
    ) -> Lane<'a> {
        let mut sent = Vec::new();
        for StoredMessage { sequence, message, .. } in messages {
            if Instant::now() >= end || is_stopping.load(Ordering::Relaxed) {
                break;
            }
            if let Err(error) = self.publish(message).await {
                tracing::warn!(
                    error = &*error as &dyn std::error::Error,
                    key,
                    sequence,
                    "a message could not be sent; it is tried again"
                );
                return Lane { key, sent, has_failed: true };
            }
            sent.push(*sequence);
        }
        Lane { key, sent, has_failed: false }
    }

    async fn publish(&self, message: &Result<MessageToSend, idem_core::StoreError>) -> Result<(), PublisherError> {
        let message = message.as_ref().map_err(Clone::clone)?;
        // A client that panics on one message must not end the relay.
        let publish = AssertUnwindSafe(self.publisher.publish(message)).catch_unwind();
        timeout(CONFIRMATION, publish).await?.unwrap_or_else(|_| Err("the broker's client panicked".into()))
    }
}

impl HeldBack {
    /// The keys that are held back now.
    fn keys(&mut self) -> Vec<String> {
        let now = Instant::now();
        // Another relay may have sent what failed here.
        self.0.retain(|_, failures| failures.until + 2 * LONGEST_BACKOFF > now);
        self.0.iter().filter(|(_, failures)| failures.until > now).map(|(key, _)| key.clone()).collect()
    }

    /// Holds keys back after another failure, for at least this long.
    fn hold(&mut self, keys: Vec<String>, least: Duration) {
        let now = Instant::now();
        for key in keys {
            let failures = self.0.entry(key).or_insert(Failures { count: 0, until: now });
            failures.count += 1;
            failures.until = now + backoff(failures.count).max(least);
        }
    }

    /// After an outage of the broker, those that may have failed because of it are tried again at once.
    fn release_victims(&mut self) {
        let now = Instant::now();
        for failures in self.0.values_mut().filter(|failures| failures.count < REFUSED) {
            failures.until = now;
        }
    }
}

fn backoff(failures: u32) -> Duration {
    FIRST_BACKOFF.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(LONGEST_BACKOFF)
}
