//! Messages of a stream of Redis.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use redis::aio::{ConnectionManager, ConnectionManagerConfig, MultiplexedConnection};
use redis::streams::StreamPendingCountReply;
use redis::{AsyncConnectionConfig, Client, RedisError, Value, cmd};
use tokio::time::Instant;

use crate::consumer::{BrokerError, Receipt, Subscription};
use crate::message::{Message, distinct_text};

/// The fields of an entry. Those of the message's header have the prefix.
const ID: &str = "id";
const PAYLOAD: &str = "payload";
const ORDERING_KEY: &str = "ordering-key";
const HEADER: &str = "header:";

/// Before the first entry.
const START: &str = "0-0";

/// How many entries are read at once.
const BATCH: u32 = 32;

/// How long the server waits for new entries before it answers that there are none.
const BLOCK: Duration = Duration::from_secs(1);

/// The messages of a consumer group of a stream of Redis.
///
/// The id of a message is the field `id` of its entry, or else the name of the stream and the id of the entry, by which no
/// message that was added twice is recognised. Its content is the field `payload`.
///
/// An entry that a stopped process has received is claimed by another one when it was idle for the `idle_limit`.
///
/// # Order
/// The order holds if one process consumes the group. If order was asked for, the subscription claims all entries that were
/// delivered before, and reads them first.
pub struct RedisStreamSubscription {
    client: Client,
    names: Arc<Names>,
    idle_limit: Duration,
    connections: Option<Connections>,
    received: VecDeque<(Message, String)>,
    /// Where to go on to look for entries that are idle.
    claim_after: String,
    /// After which of the entries that this consumer has received to read on; `None` if all are read.
    pending_after: Option<String>,
    claim_at: Instant,
    is_ordered: bool,
}

struct Names {
    stream: String,
    group: String,
    consumer: String,
}

/// The first one waits for entries, so that acknowledgments need the other. That connects again by itself, also for receipts.
#[derive(Clone)]
struct Connections {
    reading: MultiplexedConnection,
    telling: ConnectionManager,
}

/// An entry of a stream; without fields if it was removed.
struct Entry {
    id: String,
    fields: Option<Vec<(Bytes, Bytes)>>,
}

/// Tells Redis about a message.
pub struct RedisStreamReceipt {
    connection: ConnectionManager,
    names: Arc<Names>,
    entry: String,
    idle_limit: Duration,
}

impl RedisStreamSubscription {
    /// The messages of `stream` for `group`, which is made if it does not exist, from the first entry on. `consumer` names this
    /// process; processes that run at the same time need different names.
    ///
    /// It connects when the first message is received, and again after an error.
    #[must_use]
    pub fn new(
        client: Client,
        stream: impl Into<String>,
        group: impl Into<String>,
        consumer: impl Into<String>,
    ) -> Self {
        let names = Names { stream: stream.into(), group: group.into(), consumer: consumer.into() };
        Self {
            client,
            names: Arc::new(names),
            idle_limit: Duration::from_secs(30),
            connections: None,
            received: VecDeque::new(),
            pending_after: Some(START.to_owned()),
            claim_after: START.to_owned(),
            claim_at: Instant::now(),
            is_ordered: false,
        }
    }

    /// After how long without a sign of its consumer an entry is delivered to another one, at least 1 s. Default 30 s, like a
    /// lease. A consumer that lives gives a sign three times as often.
    #[must_use]
    pub fn idle_limit(mut self, limit: Duration) -> Self {
        self.idle_limit = limit.max(Duration::from_secs(1));
        self
    }

