//! The brokers, chosen by their URLs.

use std::error::Error;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, pull};
use async_nats::jetstream::{self, stream};
use async_trait::async_trait;
use idem_inbox::{KafkaSubscription, NatsSubscription, RabbitMqSubscription, RedisStreamSubscription};
use idem_outbox::{
    KafkaPublisher, MessageToSend, NatsPublisher, Publisher, PublisherError, RabbitMqPublisher, RedisStreamPublisher,
};
use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Connection, ConnectionProperties};
use rdkafka::ClientConfig;
use rdkafka::error::KafkaError;

/// The subject, the queue, or the stream.
pub(crate) const TOPIC: &str = "orders";

const STREAM: &str = "ORDERS";
const CONSUMER: &str = "effects";

/// How long JetStream recognises a message that is sent again: so short that repeats reach the consumer.
const DUPLICATE_WINDOW: Duration = Duration::from_millis(100);

/// How long records are kept, and topics keep messages.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

pub(crate) enum Broker {
    Nats(jetstream::Context),
    RabbitMq(String),
    Redis(redis::Client),
    Kafka(ClientConfig),
}

impl Broker {
    /// Connects, and makes what the broker needs.
    pub(crate) async fn connect(url: &str, lease: Duration) -> Result<Self, Box<dyn Error + Send + Sync>> {
        if url.starts_with("nats://") {
            let context = jetstream::new(async_nats::connect(url).await?);
            let config = stream::Config {
                name: STREAM.into(),
                subjects: vec![TOPIC.into()],
                duplicate_window: DUPLICATE_WINDOW,
                ..Default::default()
            };
            let stream = context.get_or_create_stream(config).await?;
            let config = pull::Config {
                durable_name: Some(CONSUMER.into()),
                ack_policy: AckPolicy::Explicit,
                ack_wait: lease,
                max_ack_pending: 256,
                ..Default::default()
            };
            stream.get_or_create_consumer(CONSUMER, config).await?;
            return Ok(Self::Nats(context));
        }
        if url.starts_with("amqp://") {
            let connection = Connection::connect(url, ConnectionProperties::default()).await?;
            let mut arguments = FieldTable::default();
            arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
            arguments.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
            let options = QueueDeclareOptions { durable: true, ..Default::default() };
            connection.create_channel().await?.queue_declare(TOPIC.into(), options, arguments).await?;
            return Ok(Self::RabbitMq(url.to_owned()));
        }
        if let Some(servers) = url.strip_prefix("kafka://") {
            let mut config = ClientConfig::new();
            config.set("bootstrap.servers", servers);
            return Ok(Self::Kafka(config));
        }
        Ok(Self::Redis(redis::Client::open(url)?))
    }

    pub(crate) async fn publisher(&self) -> Result<Arc<dyn Publisher>, Box<dyn Error + Send + Sync>> {
        Ok(match self {
            Self::Nats(context) => Arc::new(NatsPublisher::new(context.clone())),
            Self::Kafka(config) => Arc::new(KafkaPublisher::new(config.clone())?),
            Self::RabbitMq(url) => Arc::new(RabbitMqPublisher::new(url.as_str(), "")?),
            Self::Redis(client) => Arc::new(RedisStreamPublisher::new(client.get_connection_manager().await?)),
        })
    }
}

pub(crate) async fn nats_subscription(
    context: &jetstream::Context,
) -> Result<NatsSubscription, Box<dyn Error + Send + Sync>> {
    Ok(NatsSubscription::open(&context.get_stream(STREAM).await?, CONSUMER).await?)
}

pub(crate) fn rabbitmq_subscription(url: &str) -> RabbitMqSubscription {
    RabbitMqSubscription::new(url, TOPIC)
}

pub(crate) fn redis_subscription(client: redis::Client, idle: Duration) -> RedisStreamSubscription {
    RedisStreamSubscription::new(client, TOPIC, CONSUMER, "only").idle_limit(idle)
}

pub(crate) fn kafka_subscription(mut config: ClientConfig, session: Duration) -> Result<KafkaSubscription, KafkaError> {
    let [session, heartbeat, join] = [session, session / 5, session * 10].map(|time| time.as_millis().to_string());
    config.set("group.id", CONSUMER).set("session.timeout.ms", session).set("heartbeat.interval.ms", heartbeat);
    // A consumer asks again after this time, and 3 s, if its request to join is not answered: the mock cluster can forget one of a
    // consumer that replaces a killed one. The default is 5 min.
    config.set("max.poll.interval.ms", join);
    KafkaSubscription::new(config, &[TOPIC], DAY)
}

/// Sends each message one to five times, as publishers do that repeat what they have no answer to.
#[derive(Debug)]
pub(crate) struct Repeated(Arc<dyn Publisher>);

impl Repeated {
    pub(crate) fn new(publisher: Arc<dyn Publisher>) -> Self {
        Self(publisher)
    }
}

#[async_trait]
impl Publisher for Repeated {
    async fn publish(&self, message: &MessageToSend) -> Result<(), PublisherError> {
        self.0.publish(message).await?;
        let mut hasher = DefaultHasher::new();
        message.id.hash(&mut hasher);
        let (publisher, message, repeats) = (Arc::clone(&self.0), message.clone(), hasher.finish() % 5);
        tokio::spawn(async move {
            for _ in 0..repeats {
                tokio::time::sleep(2 * DUPLICATE_WINDOW).await;
                let _ = publisher.publish(&message).await;
            }
        });
        Ok(())
    }
}
