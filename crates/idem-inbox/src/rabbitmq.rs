//! Messages of a queue of RabbitMQ.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt as _;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ConnectionProperties};
use uuid::Uuid;

use crate::consumer::{BrokerError, Receipt, Subscription};
use crate::message::Message;
use crate::settings::SUSPECT_FROM;

/// The header field with the ordering key of a message. Without it the routing key is the ordering key.
const ORDERING_KEY: &str = "Idem-Ordering-Key";

/// The header field in which a quorum queue counts how often it has delivered a message before.
const DELIVERY_COUNT: &str = "x-delivery-count";

/// The messages of a queue of RabbitMQ.
///
/// The id of a message is its property `message_id`. A message without one is parked, as its repeats could not be recognised.
///
/// Prefer a quorum queue: it counts deliveries, by which messages are recognised that kill their process. For a classic queue each
/// repeated delivery counts as a suspect. Set the delivery limit of a quorum queue to `-1`, or so high that the
/// inbox parks a message before the queue drops it.
///
/// # Order
/// A queue has one order. It holds if one consumer has the queue: declare it with `x-single-active-consumer`.
pub struct RabbitMqSubscription {
    url: String,
    queue: String,
    prefetch: u16,
    consumer: Option<Consumer>,
    is_ordered: bool,
}

struct Consumer {
    messages: lapin::Consumer,
    open: Arc<Open>,
}

/// What is open until the last of its messages has ended. What was received and not acknowledged then returns to the queue, in
/// order.
struct Open {
    channel: Channel,
    consumer: lapin::Consumer,
    _connection: Connection,
}

/// Tells RabbitMQ about a message.
pub struct RabbitMqReceipt {
    delivery: Delivery,
    _open: Arc<Open>,
    is_ordered: bool,
}

impl RabbitMqSubscription {
    /// The messages of a queue that exists, at a server such as `amqp://user:password@host:5672/%2f`.
    ///
    /// It connects when the first message is received, and again after an error.
    #[must_use]
    pub fn new(url: impl Into<String>, queue: impl Into<String>) -> Self {
        Self { url: url.into(), queue: queue.into(), prefetch: 256, consumer: None, is_ordered: false }
    }

    /// How many unacknowledged messages the server sends. Default 256, what a consumer holds by default. Set it to what the consumer
    /// [holds](crate::Consumer::max_held) if you lower that: at a stop, further messages return to the queue when the last handler has ended.
    #[must_use]
    pub fn prefetch(mut self, limit: u16) -> Self {
        self.prefetch = limit;
        self
    }

    async fn connect(&self) -> Result<Consumer, lapin::Error> {
        let connection = Connection::connect(&self.url, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        channel.basic_qos(self.prefetch, BasicQosOptions::default()).await?;
        let tag = format!("idem-inbox-{}", Uuid::new_v4());
        let options = BasicConsumeOptions::default();
        let messages =
            channel.basic_consume(self.queue.as_str().into(), tag.into(), options, FieldTable::default()).await?;
        let open = Open { channel, consumer: messages.clone(), _connection: connection };
        Ok(Consumer { messages, open: Arc::new(open) })
    }

    async fn next(&mut self) -> Result<(Delivery, Arc<Open>), BrokerError> {
        let consumer = match &mut self.consumer {
            Some(consumer) => consumer,
            None => {
                let consumer = self.connect().await?;
                self.consumer.insert(consumer)
            }
        };
        match consumer.messages.next().await {
            Some(Ok(delivery)) => Ok((delivery, Arc::clone(&consumer.open))),
            Some(Err(error)) => {
                self.consumer = None;
                Err(error.into())
            }
            None => {
                self.consumer = None;
                Err("the server has cancelled the consumer".into())
            }
        }
    }
}

#[async_trait]
impl Subscription for RabbitMqSubscription {
    type Receipt = RabbitMqReceipt;

    async fn receive(&mut self) -> Result<(Message, RabbitMqReceipt), BrokerError> {
        let (mut delivery, open) = self.next().await?;
        Ok((message(&mut delivery), RabbitMqReceipt { delivery, _open: open, is_ordered: self.is_ordered }))
    }