    async fn connections(&mut self) -> Result<Connections, RedisError> {
        if let Some(connections) = &self.connections {
            return Ok(connections.clone());
        }
        // The server answers a read after `BLOCK` at the latest.
        let config = AsyncConnectionConfig::new().set_response_timeout(Some(BLOCK * 5));
        let mut reading = self.client.get_multiplexed_async_connection_with_config(&config).await?;
        let config = ConnectionManagerConfig::new().set_response_timeout(Some(BLOCK * 5));
        let telling = self.client.get_connection_manager_with_config(config).await?;
        let Names { stream, group, .. } = &*self.names;
        let mut create = cmd("XGROUP");
        create.arg("CREATE").arg(stream).arg(group).arg("0").arg("MKSTREAM");
        match create.query_async::<()>(&mut reading).await {
            Err(error) if error.code() != Some("BUSYGROUP") => return Err(error),
            _ => {}
        }
        if self.is_ordered {
            // What a lost answer had is among the entries of this consumer.
            self.pending_after = Some(START.to_owned());
            self.claim_all(&mut reading).await?;
        }
        Ok(self.connections.insert(Connections { reading, telling }).clone())
    }

    /// Receives entries: first those that were delivered to this consumer before, then those of consumers that have disappeared, then
    /// new ones.
    async fn read(&mut self) -> Result<(), RedisError> {
        let Connections { mut reading, .. } = self.connections().await?;
        let names = Arc::clone(&self.names);
        if let Some(after) = self.pending_after.take() {
            let entries = self.read_after(&mut reading, &after).await?;
            self.pending_after = entries.last().map(|entry| entry.id.clone());
            return self.keep(&mut reading, entries, true).await;
        }
        if Instant::now() >= self.claim_at {
            let (next, claimed) = self.claim(&mut reading).await?;
            if next == START {
                self.claim_at = Instant::now() + self.idle_limit / 4;
            }
            self.claim_after = next;
            if self.is_ordered && !claimed.is_empty() {
                tracing::warn!(
                    stream = names.stream,
                    "another consumer of the group has left messages, which come out of order now"
                );
            }
            return self.keep(&mut reading, claimed, true).await;
        }
        let mut read = cmd("XREADGROUP");
        read.arg("GROUP").arg(&names.group).arg(&names.consumer).arg("COUNT").arg(BATCH);
        read.arg("BLOCK").arg(BLOCK.as_millis() as u64).arg("STREAMS").arg(&names.stream).arg(">");
        let new = read.query_async(&mut reading).await?;
        self.keep(&mut reading, entries_of_streams(new), false).await
    }

    /// Entries that were delivered to this consumer and not acknowledged.
    async fn read_after(&self, connection: &mut MultiplexedConnection, after: &str) -> Result<Vec<Entry>, RedisError> {
        let Names { stream, group, consumer } = &*self.names;
        let mut read = cmd("XREADGROUP");
        read.arg("GROUP").arg(group).arg(consumer).arg("COUNT").arg(BATCH).arg("STREAMS").arg(stream).arg(after);
        Ok(entries_of_streams(read.query_async(connection).await?))
    }

    /// Claims entries that were idle for too long, and says where to go on.
    async fn claim(&self, connection: &mut MultiplexedConnection) -> Result<(String, Vec<Entry>), RedisError> {
        let Names { stream, group, consumer } = &*self.names;
        let mut claim = cmd("XAUTOCLAIM");
        claim.arg(stream).arg(group).arg(consumer).arg(self.idle_limit.as_millis() as u64).arg(&self.claim_after);
        let claimed: Vec<Value> = claim.arg("COUNT").arg(BATCH).query_async(connection).await?;
        let mut claimed = claimed.into_iter();
        let next = claimed.next().and_then(bytes).map_or_else(|| START.to_owned(), text);
        let entries = claimed.next().map(entries).unwrap_or_default();
        for entry in claimed.next().into_iter().flat_map(elements).filter_map(bytes) {
            tracing::error!(stream, entry = text(entry), "a message was removed from its stream before it was handled");
        }
        Ok((next, entries))
    }

