//! Messages of topics of Kafka.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _, ConsumerContext, Rebalance, StreamConsumer};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Headers as _, Message as _};
use rdkafka::types::RDKafkaConfRes;
use rdkafka::{ClientConfig, ClientContext, Offset, TopicPartitionList};
use tokio::sync::{Notify, oneshot};
use tokio::time::sleep;

use crate::consumer::{BrokerError, Receipt, Subscription};
use crate::message::{Message, hexadecimal};
use crate::settings::SUSPECT_FROM;

/// The header field with the id of a message.
const ID: &str = "Idem-Message-Id";

/// How far the messages of a partition that are received may be ahead of the committed offset. So after a crash, the first ones that
/// are delivered contain all that ran.
const WINDOW: i64 = 256;

/// How often offsets are committed that have changed. Ten windows in a second are enough for one partition. The client reports the
/// commits of its timer only, so that no other commits are asked for.
const COMMIT_EVERY_MS: &str = "100";

/// From how many waiting messages of a partition on the client fetches no more of them. A pause drops what the client has fetched.
const PAUSE_FROM: usize = 64;

/// How often a subscription that closes looks whether its last message has ended.
const CLOSING: Duration = Duration::from_millis(20);

/// The messages of topics of Kafka, as a member of a consumer group.
///
/// The id of a message is its header field `Idem-Message-Id`, or else its topic, partition, offset and time, by which no message that
/// was published twice is recognised.
///
/// Kafka keeps one offset for each partition, and counts no deliveries. The offset follows the first message that has not ended, so
/// that a message that waits keeps no other from being handled, up to 256 behind the committed offset. The
/// first 256 messages of a partition after each assignment may have killed their process, and are suspects: they are handled one
/// at a time.
///
/// A consumer that is not asked for a message for `max.poll.interval.ms` loses its partitions. That happens while as many messages
/// wait as it may hold. A process that joins the group waits for it meanwhile.
///
/// What needs further libraries is chosen by features of the crate `rdkafka`: `libz` and `zstd` for topics that are compressed so, `ssl`
/// and `sasl` for servers that ask for it.
///
/// The client panics at a header field whose name is no UTF-8. That is caught, and the message is parked. With `panic = "abort"`, such a
/// message would end each process that receives it.
///
/// # Order
/// Kafka gives a partition to one process of the group. Messages have the order of their partition, and the ordering key of a message is its
/// key; without one, its partition.
pub struct KafkaSubscription {
    config: ClientConfig,
    topics: Vec<String>,
    retention: Duration,
    client: Option<Arc<Client>>,
    /// Messages that were received from the client and not by the caller, by partition.
    waiting: HashMap<(String, i32), Waiting>,
}

/// Tells Kafka about a message.
pub struct KafkaReceipt {
    client: Arc<Client>,
    partition: Arc<Partition>,
    offset: i64,
    /// Whether its message has ended or was given back.
    is_told: AtomicBool,
}

#[derive(Default)]
struct Waiting {
    messages: VecDeque<Received>,
    /// The client fetches no more of them.
    is_paused: bool,
}

struct Received {
    message: Message,
    partition: Arc<Partition>,
    offset: i64,
}

/// The client, which leaves the group when the last message has ended.
struct Client {
    consumer: Option<StreamConsumer<Group>>,
}

/// What is known of the partitions that this consumer has.
#[derive(Default)]
struct Group {
    partitions: Mutex<HashMap<(String, i32), Arc<Partition>>>,
    /// An offset was committed, or partitions were revoked.
    has_changed: Notify,
    /// Partitions with a message whose task has failed: its offset would never be passed.
    to_repeat: Mutex<Vec<Arc<Partition>>>,
}

/// A partition, from its assignment to its revocation.
struct Partition {
    topic: String,
    number: i32,
    /// The offset of the first message of this assignment.
    first: i64,
    progress: Mutex<Progress>,
}

struct Progress {
    /// Messages that the caller has received, and that have not ended.
    open: BTreeSet<i64>,
    /// The offset after the last one of those that the caller has received.
    next: i64,
    /// The offset that is to be committed next.
    stored: i64,
    committed: i64,
    is_revoked: bool,
}