    async fn close(self) {
        // A cancelled consumer keeps its messages, but the next one would begin with younger ones.
        let Some(Consumer { open, .. }) = self.consumer.as_ref().filter(|_| !self.is_ordered) else { return };
        let cancelled = open.channel.basic_cancel(open.consumer.tag(), Default::default()).await;
        if let Err(error) = cancelled {
            tracing::debug!(
                error = &error as &dyn std::error::Error,
                "the consumer was not cancelled; it ends with its channel"
            );
        }
    }

    fn keep_order(&mut self) {
        self.is_ordered = true;
    }

    fn longest_redelivery(&self) -> Option<Duration> {
        None
    }

    fn hold_every(&self) -> Option<Duration> {
        None
    }

    fn can_delay(&self) -> bool {
        false
    }
}

/// The message of a delivery, whose content it takes.
fn message(delivery: &mut Delivery) -> Message {
    let payload = Bytes::from(std::mem::take(&mut delivery.data));
    let properties = &delivery.properties;
    let headers = properties.headers().iter().flat_map(|table| table.inner()).filter_map(|(name, value)| {
        let value = match value {
            AMQPValue::LongString(text) => Bytes::copy_from_slice(text.as_bytes()),
            AMQPValue::ShortString(text) => Bytes::copy_from_slice(text.as_str().as_bytes()),
            AMQPValue::ByteArray(bytes) => Bytes::copy_from_slice(bytes.as_slice()),
            _ => return None,
        };
        Some((name.as_str().to_owned(), value))
    });
    let count = properties.headers().as_ref().and_then(|table| table.inner().get(DELIVERY_COUNT)).and_then(integer);
    let topic = delivery.routing_key.as_str();
    let id = properties.message_id().as_ref().map(|id| id.as_str()).unwrap_or_default();
    let published =
        properties.timestamp().and_then(|seconds| SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds)));
    let mut message = Message {
        headers: headers.collect(),
        delivery: match count {
            Some(before) => u32::try_from(before).unwrap_or(u32::MAX).saturating_add(1),
            None if delivery.redelivered => SUSPECT_FROM,
            None => 1,
        },
        age: published.and_then(|published| SystemTime::now().duration_since(published).ok()),
        ..Message::new(id, topic, payload)
    };
    let key = message.header(ORDERING_KEY).map(|key| String::from_utf8_lossy(key).into_owned());
    message.ordering_key = Some(key.unwrap_or_else(|| topic.to_owned()));
    message
}

fn integer(value: &AMQPValue) -> Option<i64> {
    match *value {
        AMQPValue::ShortShortInt(count) => Some(count.into()),
        AMQPValue::ShortShortUInt(count) => Some(count.into()),
        AMQPValue::ShortInt(count) => Some(count.into()),
        AMQPValue::ShortUInt(count) => Some(count.into()),
        AMQPValue::LongInt(count) => Some(count.into()),
        AMQPValue::LongUInt(count) => Some(count.into()),
        AMQPValue::LongLongInt(count) => Some(count),
        _ => None,
    }
}

#[async_trait]
impl Receipt for RabbitMqReceipt {
    async fn ack(&self) -> Result<(), BrokerError> {
        told(self.delivery.ack(BasicAckOptions::default()).await)
    }

    async fn give_back(&self, _delay: Duration) -> Result<(), BrokerError> {
        if self.is_ordered {
            // All return in order when the channel is closed, as this consumer stops.
            return Ok(());
        }
        told(self.delivery.nack(BasicNackOptions { requeue: true, ..Default::default() }).await)
    }

    async fn hold(&self) -> Result<(), BrokerError> {
        Ok(())
    }
}

/// The client answers `false` if the channel of the message has ended.
fn told(told: Result<bool, lapin::Error>) -> Result<(), BrokerError> {
    if told? { Ok(()) } else { Err("the channel of the message has ended".into()) }
}

impl fmt::Debug for RabbitMqSubscription {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may hold a password.
        formatter.debug_struct("RabbitMqSubscription").field("queue", &self.queue).finish_non_exhaustive()
    }
}

impl fmt::Debug for RabbitMqReceipt {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("RabbitMqReceipt").finish_non_exhaustive()
    }
}