    /// Claims all entries that were delivered, without counting that as a delivery.
    async fn claim_all(&self, connection: &mut MultiplexedConnection) -> Result<(), RedisError> {
        let Names { stream, group, consumer } = &*self.names;
        let mut after = START.to_owned();
        loop {
            let mut claim = cmd("XAUTOCLAIM");
            claim.arg(stream).arg(group).arg(consumer).arg(0).arg(&after).arg("COUNT").arg(BATCH).arg("JUSTID");
            let claimed: Vec<Value> = claim.query_async(connection).await?;
            after = claimed.into_iter().next().and_then(bytes).map_or_else(|| START.to_owned(), text);
            if after == START {
                return Ok(());
            }
        }
    }

    /// Keeps entries until they are received. The server counts the deliveries of those that were delivered before.
    async fn keep(
        &mut self,
        connection: &mut MultiplexedConnection,
        entries: Vec<Entry>,
        are_repeated: bool,
    ) -> Result<(), RedisError> {
        let Names { stream, group, .. } = &*self.names;
        for entry in entries {
            let mut delivery = 1;
            if are_repeated {
                let mut pending = cmd("XPENDING");
                pending.arg(stream).arg(group).arg(&entry.id).arg(&entry.id).arg(1);
                let counted: StreamPendingCountReply = pending.query_async(connection).await?;
                let times = counted.ids.first().map_or(1, |counted| counted.times_delivered);
                delivery = u32::try_from(times).unwrap_or(u32::MAX);
            }
            let id = entry.id.clone();
            match message(stream, entry, delivery) {
                Some(message) => self.received.push_back((message, id)),
                None => {
                    tracing::error!(stream, entry = id, "a message was removed from its stream before it was handled");
                    cmd("XACK").arg(stream).arg(group).arg(id).query_async::<()>(connection).await?;
                }
            }
        }
        Ok(())
    }
}

#[async_trait]
impl Subscription for RedisStreamSubscription {
    type Receipt = RedisStreamReceipt;

    async fn receive(&mut self) -> Result<(Message, RedisStreamReceipt), BrokerError> {
        loop {
            let connection = match &self.connections {
                Some(connections) => connections.telling.clone(),
                None => self.connections().await?.telling,
            };
            if let Some((message, entry)) = self.received.pop_front() {
                let names = Arc::clone(&self.names);
                return Ok((message, RedisStreamReceipt { connection, names, entry, idle_limit: self.idle_limit }));
            }
            if let Err(error) = self.read().await {
                self.connections = None;
                return Err(error.into());
            }
        }
    }

    async fn close(mut self) {
        let Some(Connections { telling, .. }) = self.connections.take() else { return };
        for (_, entry) in self.received {
            let (connection, names) = (telling.clone(), Arc::clone(&self.names));
            let receipt = RedisStreamReceipt { connection, names, entry, idle_limit: self.idle_limit };
            if let Err(error) = receipt.give_back(Duration::ZERO).await {
                tracing::debug!(
                    error = &*error as &dyn std::error::Error,
                    "a message was not given back; it is claimed when it was idle"
                );
            }
        }
    }

    fn keep_order(&mut self) {
        self.is_ordered = true;
    }

    fn longest_redelivery(&self) -> Option<Duration> {
        None
    }

    fn hold_every(&self) -> Option<Duration> {
        Some(self.idle_limit / 3)
    }

    fn can_delay(&self) -> bool {
        // An entry cannot be idle for less than nothing.
        false
    }
}

impl RedisStreamReceipt {
    /// Sets how long the entry was idle, without a delivery.
    async fn set_idle(&self, idle: Duration) -> Result<(), BrokerError> {
        let Names { stream, group, consumer } = &*self.names;
        let mut claim = cmd("XCLAIM");
        claim.arg(stream).arg(group).arg(consumer).arg(0).arg(&self.entry);
        claim.arg("IDLE").arg(idle.as_millis() as u64).arg("JUSTID");
        claim.query_async::<Value>(&mut self.connection.clone()).await?;
        Ok(())
    }
}

