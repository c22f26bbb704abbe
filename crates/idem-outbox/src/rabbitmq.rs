//! Sends messages to RabbitMQ.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};

use crate::message::MessageToSend;
use crate::relay::{Publisher, PublisherError};

/// The header field by which `idem-inbox` keeps the order.
const ORDERING_KEY: &str = "Idem-Ordering-Key";

/// Messages survive a restart of the server, in durable queues.
const PERSISTENT: u8 = 2;

/// Sends messages to an exchange of RabbitMQ. The topic is the routing key, and the id is the property `message_id`.
///
/// A message that no queue takes counts as refused: the server would drop it.
#[derive(Clone)]
pub struct RabbitMqPublisher {
    url: Arc<str>,
    exchange: ShortString,
    open: Arc<Mutex<Option<Open>>>,
    /// Held while a connection is made, so that one is.
    connecting: Arc<tokio::sync::Mutex<()>>,
}

/// A connection with its channels that are not in use.
///
/// A channel has one unconfirmed message at a time. The server's notice that a message was returned does not say which one. If two
/// messages are sent at once, the client may also number them in another order than it sends them.
struct Open {
    connection: Arc<Connection>,
    idle: Vec<Channel>,
}

/// A channel in use. If its message is given up before it is confirmed, the connection is dropped: the client keeps the message,
/// and would send it when the server takes messages again.
struct InUse<'a> {
    open: &'a Mutex<Option<Open>>,
    connection: Arc<Connection>,
    channel: Channel,
    is_settled: bool,
}

impl RabbitMqPublisher {
    /// A publisher to this exchange of a server such as `amqp://user:password@host:5672/%2f`. The exchange without a name delivers to
    /// the queue that the topic names.
    ///
    /// It connects when the first message is sent, and again after an error.
    ///
    /// # Errors
    /// [`PublisherError`] if the name of the exchange has more than 255 bytes.
    pub fn new(url: impl Into<Arc<str>>, exchange: &str) -> Result<Self, PublisherError> {
        let exchange = ShortString::try_new(exchange)?;
        Ok(Self { url: url.into(), exchange, open: Arc::default(), connecting: Arc::default() })
    }

    async fn channel(&self) -> Result<InUse<'_>, PublisherError> {
        let (connection, idle) = match self.idle() {
            Some(found) => found,
            None => {
                let _one = self.connecting.lock().await;
                match self.idle() {
                    Some(found) => found,
                    None => (self.connect().await?, None),
                }
            }
        };
        if connection.status().blocked() {
            return Err("the server takes no messages: it is short of memory or disk".into());
        }
        let channel = match idle {
            Some(channel) => channel,
            None => {
                let channel = connection.create_channel().await?;
                channel.confirm_select(ConfirmSelectOptions::default()).await?;
                channel
            }
        };
        Ok(InUse { open: &self.open, connection, channel, is_settled: false })
    }

    /// The open connection, and one of its channels.
    fn idle(&self) -> Option<(Arc<Connection>, Option<Channel>)> {
        let mut open = lock(&self.open);
        let Open { connection, idle } = open.as_mut().filter(|open| open.connection.status().connected())?;
        let usable = std::iter::from_fn(|| idle.pop()).find(|channel| channel.status().connected());
        Some((Arc::clone(connection), usable))
    }

    async fn connect(&self) -> Result<Arc<Connection>, lapin::Error> {
        let connection = Connection::connect(&self.url, ConnectionProperties::default()).await?;
        let connection = Arc::new(connection);
        *lock(&self.open) = Some(Open { connection: Arc::clone(&connection), idle: Vec::new() });
        Ok(connection)
    }
}

impl InUse<'_> {
    /// Gives the channel back. Its message is confirmed, or refused.
    fn settled(mut self) {
        self.is_settled = true;
        if let Some(open) = lock(self.open).as_mut()
            && Arc::ptr_eq(&open.connection, &self.connection)
        {
            open.idle.push(self.channel.clone());
        }
    }

    /// Gives a channel up that the server has closed.
    fn closed(mut self) {
        self.is_settled = true;
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        if !self.is_settled {
            let mut open = lock(self.open);
            if open.as_ref().is_some_and(|open| Arc::ptr_eq(&open.connection, &self.connection)) {
                *open = None;
            }
        }
    }
}

#[async_trait]
impl Publisher for RabbitMqPublisher {
    async fn publish(&self, message: &MessageToSend) -> Result<(), PublisherError> {
        let mut headers = FieldTable::default();
        let key = message.ordering_key.iter().map(|key| (ORDERING_KEY, key.as_str()));
        let fields = message.headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        for (name, value) in fields.chain(key) {
            headers.insert(ShortString::try_new(name)?, AMQPValue::LongString(value.into()));
        }
        let properties = BasicProperties::default()
            .with_message_id(ShortString::try_new(message.id.as_str())?)
            .with_delivery_mode(PERSISTENT)
            .with_headers(headers);
        let topic = ShortString::try_new(message.topic.as_str())?;
        let options = BasicPublishOptions { mandatory: true, ..Default::default() };
        let in_use = self.channel().await?;
        let channel = in_use.channel.clone();
        let confirmed = async {
            let exchange = self.exchange.clone();
            channel.basic_publish(exchange, topic, options, &message.payload, properties).await?.await
        };
        match confirmed.await {
            Ok(confirmation) => {
                in_use.settled();
                told(confirmation)
            }
            Err(error) => {
                in_use.closed();
                Err(error.into())
            }
        }
    }
}

fn told(confirmation: Confirmation) -> Result<(), PublisherError> {
    match confirmation {
        Confirmation::Ack(None) => Ok(()),
        Confirmation::Ack(Some(returned)) => {
            Err(format!("no queue takes the message: {} {}", returned.reply_code, returned.reply_text.as_str()).into())
        }
        Confirmation::Nack(_) => Err("the server could not keep the message".into()),
        Confirmation::NotRequested => Err("the server confirms nothing".into()),
    }
}

fn lock(open: &Mutex<Option<Open>>) -> MutexGuard<'_, Option<Open>> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for RabbitMqPublisher {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may hold a password.
        formatter.debug_struct("RabbitMqPublisher").field("exchange", &self.exchange).finish_non_exhaustive()
    }
}