impl KafkaSubscription {
    /// The messages of `topics`, which keep them for `retention` at most: their `retention.ms` and their `segment.ms` together, as Kafka
    /// removes whole segments. The consumer checks that the inbox keeps its records for as long.
    ///
    /// `config` has the servers and the `group.id`. How offsets are committed is set by this subscription. A new group begins with the
    /// first message, unless offsets were set for it. The subscription connects when the first message is received, and again after a fatal
    /// error.
    ///
    /// # Errors
    /// [`KafkaError`] when the configuration is invalid, has no `group.id`, or begins new groups with the latest message: a message that
    /// kills its process before the first commit would be lost.
    pub fn new(mut config: ClientConfig, topics: &[&str], retention: Duration) -> Result<Self, KafkaError> {
        config.set("enable.auto.commit", "true").set("enable.auto.offset.store", "false");
        config.set("auto.commit.interval.ms", COMMIT_EVERY_MS).set("enable.partition.eof", "false");
        let invalid = |why: &str, name: &str, value: &str| {
            let [why, name, value] = [why, name, value].map(str::to_owned);
            KafkaError::ClientConfig(RDKafkaConfRes::RD_KAFKA_CONF_INVALID, why, name, value)
        };
        if config.get("group.id").unwrap_or_default().is_empty() {
            return Err(invalid("a consumer needs a group", "group.id", ""));
        }
        match config.get("auto.offset.reset") {
            None => drop(config.set("auto.offset.reset", "earliest")),
            Some(latest @ ("latest" | "largest" | "end")) => {
                let why = "a message could be lost; set the offsets of the group instead";
                return Err(invalid(why, "auto.offset.reset", latest));
            }
            Some(_) => {}
        }
        config.create_native_config()?;
        let topics = topics.iter().map(|topic| (*topic).to_owned()).collect();
        Ok(Self { config, topics, retention, client: None, waiting: HashMap::new() })
    }

    fn client(&mut self) -> Result<Arc<Client>, KafkaError> {
        if let Some(client) = &self.client {
            return Ok(Arc::clone(client));
        }
        let consumer: StreamConsumer<Group> = self.config.create_with_context(Group::default())?;
        consumer.subscribe(&self.topics.iter().map(String::as_str).collect::<Vec<_>>())?;
        self.waiting.clear();
        Ok(Arc::clone(self.client.insert(Arc::new(Client { consumer: Some(consumer) }))))
    }

    /// A message that may be received now.
    fn next_within_window(&mut self, client: &Arc<Client>) -> Result<Option<(Message, KafkaReceipt)>, BrokerError> {
        let mut found = None;
        for waiting in self.waiting.values_mut() {
            let Some(first) = waiting.messages.front() else { continue };
            if first.partition.progress().is_revoked {
                waiting.messages.clear();
            } else if first.partition.open(first.offset) {
                found = waiting.messages.pop_front();
                break;
            }
        }
        let consumer = client.consumer()?;
        self.waiting.retain(|(topic, number), waiting| {
            if !waiting.messages.is_empty() {
                return true;
            }
            let resume = || consumer.resume(&of_partition(topic, *number, Offset::Invalid)?);
            if waiting.is_paused
                && let Err(error) = resume()
            {
                tracing::warn!(error = &error as &dyn std::error::Error, topic, number, "a partition was not resumed");
            }
            false
        });
        Ok(found.map(|Received { message, partition, offset }| {
            let client = Arc::clone(client);
            (message, KafkaReceipt { client, partition, offset, is_told: AtomicBool::new(false) })
        }))
    }

    /// Goes back in partitions with a message whose task has failed.
    fn repeat(&mut self, client: &Client) -> Result<(), BrokerError> {
        let consumer = client.consumer()?;
        let group = consumer.context();
        for partition in std::mem::take(&mut *lock(&group.to_repeat)) {
            let Progress { stored, is_revoked, .. } = *partition.progress();
            if is_revoked {
                continue;
            }
            let Partition { topic, number, .. } = &*partition;
            tracing::warn!(
                topic,
                number,
                offset = stored,
                "a message has ended without a result, and is received again"
            );
            let place = (topic.clone(), *number);
            group.revoke([place.clone()]);
            self.waiting.entry(place).or_default().messages.clear();
            consumer.seek(topic, *number, Offset::Offset(stored), Duration::ZERO)?;
        }
        Ok(())
    }

