//! Sends messages to Redis Streams.

use std::fmt;

use async_trait::async_trait;
use redis::aio::ConnectionLike;

use crate::message::MessageToSend;
use crate::relay::{Publisher, PublisherError};

/// The fields that `idem-inbox` reads. Fields of the message follow with a prefix, so that none of them is taken for another.
const ID: &str = "id";
const PAYLOAD: &str = "payload";
const ORDERING_KEY: &str = "ordering-key";
const HEADER: &str = "header:";

/// Adds messages to streams of Redis, over any asynchronous connection of the crate `redis`: use its `ConnectionManager`, or its
/// `ClusterConnection`. The topic is the key of the stream.
///
/// Give the connection a response timeout of five seconds or more. Its default of 500 ms is too short for large payloads: a message that
/// it cuts off is added again. Nothing removes entries from a stream. Trim it by `XTRIM` with `MINID`, below what all groups have
/// acknowledged.
///
/// Redis confirms an entry when its memory has it. Whether it survives a crash depends on the server's persistence and replicas.
#[derive(Clone)]
pub struct RedisStreamPublisher<C> {
    connection: C,
}

impl<C: ConnectionLike + Clone> RedisStreamPublisher<C> {
    /// A publisher over this connection.
    #[must_use]
    pub fn new(connection: C) -> Self {
        Self { connection }
    }
}

#[async_trait]
impl<C: ConnectionLike + Clone + Send + Sync + 'static> Publisher for RedisStreamPublisher<C> {
    async fn publish(&self, message: &MessageToSend) -> Result<(), PublisherError> {
        let mut add = redis::cmd("XADD");
        add.arg(&message.topic).arg("*").arg(ID).arg(&message.id).arg(PAYLOAD).arg(message.payload.as_ref());
        if let Some(key) = &message.ordering_key {
            add.arg(ORDERING_KEY).arg(key);
        }
        for (name, value) in &message.headers {
            add.arg(format!("{HEADER}{name}")).arg(value);
        }
        add.query_async::<String>(&mut self.connection.clone()).await?;
        Ok(())
    }
}

impl<C> fmt::Debug for RedisStreamPublisher<C> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("RedisStreamPublisher").finish_non_exhaustive()
    }
}
