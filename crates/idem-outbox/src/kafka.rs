//! Sends messages to Kafka.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use rdkafka::ClientConfig;
use rdkafka::error::KafkaError;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};

use crate::message::MessageToSend;
use crate::relay::{Publisher, PublisherError};

/// The header field by which `idem-inbox` recognises a message.
const ID: &str = "Idem-Message-Id";

/// For how long the client tries, and for how long it may find no place in its queue. It looks for expired messages once a second.
/// Together that is less than what the relay waits for, so that the client sends nothing that the relay has given up.
const TIMEOUT_MS: &str = "3000";
const QUEUE_TIMEOUT: Duration = Duration::from_millis(500);

/// What a broker takes by default. The client's own default is smaller than the largest message of an outbox.
const LARGEST_BYTES: &str = "1048588";

/// Sends messages to Kafka. The topic is the topic, and the key is the ordering key, or else the id.
///
/// A message counts as sent when all replicas that are in sync have it. Features of the crate `rdkafka` choose further libraries:
/// `ssl` and `sasl` for servers that ask for it, `libz` and `zstd` for such a `compression.type`.
#[derive(Clone)]
pub struct KafkaPublisher {
    shared: Arc<Shared>,
}

struct Shared {
    config: ClientConfig,
    /// `None` after a fatal error, until the next message.
    client: Mutex<Option<Arc<Client>>>,
}

/// A client, which takes up to half a second to end.
struct Client {
    /// `None` at the end.
    producer: Option<FutureProducer>,
}

impl KafkaPublisher {
    /// A publisher with this configuration, which names the servers. It sets `enable.idempotence` and the `message.timeout.ms`, and a
    /// `message.max.bytes` if there is none.
    ///
    /// # Errors
    /// [`KafkaError`] when the configuration is invalid.
    pub fn new(mut config: ClientConfig) -> Result<Self, KafkaError> {
        // Another name of the timeout.
        config.remove("delivery.timeout.ms");
        config.set("enable.idempotence", "true").set("message.timeout.ms", TIMEOUT_MS);
        if config.get("message.max.bytes").is_none() {
            config.set("message.max.bytes", LARGEST_BYTES);
        }
        let client = Mutex::new(Some(Arc::new(Client { producer: Some(config.create()?) })));
        Ok(Self { shared: Arc::new(Shared { config, client }) })
    }
}

impl Shared {
    fn client(&self) -> Result<Arc<Client>, KafkaError> {
        let mut place = self.place();
        if let Some(client) = &*place {
            return Ok(Arc::clone(client));
        }
        let client = Arc::new(Client { producer: Some(self.config.create()?) });
        Ok(Arc::clone(place.insert(client)))
    }

    /// Gives up a client that refuses every message from now on.
    fn give_up(&self, client: &Arc<Client>) {
        let mut place = self.place();
        if place.as_ref().is_some_and(|current| Arc::ptr_eq(current, client)) {
            *place = None;
        }
    }

    fn place(&self) -> MutexGuard<'_, Option<Arc<Client>>> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let producer = self.producer.take();
        if let Err(error) = std::thread::Builder::new().spawn(move || drop(producer)) {
            tracing::warn!(error = &error as &dyn std::error::Error, "there was no thread to end a client of Kafka in");
        }
    }
}

#[async_trait]
impl Publisher for KafkaPublisher {
    async fn publish(&self, message: &MessageToSend) -> Result<(), PublisherError> {
        let mut headers = OwnedHeaders::new().insert(Header { key: ID, value: Some(&message.id) });
        for (name, value) in &message.headers {
            headers = headers.insert(Header { key: name, value: Some(value) });
        }
        let key = message.ordering_key.as_ref().unwrap_or(&message.id);
        let record = FutureRecord::to(&message.topic).key(key).payload(message.payload.as_ref()).headers(headers);
        let client = self.shared.client()?;
        let producer = client.producer.as_ref().ok_or("the client has ended")?;
        if let Err((error, _)) = producer.send(record, QUEUE_TIMEOUT).await {
            if producer.client().fatal_error().is_some() {
                self.shared.give_up(&client);
            }
            return Err(error.into());
        }
        Ok(())
    }
}

impl fmt::Debug for KafkaPublisher {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The configuration may hold a password.
        formatter.debug_struct("KafkaPublisher").finish_non_exhaustive()
    }
}