    /// Keeps a message until it may be received. If many wait, the client fetches no more of their partition.
    fn keep(&mut self, client: &Client, message: &BorrowedMessage<'_>) -> Result<(), BrokerError> {
        let consumer = client.consumer()?;
        let group = consumer.context();
        let (topic, number, offset) = (message.topic(), message.partition(), message.offset());
        let waiting = self.waiting.entry((topic.to_owned(), number)).or_default();
        let expected = waiting.messages.back().map_or(i64::MIN, |last| last.offset + 1);
        let mut known = group.partition(topic, number);
        if known.as_ref().is_some_and(|known| offset < known.progress().next.max(expected)) {
            // Offsets go back if the cluster has lost messages.
            group.revoke([(topic.to_owned(), number)]);
            known = None;
        }
        let partition = match known {
            Some(partition) => partition,
            None => {
                // The client would commit what it has stored before, and nothing that is not beyond its last commit.
                consumer.store_offsets(&of_partition(topic, number, Offset::Offset(offset))?)?;
                consumer.commit(&of_partition(topic, number, Offset::Offset(offset))?, CommitMode::Async)?;
                group.begin(topic, number, offset)
            }
        };
        if waiting.messages.back().is_some_and(|last| !Arc::ptr_eq(&last.partition, &partition)) {
            // They are of an earlier assignment.
            waiting.messages.clear();
        }
        let message = content(message, offset < partition.first + WINDOW);
        waiting.messages.push_back(Received { message, partition, offset });
        if waiting.messages.len() >= PAUSE_FROM && !waiting.is_paused {
            consumer.pause(&of_partition(topic, number, Offset::Invalid)?)?;
            waiting.is_paused = true;
        }
        Ok(())
    }
}

#[async_trait]
impl Subscription for KafkaSubscription {
    type Receipt = KafkaReceipt;

    async fn receive(&mut self) -> Result<(Message, KafkaReceipt), BrokerError> {
        loop {
            let client = self.client()?;
            self.repeat(&client)?;
            if let Some(received) = self.next_within_window(&client)? {
                return Ok(received);
            }
            let consumer = client.consumer()?;
            tokio::select! {
                received = consumer.recv() => match received {
                    Ok(message) => self.keep(&client, &message)?,
                    Err(error @ KafkaError::MessageConsumptionFatal(_)) => {
                        self.client = None;
                        return Err(error.into());
                    }
                    // The client goes on by itself.
                    Err(error) => tracing::warn!(error = &error as &dyn std::error::Error, "the client of Kafka has an error"),
                },
                () = consumer.context().has_changed.notified() => {}
            }
        }
    }

    async fn close(mut self) {
        let Some(mut client) = self.client.take() else { return };
        // Partitions are kept until the last message has ended: its offset could not be committed otherwise.
        let paused = client.consumer().and_then(|consumer| Ok(consumer.pause(&consumer.assignment()?)?));
        if let Err(error) = paused {
            tracing::debug!(error = &*error as &dyn std::error::Error, "the partitions were not paused");
        }
        self.waiting.clear();
        loop {
            match Arc::try_unwrap(client) {
                Ok(mut client) => {
                    // The sender is gone when the group is left.
                    let _ = leave(client.consumer.take()).await;
                    return;
                }
                Err(shared) => client = shared,
            }
            sleep(CLOSING).await;
        }
    }

    fn keep_order(&mut self) {}

    fn longest_redelivery(&self) -> Option<Duration> {
        Some(self.retention)
    }

    fn hold_every(&self) -> Option<Duration> {
        None
    }

    fn can_delay(&self) -> bool {
        false
    }
}

