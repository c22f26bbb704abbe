//! Messages of topics of Kafka.

mod content;
mod progress;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use rdkafka::consumer::{CommitMode, Consumer as _, StreamConsumer};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::message::{BorrowedMessage, Message as _};
use rdkafka::types::RDKafkaConfRes;
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use tokio::sync::oneshot;
use tokio::time::sleep;

use self::content::content;
use self::progress::{Group, Partition};
use crate::consumer::{BrokerError, Receipt, Subscription};
use crate::message::Message;

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
            if first.partition.first_open().is_none() {
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
        for partition in group.take_to_repeat() {
            let Some(offset) = partition.first_open() else { continue };
            let Partition { topic, number, .. } = &*partition;
            tracing::warn!(topic, number, offset, "a message has ended without a result, and is received again");
            if let Err(error) = consumer.seek(topic, *number, Offset::Offset(offset), Duration::ZERO) {
                // A new member of the group begins with the committed offsets.
                self.client = None;
                return Err(error.into());
            }
            let place = (topic.clone(), *number);
            group.revoke([place.clone()]);
            self.waiting.entry(place).or_default().messages.clear();
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
        let partition = match group.partition(topic, number, offset, expected) {
            Some(partition) => partition,
            None => {
                // The client would commit what it has stored before, and nothing that is not beyond its last commit. If this commit
                // fails, the timer repeats it.
                let begin = of_partition(topic, number, Offset::Offset(offset))?;
                consumer.store_offsets(&begin)?;
                consumer.commit(&begin, CommitMode::Async)?;
                group.begin(topic, number, offset)
            }
        };
        if waiting.messages.back().is_some_and(|last| !Arc::ptr_eq(&last.partition, &partition)) {
            // They are of an earlier assignment.
            waiting.messages.clear();
        }
        let message = content(message, partition.is_suspect(offset));
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
                    Ok(message) => {
                        if let Err(error) = self.keep(&client, &message) {
                            // The next message would be taken for the first one of the assignment, and this one be passed over.
                            self.client = None;
                            return Err(error);
                        }
                    }
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
        let store = |ended| consumer.store_offsets(&of_partition(topic, *number, Offset::Offset(ended))?);
        if self.partition.end(self.offset, store)? {
            return Ok(());
        }
        Err("the partition was given to another consumer".into())
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
            consumer.context().repeat(Arc::clone(&self.partition));
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

/// Commits the last offsets and leaves the group. The receiver ends when that is done. It has a thread of its own: if no broker
/// answers, the client waits for its requests to time out, and neither the runtime nor the process has to wait for that.
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

fn of_partition(topic: &str, number: i32, offset: Offset) -> KafkaResult<TopicPartitionList> {
    let mut list = TopicPartitionList::with_capacity(1);
    list.add_partition_offset(topic, number, offset)?;
    Ok(list)
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
