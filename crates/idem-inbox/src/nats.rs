//! Messages of NATS JetStream.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_nats::jetstream::consumer::{AckPolicy, PullConsumer, pull};
use async_nats::jetstream::stream::Stream;
use async_nats::jetstream::{self, AckKind};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{FutureExt as _, StreamExt as _};
use tokio::time::{Instant, timeout_at};

use crate::consumer::{BrokerError, Receipt, Subscription};
use crate::message::Message;

/// The header field with the id of a message. The server recognises repeats by it for the duplicate window of the stream.
const ID: &str = "Nats-Msg-Id";

/// The header field with the ordering key of a message. Without it the subject is the key.
const ORDERING_KEY: &str = "Idem-Ordering-Key";

/// How many messages the client asks for at once. They wait in its buffer, where they are not held.
const BATCH: usize = 32;

/// How long a message is not delivered again that was given back. By then this subscription has ended. Otherwise
/// the server would deliver to it, and wait for the `ack_wait`.
const GIVEN_BACK: Duration = Duration::from_millis(500);

/// How long messages that are missing are waited for, in times of the `ack_wait`, from when one of them came last, or the server was away.
const PATIENCE: u32 = 10;

/// The longest delay. The server takes one that is too large as none.
const LONGEST_DELAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The messages of a durable pull consumer of JetStream.
///
/// The id of a message is its `Nats-Msg-Id`, or else the name and creation of the stream and its sequence number, by which no message that was
/// published twice is recognised.
///
/// # Order
/// JetStream delivers newer messages before those that a stopped process had received. If order was asked for, the subscription
/// waits at its start until it has all of them, which takes the `ack_wait` of the consumer. It does so again after
/// a lost connection. If another process holds one of them, it waits for ten times the `ack_wait`: only one process may consume
/// then.
pub struct NatsSubscription {
    consumer: PullConsumer,
    stream: String,
    /// The name and the time of its creation: another stream of this name has other messages.
    stream_id: String,
    max_age: Option<Duration>,
    ack_wait: Duration,
    messages: Option<pull::Stream>,
    order: Option<Order>,
}

/// What is known of a consumer whose messages have to be in order.
#[derive(Default)]
struct Order {
    /// The number of the delivery that has to be next; `None` if some may be missing.
    next_delivery: Option<u64>,
    /// Messages that were received and not acknowledged.
    held: Held,
    /// Messages that were received while others were missing.
    collected: BTreeMap<u64, jetstream::Message>,
    /// Since when messages are waited for, and the last one of the stream that was delivered then; `None` if none is missing, or the
    /// server was away.
    waiting: Option<(Instant, u64)>,
    /// Messages that nothing is missing before.
    ready: VecDeque<(u64, jetstream::Message)>,
}

/// Stream sequences, shared with the receipts. True for those whose acknowledgment is under way.
type Held = Arc<Mutex<BTreeMap<u64, bool>>>;

/// Tells JetStream about a message.
pub struct NatsReceipt {
    message: jetstream::Message,
    held: Option<(u64, Held)>,
}

/// A consumer of JetStream that would lose messages.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NatsError {
    /// The server cannot be asked, or has no such consumer.
    #[error("the consumer `{name}` could not be looked up")]
    Lookup {
        /// Its name.
        name: String,
        /// Why.
        source: BrokerError,
    },
    /// Messages count as handled when they are delivered.
    #[error("the consumer `{name}` has not the ack policy `explicit`, so that a message could be lost; set it")]
    AckPolicy {
        /// Its name.
        name: String,
    },
    /// The server drops messages that were delivered too often.
    #[error(
        "the consumer `{name}` has max_deliver {max_deliver}, after which the server drops a message; set it to -1, as the \
         inbox parks messages that cannot be handled"
    )]
    MaxDeliver {
        /// Its name.
        name: String,
        /// Its setting.
        max_deliver: i64,
    },
}

impl NatsSubscription {
    /// The messages of the durable pull consumer `name` of `stream`.
    ///
    /// # Errors
    /// [`NatsError`].
    pub async fn open(stream: &Stream, name: &str) -> Result<Self, NatsError> {
        let name = || name.to_owned();
        let consumer: PullConsumer =
            stream.get_consumer(&name()).await.map_err(|source| NatsError::Lookup { name: name(), source })?;
        let config = &consumer.cached_info().config;
        if config.ack_policy != AckPolicy::Explicit {
            return Err(NatsError::AckPolicy { name: name() });
        }
        if config.max_deliver > 0 {
            return Err(NatsError::MaxDeliver { name: name(), max_deliver: config.max_deliver });
        }
        let ack_wait = config.backoff.iter().copied().min().unwrap_or(config.ack_wait);
        let info = stream.cached_info();
        let max_age = Some(info.config.max_age).filter(|age| !age.is_zero());
        let stream = info.config.name.clone();
        let created = SystemTime::from(info.created).duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let stream_id = format!("{stream}:{}", created.as_micros());
        Ok(Self { stream, stream_id, max_age, ack_wait, consumer, messages: None, order: None })
    }