#[async_trait]
impl Receipt for KafkaReceipt {
    async fn ack(&self) -> Result<(), BrokerError> {
        self.is_told.store(true, Ordering::Relaxed);
        let consumer = self.client.consumer()?;
        let Partition { topic, number, .. } = &*self.partition;
        let mut progress = self.partition.progress();
        if progress.is_revoked {
            return Err("the partition was given to another consumer".into());
        }
        progress.open.remove(&self.offset);
        let ended = progress.open.first().copied().unwrap_or(progress.next);
        // Under the lock, so that the stored offset does not go back.
        if ended > progress.stored {
            consumer.store_offsets(&of_partition(topic, *number, Offset::Offset(ended))?)?;
            progress.stored = ended;
        }
        Ok(())
    }

    /// Does nothing: the offset stays before the message, so that it is delivered again after the next assignment.
    async fn give_back(&self, _delay: Duration) -> Result<(), BrokerError> {
        self.is_told.store(true, Ordering::Relaxed);
        Ok(())
    }

    async fn hold(&self) -> Result<(), BrokerError> {
        Ok(())
    }
}

impl Drop for KafkaReceipt {
    fn drop(&mut self) {
        if !*self.is_told.get_mut()
            && let Ok(consumer) = self.client.consumer()
        {
            lock(&consumer.context().to_repeat).push(Arc::clone(&self.partition));
            consumer.context().has_changed.notify_one();
        }
    }
}

impl Client {
    fn consumer(&self) -> Result<&StreamConsumer<Group>, BrokerError> {
        self.consumer.as_ref().ok_or_else(|| "the consumer has left its group".into())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        drop(leave(self.consumer.take()));
    }
}

/// Commits the last offsets and leaves the group. The receiver ends when that is done. It has a thread of its own: without the
/// brokers it takes very long, and neither the runtime nor the process has to wait for it.
fn leave(consumer: Option<StreamConsumer<Group>>) -> oneshot::Receiver<()> {
    let (leaving, left) = oneshot::channel();
    if consumer.is_some() {
        let leave = move || {
            drop(consumer);
            drop(leaving);
        };
        if let Err(error) = std::thread::Builder::new().spawn(leave) {
            tracing::warn!(error = &error as &dyn std::error::Error, "there was no thread to leave the group in");
        }
    }
    left
}

impl Group {
    /// What is known of a partition, if anything was received from it.
    fn partition(&self, topic: &str, number: i32) -> Option<Arc<Partition>> {
        self.partitions().get(&(topic.to_owned(), number)).map(Arc::clone)
    }

    /// Begins an assignment of a partition with its first message.
    fn begin(&self, topic: &str, number: i32, first: i64) -> Arc<Partition> {
        let partition = Arc::new(Partition::new(topic, number, first));
        self.partitions().insert((topic.to_owned(), number), Arc::clone(&partition));
        partition
    }

    /// Ends assignments. Their messages can be acknowledged no more.
    fn revoke(&self, places: impl IntoIterator<Item = (String, i32)>) {
        for place in places {
            let revoked = self.partitions().remove(&place);
            if let Some(partition) = revoked {
                partition.progress().is_revoked = true;
            }
        }
        self.has_changed.notify_one();
    }

    fn partitions(&self) -> MutexGuard<'_, HashMap<(String, i32), Arc<Partition>>> {
        lock(&self.partitions)
    }
}

impl ClientContext for Group {}

impl ConsumerContext for Group {
    fn pre_rebalance(&self, _consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        match rebalance {
            Rebalance::Assign(_) => {}
            Rebalance::Revoke(list) => {
                self.revoke(list.elements().into_iter().map(|one| (one.topic().to_owned(), one.partition())));
            }
            Rebalance::Error(_) => {
                let all: Vec<_> = self.partitions().keys().cloned().collect();
                self.revoke(all);
            }
        }
    }

    fn commit_callback(&self, result: KafkaResult<()>, offsets: &TopicPartitionList) {
        if let Err(error) = result
            && error.rdkafka_error_code() != Some(RDKafkaErrorCode::NoOffset)
        {
            tracing::warn!(error = &error as &dyn std::error::Error, "an offset was not committed; it is tried again");
        }
        let partitions = self.partitions();
        for committed in offsets.elements() {
            let partition = partitions.get(&(committed.topic().to_owned(), committed.partition()));
            if let (Some(partition), Ok(()), Offset::Offset(offset)) =
                (partition, committed.error(), committed.offset())
            {
                let mut progress = partition.progress();
                // Beyond what was stored, it is of an earlier assignment.
                if offset <= progress.stored {
                    progress.committed = progress.committed.max(offset);
                }
            }
        }
        drop(partitions);
        self.has_changed.notify_one();
    }
}

