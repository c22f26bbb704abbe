//! Consumers of the mock cluster of librdkafka: its brokers speak Kafka's protocol over sockets, and keep messages in memory.

use std::collections::BTreeSet;
use std::time::Duration;

use idem_core::engine::Contract;
use idem_inbox::{
    Consumer, InvalidInbox, KafkaReceipt, KafkaSubscription, Message, MessageError, Receipt as _, SUSPECT_FROM,
    Subscription as _,
};
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::{DefaultProducerContext, FutureProducer, FutureRecord};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use tokio::time::{sleep, timeout};

use crate::support::{Kind, PATIENCE, Place, Running, settings};

const TOPIC: &str = "invoices";
const BROKERS: i32 = 3;

/// So many messages may be behind the committed offset.
const WINDOW: usize = 256;

/// How long nothing has to come before it counts as nothing.
const QUIET: Duration = Duration::from_secs(2);

struct Broker {
    cluster: MockCluster<'static, DefaultProducerContext>,
    producer: FutureProducer,
    partitions: i32,
}

impl Broker {
    fn start(partitions: i32) -> Self {
        let cluster = MockCluster::new(BROKERS).unwrap();
        cluster.create_topic(TOPIC, partitions, BROKERS).unwrap();
        let producer = ClientConfig::new().set("bootstrap.servers", cluster.bootstrap_servers()).create().unwrap();
        Self { cluster, producer, partitions }
    }

    async fn publish(&self, key: &str, id: &str) {
        let payload = format!("payload of {id}");
        let headers = OwnedHeaders::new().insert(Header { key: "Idem-Message-Id", value: Some(id) });
        let record = FutureRecord::to(TOPIC).key(key).payload(&payload).headers(headers);
        self.producer.send(record, PATIENCE).await.unwrap();
    }

    fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", self.cluster.bootstrap_servers()).set("group.id", "billing");
        config.set("session.timeout.ms", "6000").set("heartbeat.interval.ms", "200");
        config
    }

    fn subscription(&self) -> KafkaSubscription {
        KafkaSubscription::new(self.config(), &[TOPIC], settings().record_retention()).unwrap()
    }

    fn all_down(&self) {
        (1..=BROKERS).for_each(|broker| self.cluster.broker_down(broker).unwrap());
    }

    fn all_up(&self) {
        (1..=BROKERS).for_each(|broker| self.cluster.broker_up(broker).unwrap());
    }

    /// Waits until the group has committed the end of each partition.
    async fn drained(&self) {
        let observer: BaseConsumer = self.config().create().unwrap();
        let partitions = self.partitions;
        let is_drained = move || {
            let mut list = TopicPartitionList::new();
            for number in 0..partitions {
                list.add_partition(TOPIC, number);
            }
            // An error is that of a broker that has just come back.
            let Ok(committed) = observer.committed_offsets(list, QUIET) else { return false };
            committed.elements().iter().all(|one| {
                let end = observer.fetch_watermarks(TOPIC, one.partition(), QUIET).map(|(_, end)| end);
                end.is_ok_and(|end| end == 0 || one.offset() == Offset::Offset(end))
            })
        };
        let drained = async {
            while !tokio::task::block_in_place(&is_drained) {
                sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(PATIENCE, drained).await.unwrap();
    }
}

async fn receive(subscription: &mut KafkaSubscription) -> (Message, KafkaReceipt) {
    timeout(PATIENCE, subscription.receive()).await.unwrap().unwrap()
}

async fn receive_some(subscription: &mut KafkaSubscription, count: usize) -> Vec<(Message, KafkaReceipt)> {
    let mut received = Vec::new();
    while received.len() < count {
        received.push(receive(subscription).await);
    }
    received
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_message_takes_effect_once_although_all_brokers_go_down() {
    let broker = Broker::start(3);
    let place = Place::new(Kind::Sqlite).await;
    for number in 0..100 {
        for _ in 0..2 {
            broker.publish(&format!("key {number}"), &format!("m-{number}")).await;
        }
    }
    let inbox = place.inbox(Contract::Transactional);
    let running = Running::start(Consumer::new(inbox, broker.subscription()).unwrap(), &place);
    let reached = async {
        while place.effects().all().await.len() < 30 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, reached).await.unwrap();
    broker.all_down();
    sleep(Duration::from_secs(1)).await;
    broker.all_up();
    broker.drained().await;
    running.stop().await;
    let all = place.effects().all().await;
    assert_eq!((all.len(), all.iter().collect::<BTreeSet<_>>().len()), (100, 100));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_waits_lets_a_window_of_others_pass_and_no_more() {
    let broker = Broker::start(1);
    for number in 0..WINDOW + 20 {
        broker.publish("a", &format!("{number}")).await;
    }
    let mut subscription = broker.subscription();
    let received = receive_some(&mut subscription, WINDOW).await;
    assert!(received.iter().all(|(message, _)| message.delivery == SUSPECT_FROM && message.age.is_none()));
    assert!(timeout(QUIET, subscription.receive()).await.is_err(), "the window is full");
    for (_, receipt) in &received[1..] {
        receipt.ack().await.unwrap();
    }
    assert!(timeout(QUIET, subscription.receive()).await.is_err(), "the first one holds the offset");
    received[0].1.ack().await.unwrap();
    let others = receive_some(&mut subscription, 20).await;
    let ids: Vec<usize> = others.iter().map(|(message, _)| message.id.parse().unwrap()).collect();
    assert_eq!(ids, (WINDOW..WINDOW + 20).collect::<Vec<_>>());
    assert!(others.iter().all(|(message, _)| message.delivery == 1 && message.age.is_some()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_consumer_begins_with_the_first_message_that_has_not_ended() {
    let broker = Broker::start(1);
    for number in 0..10 {
        broker.publish("a", &format!("{number}")).await;
    }
    let mut first = broker.subscription();
    let received = receive_some(&mut first, 10).await;
    for place in [0, 1, 3, 4, 5, 6, 7, 8, 9] {
        received[place].1.ack().await.unwrap();
    }
    // The group is left with the last receipt.
    drop(received);
    first.close().await;
    let mut second = broker.subscription();
    let received = receive_some(&mut second, 8).await;
    let ids: Vec<&str> = received.iter().map(|(message, _)| message.id.as_str()).collect();
    assert_eq!(ids, ["2", "3", "4", "5", "6", "7", "8", "9"]);
    for (_, receipt) in &received {
        receipt.ack().await.unwrap();
    }
    drop(received);
    second.close().await;
    broker.drained().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_whose_task_has_failed_is_received_again() {
    let broker = Broker::start(1);
    for number in 0..10 {
        broker.publish("a", &format!("{number}")).await;
    }
    let mut subscription = broker.subscription();
    let mut received = receive_some(&mut subscription, 10).await;
    for (_, receipt) in &received[..4] {
        receipt.ack().await.unwrap();
    }
    // Neither acknowledged nor given back.
    drop(received.remove(4));
    let again = receive_some(&mut subscription, 6).await;
    let ids: Vec<&str> = again.iter().map(|(message, _)| message.id.as_str()).collect();
    assert_eq!(ids, ["4", "5", "6", "7", "8", "9"]);
    for (_, receipt) in &received[4..] {
        receipt.ack().await.unwrap_err();
    }
    for (_, receipt) in &again {
        receipt.ack().await.unwrap();
    }
    broker.drained().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_of_a_partition_that_was_given_away_is_acknowledged_by_its_new_consumer_alone() {
    let broker = Broker::start(2);
    for number in 0..40 {
        broker.publish(&format!("key {number}"), &format!("{number}")).await;
    }
    let mut first = broker.subscription();
    let received = receive_some(&mut first, 40).await;
    // It has to be polled, or it would not take part in the rebalance.
    let polled = tokio::spawn(async move {
        let mut again = Vec::new();
        while let Ok(received) = first.receive().await {
            again.push(received);
        }
    });
    let mut second = broker.subscription();
    let (message, receipt) = receive(&mut second).await;
    // All partitions are revoked in a rebalance, and those that stay are delivered again.
    for (message, receipt) in &received {
        receipt.ack().await.expect_err(&message.id);
    }
    assert!(received.iter().any(|(first, _)| first.id == message.id));
    receipt.ack().await.unwrap();
    polled.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_of_a_key_are_handled_in_order_across_failures_and_restarts() {
    let broker = Broker::start(2);
    let place = Place::new(Kind::Sqlite).await;
    for number in 0..60 {
        broker.publish(["a", "b", "c"][number % 3], &format!("m-{number:02}")).await;
    }
    let consumer = Consumer::new(place.inbox(Contract::Transactional), broker.subscription()).unwrap().ordered();
    let table = place.effects();
    let handler = move |context, message: Message| {
        let table = table.clone();
        async move {
            if message.id == "m-07" {
                return Err(MessageError::Retry { after: Some(Duration::from_secs(5)), why: "later".into() });
            }
            table.add(&context, &message.id).await
        }
    };
    let task = tokio::spawn(consumer.run_until(std::future::pending(), handler));
    let others_are_done = async {
        while place.effects().all().await.len() < 40 + 2 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, others_are_done).await.unwrap();
    task.abort();
    broker.publish("a", "m-60").await;
    broker.publish("b", "m-61").await;
    let consumer = Consumer::new(place.inbox(Contract::Transactional), broker.subscription()).unwrap();
    let running = Running::start(consumer.ordered(), &place);
    broker.drained().await;
    running.stop().await;
    let all = place.effects().all().await;
    assert_eq!(all.len(), 62);
    for key in 0..3 {
        let of_key: Vec<_> = all.iter().filter(|id| id[2..].parse::<usize>().unwrap() % 3 == key).collect();
        assert!(of_key.is_sorted(), "{of_key:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_have_to_be_kept_for_as_long_as_the_topic_keeps_its_messages() {
    let broker = Broker::start(1);
    let place = Place::new(Kind::Sqlite).await;
    let week = Duration::from_secs(7 * 24 * 60 * 60);
    let consumer = |retention| {
        let inbox = place.inbox_with(Contract::Transactional, settings().retention(retention));
        Consumer::new(inbox, KafkaSubscription::new(broker.config(), &[TOPIC], week).unwrap())
    };
    let refused = consumer(week / 7);
    assert!(matches!(refused, Err(InvalidInbox::Retention { .. })), "{refused:?}");
    assert!(consumer(week).is_ok());
    let mut config = broker.config();
    config.set("auto.offset.reset", "latest");
    assert!(KafkaSubscription::new(config, &[TOPIC], week).is_err());
    let mut config = broker.config();
    config.remove("group.id");
    assert!(KafkaSubscription::new(config, &[TOPIC], week).is_err());
}