    async fn next(&mut self) -> Result<jetstream::Message, BrokerError> {
        let messages = match &mut self.messages {
            Some(messages) => messages,
            none => none.insert(self.consumer.stream().max_messages_per_batch(BATCH).messages().await?),
        };
        match messages.next().await {
            Some(Ok(message)) => Ok(message),
            Some(Err(error)) => {
                self.messages = None;
                Err(error.into())
            }
            None => {
                self.messages = None;
                Err("the stream of messages has ended".into())
            }
        }
    }

    /// The next message in the order of the stream, with its sequence.
    async fn next_in_order(&mut self) -> Result<(u64, jetstream::Message), BrokerError> {
        loop {
            if let Some(ready) = self.order_mut().ready.pop_front() {
                return Ok(ready);
            }
            if self.order_mut().next_delivery.is_none() {
                self.collect().await?;
                continue;
            }
            let message = self.next().await?;
            let info = message.info()?;
            let (sequence, delivery) = (info.stream_sequence, info.consumer_sequence);
            let order = self.order_mut();
            if order.next_delivery == Some(delivery) {
                order.next_delivery = Some(delivery + 1);
                return Ok((sequence, message));
            }
            tracing::info!(
                stream = self.stream,
                sequence,
                "messages are missing; the subscription waits for them, to keep the order"
            );
            let order = self.order_mut();
            order.next_delivery = None;
            order.collected.insert(sequence, message);
        }
    }

    /// Receives messages until none is missing that the server has delivered before.
    ///
    /// A message that was delivered and is not held here is delivered again after the `ack_wait`. If it does not come, the server is
    /// asked again: it may have been away. After [`PATIENCE`] it is given up: another process may hold it.
    async fn collect(&mut self) -> Result<(), BrokerError> {
        let sure = |held: &Held| -> BTreeSet<u64> {
            lock(held).iter().filter(|(_, is_being_told)| !**is_being_told).map(|(sequence, _)| *sequence).collect()
        };
        let held = Arc::clone(&self.order_mut().held);
        let before = sure(&held);
        let info = match self.consumer.get_info().await {
            Ok(info) => info,
            Err(error) => {
                self.order_mut().waiting = None;
                return Err(error.into());
            }
        };
        let (delivered, last) = (info.delivered.consumer_sequence, info.delivered.stream_sequence);
        // What waits for an acknowledgment now, as far as it is known here.
        let mut known: BTreeSet<u64> = before.intersection(&sure(&held)).copied().collect();
        known.extend(self.order_mut().collected.keys());
        known.retain(|sequence| *sequence <= last);
        let mut next = delivered + 1;
        let (now, patience) = (Instant::now(), PATIENCE * self.ack_wait);
        let (_, missing_up_to) = *self.order_mut().waiting.get_or_insert((now, last));
        let until = now + 2 * self.ack_wait;
        let is_over = move |order: &Order| order.waiting.is_some_and(|(since, _)| since.elapsed() >= patience);
        while known.len() < info.num_ack_pending {
            let Ok(message) = timeout_at(until, self.next()).await else {
                let (stream, missing) = (self.stream.clone(), info.num_ack_pending - known.len());
                if !is_over(self.order_mut()) {
                    tracing::info!(stream, missing, "messages that were delivered before have not come again yet");
                    return Ok(());
                }
                tracing::warn!(
                    stream,
                    missing,
                    "messages that were delivered before did not come again; if they come later, they are out of order"
                );
                break;
            };
            let message = message?;
            let received = message.info()?;
            let (sequence, delivery) = (received.stream_sequence, received.consumer_sequence);
            let is_gap = delivery > next;
            next = next.max(delivery + 1);
            if sequence <= last && known.insert(sequence) && sequence <= missing_up_to {
                self.order_mut().waiting = Some((Instant::now(), missing_up_to));
            }
            let order = self.order_mut();
            order.collected.insert(sequence, message);
            if is_gap && !is_over(order) {
                // Something that was delivered meanwhile is missing, so the server is asked again.
                return Ok(());
            }
        }
        let order = self.order_mut();
        order.next_delivery = Some(next);
        order.waiting = None;
        let collected = std::mem::take(&mut order.collected);
        let held = lock(&held);
        order.ready.extend(collected.into_iter().filter(|(sequence, _)| !held.contains_key(sequence)));
        Ok(())
    }