impl Partition {
    fn new(topic: &str, number: i32, first: i64) -> Self {
        let progress =
            Progress { open: BTreeSet::new(), next: first, stored: first, committed: first, is_revoked: false };
        Self { topic: topic.to_owned(), number, first, progress: Mutex::new(progress) }
    }

    /// Notes that the caller receives this message. False if it has to wait for a commit.
    fn open(&self, offset: i64) -> bool {
        let mut progress = self.progress();
        if progress.open.is_empty() && progress.committed >= progress.next {
            // Nothing lies between: a consumer that begins at the committed offset gets this message first.
            progress.committed = progress.committed.max(offset);
        }
        let may_open = offset < progress.committed + WINDOW;
        if may_open {
            progress.open.insert(offset);
            progress.next = offset + 1;
        }
        may_open
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        lock(&self.progress)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn of_partition(topic: &str, number: i32, offset: Offset) -> KafkaResult<TopicPartitionList> {
    let mut list = TopicPartitionList::with_capacity(1);
    list.add_partition_offset(topic, number, offset)?;
    Ok(list)
}

/// The message of a record. The age of a suspect is not told: it would count as forgotten, although it may be delivered for the first
/// time. A record whose header fields cannot be read has no id.
fn content(record: &BorrowedMessage<'_>, is_suspect: bool) -> Message {
    let (topic, number, offset) = (record.topic(), record.partition(), record.offset());
    let fields = fields(record);
    // Another message can get the same offset, if the cluster has lost messages or the topic is made again.
    let place = || format!("{topic}:{number}:{offset}:{}", record.timestamp().to_millis().unwrap_or_default());
    let id = match &fields {
        Some(fields) => {
            let field = fields.iter().find(|(name, _)| name.eq_ignore_ascii_case(ID));
            field.map_or_else(place, |(_, id)| text(id))
        }
        None => String::new(),
    };
    let published = record.timestamp().to_millis().and_then(|millis| u64::try_from(millis).ok());
    let published = published.and_then(|millis| SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(millis)));
    let age = published.and_then(|published| SystemTime::now().duration_since(published).ok());
    Message {
        ordering_key: Some(record.key().map_or_else(|| format!("{topic}:{number}"), text)),
        headers: fields.unwrap_or_default(),
        delivery: if is_suspect { SUSPECT_FROM } else { 1 },
        age: age.filter(|_| !is_suspect),
        ..Message::new(id, topic, record.payload().map(Bytes::copy_from_slice).unwrap_or_default())
    }
}

/// The header fields of a record; `None` if they cannot be read: the client panics at a name that is no UTF-8.
fn fields(record: &BorrowedMessage<'_>) -> Option<Vec<(String, Bytes)>> {
    let read = || {
        let fields = record.headers().into_iter().flat_map(|headers| headers.iter());
        let value = |value: Option<&[u8]>| value.map(Bytes::copy_from_slice).unwrap_or_default();
        fields.map(|field| (field.key.to_owned(), value(field.value))).collect()
    };
    catch_unwind(AssertUnwindSafe(read)).ok()
}

/// A text as it is, and anything else in hexadecimal. Different bytes stay different.
fn text(bytes: &[u8]) -> String {
    const HEXADECIMAL: &str = "hex:";
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.starts_with(HEXADECIMAL) => text.to_owned(),
        _ => format!("{HEXADECIMAL}{}", hexadecimal(bytes)),
    }
}

impl fmt::Debug for KafkaSubscription {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The configuration may hold a password.
        formatter
            .debug_struct("KafkaSubscription")
            .field("topics", &self.topics)
            .field("group", &self.config.get("group.id"))
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for KafkaReceipt {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Partition { topic, number, .. } = &*self.partition;
        formatter
            .debug_struct("KafkaReceipt")
            .field("topic", topic)
            .field("partition", number)
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}
