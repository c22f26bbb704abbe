//! Sends messages to NATS JetStream.

use std::fmt;

use async_nats::connection::State;
use async_nats::jetstream::Context;
use async_nats::{HeaderMap, HeaderName, HeaderValue};
use async_trait::async_trait;

use crate::message::MessageToSend;
use crate::relay::{Publisher, PublisherError};

/// The header field by which JetStream recognises a message that was sent before, for the duplicate window of the stream.
const ID: &str = "Nats-Msg-Id";

/// The header field by which `idem-inbox` keeps the order.
const ORDERING_KEY: &str = "Idem-Ordering-Key";

/// Sends messages to JetStream. The topic is the subject, and a stream must listen to it.
///
/// JetStream drops a message that was sent again within the duplicate window of its stream. A later repeat reaches the consumers,
/// with the same `Nats-Msg-Id`.
#[derive(Clone)]
pub struct NatsPublisher {
    context: Context,
}

impl NatsPublisher {
    /// A publisher through this connection.
    #[must_use]
    pub fn new(context: Context) -> Self {
        Self { context }
    }
}

#[async_trait]
impl Publisher for NatsPublisher {
    async fn publish(&self, message: &MessageToSend) -> Result<(), PublisherError> {
        // The client would keep the message and send it later, when the relay has given it up.
        if self.context.client().connection_state() != State::Connected {
            return Err("there is no connection to the server".into());
        }
        let mut headers = HeaderMap::new();
        for (name, value) in &message.headers {
            headers.append(name.parse::<HeaderName>()?, value.parse::<HeaderValue>()?);
        }
        headers.insert(ID, message.id.parse::<HeaderValue>()?);
        if let Some(key) = &message.ordering_key {
            headers.insert(ORDERING_KEY, key.parse::<HeaderValue>()?);
        }
        let sent = self.context.publish_with_headers(message.topic.clone(), headers, message.payload.clone()).await?;
        sent.await?;
        Ok(())
    }
}

impl fmt::Debug for NatsPublisher {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("NatsPublisher").finish_non_exhaustive()
    }
}