    /// Used if order was asked for only.
    fn order_mut(&mut self) -> &mut Order {
        self.order.get_or_insert_default()
    }

    fn message(&self, message: &jetstream::Message) -> Result<Message, BrokerError> {
        let info = message.info()?;
        let fields = message.headers.iter().flat_map(|headers| headers.iter());
        let headers: Vec<_> = fields
            .flat_map(|(name, values)| values.iter().map(move |value| (name.to_string(), value)))
            .map(|(name, value)| (name, Bytes::copy_from_slice(value.as_str().as_bytes())))
            .collect();
        let text = |name: &str| message.headers.as_ref()?.get(name).map(|value| value.as_str().to_owned());
        let id = text(ID).unwrap_or_else(|| format!("{}:{}", self.stream_id, info.stream_sequence));
        let topic = message.subject.to_string();
        Ok(Message {
            ordering_key: Some(text(ORDERING_KEY).unwrap_or_else(|| topic.clone())),
            headers,
            delivery: u32::try_from(info.delivered).unwrap_or(u32::MAX),
            age: SystemTime::now().duration_since(SystemTime::from(info.published)).ok(),
            ..Message::new(id, topic, message.payload.clone())
        })
    }
}

#[async_trait]
impl Subscription for NatsSubscription {
    type Receipt = NatsReceipt;

    async fn receive(&mut self) -> Result<(Message, NatsReceipt), BrokerError> {
        let (message, held) = if self.order.is_some() {
            let (sequence, message) = self.next_in_order().await?;
            let held = Arc::clone(&self.order_mut().held);
            lock(&held).insert(sequence, false);
            (message, Some((sequence, held)))
        } else {
            (self.next().await?, None)
        };
        Ok((self.message(&message)?, NatsReceipt { message, held }))
    }

    async fn close(mut self) {
        let ready = self.order.take().map(|order| order.ready.into_iter().chain(order.collected));
        let mut open: Vec<_> = ready.into_iter().flatten().map(|(_, message)| message).collect();
        // The client asks for more while it is drained, so not without an end.
        for _ in 0..2 * BATCH {
            let Some(messages) = &mut self.messages else { break };
            let Some(Some(Ok(message))) = messages.next().now_or_never() else { break };
            open.push(message);
        }
        for message in open {
            if let Err(error) = message.double_ack_with(AckKind::Nak(Some(GIVEN_BACK))).await {
                tracing::debug!(
                    error = &*error as &dyn std::error::Error,
                    "a message was not given back; the server delivers it again"
                );
            }
        }
    }

    fn keep_order(&mut self) {
        self.order_mut();
    }

    fn hold_every(&self) -> Option<Duration> {
        Some(self.ack_wait / 3)
    }

    fn can_delay(&self) -> bool {
        true
    }

    fn longest_redelivery(&self) -> Option<Duration> {
        self.max_age
    }
}

impl NatsReceipt {
    /// Waits for the server's answer.
    async fn tell(&self, kind: AckKind) -> Result<(), BrokerError> {
        if let Some((sequence, held)) = &self.held {
            lock(held).insert(*sequence, true);
        }
        let told = self.message.double_ack_with(kind).await;
        if let Some((sequence, held)) = &self.held {
            lock(held).remove(sequence);
        }
        told
    }
}

#[async_trait]
impl Receipt for NatsReceipt {
    /// Without an order, the server's answer is not awaited: it costs a round trip for each message, and if the acknowledgment is
    /// lost, the record answers the next delivery. With an order, the subscription has to know what is acknowledged.
    async fn ack(&self) -> Result<(), BrokerError> {
        if self.held.is_some() {
            return self.tell(AckKind::Ack).await;
        }
        self.message.ack().await?;
        // What is only in the client's buffer would be lost if the process ended now.
        Ok(self.message.context.client().flush().await?)
    }

    async fn give_back(&self, delay: Duration) -> Result<(), BrokerError> {
        self.tell(AckKind::Nak(Some(delay.clamp(GIVEN_BACK, LONGEST_DELAY)))).await
    }

    async fn hold(&self) -> Result<(), BrokerError> {
        self.message.ack_with(AckKind::Progress).await
    }
}

fn lock(held: &Held) -> MutexGuard<'_, BTreeMap<u64, bool>> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for NatsSubscription {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("NatsSubscription")
            .field("stream", &self.stream)
            .field("consumer", &self.consumer.cached_info().name)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for NatsReceipt {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("NatsReceipt").field("subject", &self.message.subject).finish_non_exhaustive()
    }
}