#[async_trait]
impl Receipt for RedisStreamReceipt {
    async fn ack(&self) -> Result<(), BrokerError> {
        let Names { stream, group, .. } = &*self.names;
        cmd("XACK").arg(stream).arg(group).arg(&self.entry).query_async::<()>(&mut self.connection.clone()).await?;
        Ok(())
    }

    async fn give_back(&self, _delay: Duration) -> Result<(), BrokerError> {
        self.set_idle(self.idle_limit).await
    }

    async fn hold(&self) -> Result<(), BrokerError> {
        self.set_idle(Duration::ZERO).await
    }
}

/// `None` if the entry was removed from the stream.
fn message(stream: &str, entry: Entry, delivery: u32) -> Option<Message> {
    let Entry { id: entry, fields } = entry;
    let (mut id, mut payload, mut ordering_key, mut headers) = (None, None, None, Vec::new());
    for (name, value) in fields? {
        let name = text(name);
        match name.as_str() {
            ID => id = Some(distinct_text(&value)),
            PAYLOAD => payload = Some(value),
            ORDERING_KEY => ordering_key = Some(distinct_text(&value)),
            other => headers.push((other.strip_prefix(HEADER).unwrap_or(other).to_owned(), value)),
        }
    }
    let id = id.unwrap_or_else(|| format!("{stream}:{entry}"));
    let published = entry.split_once('-').and_then(|(millis, _)| millis.parse().ok()).map(Duration::from_millis);
    let published = published.and_then(|published| SystemTime::UNIX_EPOCH.checked_add(published));
    Some(Message {
        ordering_key: Some(ordering_key.unwrap_or_else(|| stream.to_owned())),
        headers,
        delivery,
        age: published.and_then(|published| SystemTime::now().duration_since(published).ok()),
        ..Message::new(id, stream, payload.unwrap_or_default())
    })
}

/// The entries in an answer of `XREADGROUP` about one stream. The types of the client refuse an answer as a whole if the name of one
/// field is no UTF-8.
fn entries_of_streams(answer: Value) -> Vec<Entry> {
    let of_stream = match answer {
        Value::Map(streams) => streams.into_iter().next().map(|(_, entries)| entries),
        other => elements(other).into_iter().next().and_then(|stream| elements(stream).into_iter().nth(1)),
    };
    of_stream.map(entries).unwrap_or_default()
}

fn entries(answer: Value) -> Vec<Entry> {
    let read = |entry: Value| -> Option<Entry> {
        let mut parts = elements(entry).into_iter();
        let id = text(bytes(parts.next()?)?);
        let fields = match parts.next()? {
            Value::Nil => None,
            Value::Map(fields) => {
                Some(fields.into_iter().filter_map(|(name, value)| Some((bytes(name)?, bytes(value)?))).collect())
            }
            fields => {
                let fields: Vec<Bytes> = elements(fields).into_iter().filter_map(bytes).collect();
                Some(fields.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect())
            }
        };
        Some(Entry { id, fields })
    };
    elements(answer).into_iter().filter_map(read).collect()
}

fn elements(value: Value) -> Vec<Value> {
    match value {
        Value::Array(elements) => elements,
        _ => Vec::new(),
    }
}

fn text(value: Bytes) -> String {
    String::from_utf8_lossy(&value).into_owned()
}

fn bytes(value: Value) -> Option<Bytes> {
    match value {
        Value::BulkString(bytes) => Some(bytes.into()),
        Value::SimpleString(text) => Some(text.into_bytes().into()),
        _ => None,
    }
}

impl fmt::Debug for RedisStreamSubscription {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The client's URL may hold a password.
        let Names { stream, group, consumer } = &*self.names;
        let mut shown = formatter.debug_struct("RedisStreamSubscription");
        shown.field("stream", stream).field("group", group).field("consumer", consumer).finish_non_exhaustive()
    }
}

impl fmt::Debug for RedisStreamReceipt {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("RedisStreamReceipt").field("entry", &self.entry).finish_non_exhaustive()
    }
}
