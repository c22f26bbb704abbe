//! Consumers of a real RabbitMQ.

use std::collections::BTreeSet;
use std::time::Duration;

use idem_core::engine::Contract;
use idem_inbox::{Consumer, MessageError, RabbitMqSubscription};
use idem_servers::RabbitMq;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use tokio::time::{sleep, timeout};

use crate::support::{Kind, PATIENCE, Place, Running, settings};

const QUEUE: &str = "invoices";

/// The kinds of queues.
const KINDS: [&str; 2] = ["classic", "quorum"];

/// A queue with a channel to publish to it.
struct Broker {
    server: RabbitMq,
    channel: Channel,
    connection: Connection,
}

impl Broker {
    async fn start(kind: &str) -> Self {
        Self::start_with(kind, FieldTable::default()).await
    }

    async fn start_with(kind: &str, mut arguments: FieldTable) -> Self {
        let server = RabbitMq::start().unwrap();
        let (connection, channel) = Self::connect(&server).await;
        arguments.insert("x-queue-type".into(), AMQPValue::LongString(kind.into()));
        arguments.insert("x-single-active-consumer".into(), AMQPValue::Boolean(true));
        let options = QueueDeclareOptions { durable: true, ..Default::default() };
        channel.queue_declare(QUEUE.into(), options, arguments).await.unwrap();
        Self { server, channel, connection }
    }

    async fn connect(server: &RabbitMq) -> (Connection, Channel) {
        let connection = Connection::connect(&server.url(), ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
        (connection, channel)
    }

    async fn publish(&self, key: &str, id: &str) {
        let mut headers = FieldTable::default();
        headers.insert("Idem-Ordering-Key".into(), AMQPValue::LongString(key.into()));
        let properties = BasicProperties::default().with_headers(headers).with_delivery_mode(2);
        let properties = if id.is_empty() { properties } else { properties.with_message_id(id.into()) };
        self.publish_with(properties, &format!("payload of {id}")).await;
    }

    async fn publish_with(&self, properties: BasicProperties, payload: &str) {
        let options = BasicPublishOptions { mandatory: true, ..Default::default() };
        let sent = self.channel.basic_publish("".into(), QUEUE.into(), options, payload.as_bytes(), properties);
        let confirmed = sent.await.unwrap().await.unwrap();
        assert!(matches!(confirmed, lapin::Confirmation::Ack(None)), "{confirmed:?}");
    }

    fn subscription(&self) -> RabbitMqSubscription {
        RabbitMqSubscription::new(self.server.url(), QUEUE)
    }

    async fn crash(&mut self) {
        self.server.kill().unwrap();
        self.server.start_again().unwrap();
        (self.connection, self.channel) = Self::connect(&self.server).await;
    }

    /// Whether nothing waits in the queue. Unacknowledged messages do not count.
    async fn waits_nothing(&self) -> bool {
        let passive = QueueDeclareOptions { passive: true, durable: true, ..Default::default() };
        self.channel.queue_declare(QUEUE.into(), passive, FieldTable::default()).await.unwrap().message_count() == 0
    }
}

/// After this time a broker that is killed knows its queue again: it keeps new definitions in memory for up to two seconds.
const DEFINED_FOR_SURE: Duration = Duration::from_secs(3);

/// Waits until so many effects are there.
async fn effects(place: &Place, count: usize) {
    let reached = async {
        while place.effects().all().await.len() < count {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(PATIENCE, reached).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_message_takes_effect_once_across_crashes_of_the_broker() {
    for kind in KINDS {
        let mut broker = Broker::start(kind).await;
        sleep(DEFINED_FOR_SURE).await;
        let place = Place::new(Kind::Sqlite).await;
        for number in 0..100 {
            for _ in 0..2 {
                broker.publish("a", &format!("m-{number}")).await;
            }
        }
        let inbox = place.inbox(Contract::Transactional);
        let running = Running::start(Consumer::new(inbox, broker.subscription()).unwrap(), &place);
        effects(&place, 30).await;
        broker.crash().await;
        effects(&place, 100).await;
        // Each of the others is a repeat, so it adds nothing.
        timeout(PATIENCE, async {
            while !broker.waits_nothing().await {
                sleep(Duration::from_millis(10)).await
            }
        })
        .await
        .unwrap();
        running.stop().await;
        let all = place.effects().all().await;
        assert_eq!((all.len(), all.iter().collect::<BTreeSet<_>>().len()), (100, 100), "{kind}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_of_a_key_are_handled_in_order_across_failures_and_restarts() {
    for kind in KINDS {
        let broker = Broker::start(kind).await;
        let place = Place::new(Kind::Sqlite).await;
        for number in 0..30 {
            broker.publish(["a", "b", "c"][number % 3], &format!("m-{number:02}")).await;
        }
        // The first consumer disappears without a word while it holds messages, of which one fails again and again.
        let consumer = Consumer::new(place.inbox(Contract::Transactional), broker.subscription()).unwrap().ordered();
        let table = place.effects();
        let handler = move |context, message: idem_inbox::Message| {
            let table = table.clone();
            async move {
                if message.id == "m-07" {
                    return Err(MessageError::Retry { after: Some(Duration::from_secs(1)), why: "later".into() });
                }
                table.add(&context, &message.id).await
            }
        };
        let task = tokio::spawn(consumer.run_until(std::future::pending(), handler));
        effects(&place, 20 + 2).await;
        task.abort();
        broker.publish("a", "m-30").await;
        broker.publish("b", "m-31").await;
        let consumer = Consumer::new(place.inbox(Contract::Transactional), broker.subscription()).unwrap();
        let running = Running::start(consumer.ordered(), &place);
        effects(&place, 32).await;
        running.stop().await;
        assert!(broker.waits_nothing().await);
        let all = place.effects().all().await;
        for key in 0..3 {
            let of_key: Vec<_> = all.iter().filter(|id| id[2..].parse::<usize>().unwrap() % 3 == key).collect();
            assert!(of_key.is_sorted(), "{kind}: {of_key:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_without_an_id_is_parked_and_a_stopped_consumer_gives_back_what_waits() {
    let broker = Broker::start("quorum").await;
    let place = Place::new(Kind::Sqlite).await;
    broker.publish("a", "").await;
    broker.publish("a", "1").await;
    let consumer = Consumer::new(place.inbox(Contract::Transactional), broker.subscription()).unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let (tried, mut trying) = tokio::sync::mpsc::unbounded_channel();
    let handler = move |_, message: idem_inbox::Message| {
        tried.send(message.delivery).unwrap();
        async { Err(MessageError::Retry { after: Some(Duration::from_secs(1)), why: "later".into() }) }
    };
    let task = tokio::spawn(consumer.run_until(async { drop(stopped.await) }, handler));
    assert_eq!(timeout(PATIENCE, trying.recv()).await.unwrap(), Some(1));
    stop.send(()).unwrap();
    timeout(PATIENCE, task).await.unwrap().unwrap();
    let running =
        Running::start(Consumer::new(place.inbox(Contract::Transactional), broker.subscription()).unwrap(), &place);
    effects(&place, 1).await;
    running.stop().await;
    let parked = place.parking.list("billing", false, None, 9.try_into().unwrap()).await.unwrap();
    assert_eq!(parked.len(), 1, "{parked:?}");
    assert!(parked[0].reason.starts_with("no id"), "{parked:?}");
    assert!(broker.waits_nothing().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempts_use_up_no_delivery_limit() {
    let mut arguments = FieldTable::default();
    arguments.insert("x-delivery-limit".into(), AMQPValue::LongInt(1));
    let broker = Broker::start_with("quorum", arguments).await;
    let place = Place::new(Kind::Sqlite).await;
    broker.publish("a", "1").await;
    let settings = settings().max_attempts(9.try_into().unwrap());
    let inbox = place.inbox_with(Contract::Transactional, settings);
    let consumer = Consumer::new(inbox, broker.subscription()).unwrap();
    let (table, attempts) = (place.effects(), std::sync::atomic::AtomicUsize::new(0));
    let handler = move |context, message: idem_inbox::Message| {
        let attempt = attempts.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        let table = table.clone();
        async move {
            if attempt < 5 {
                return Err(MessageError::Retry { after: Some(Duration::from_millis(50)), why: "later".into() });
            }
            table.add(&context, &message.id).await
        }
    };
    let task = tokio::spawn(consumer.run_until(std::future::pending(), handler));
    effects(&place, 1).await;
    task.abort();
    assert_eq!(place.effects().all().await, ["1"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_timestamp_ends_a_consumer() {
    let broker = Broker::start("quorum").await;
    let place = Place::new(Kind::Sqlite).await;
    let seconds = [0, u64::from(u32::MAX), 1 << 63, u64::MAX];
    for (number, seconds) in seconds.into_iter().enumerate() {
        let properties = BasicProperties::default().with_message_id(format!("{number}").into());
        broker.publish_with(properties.with_timestamp(seconds), "x").await;
    }
    let inbox = place.inbox(Contract::Transactional);
    let running = Running::start(Consumer::new(inbox, broker.subscription()).unwrap(), &place);
    effects(&place, seconds.len()).await;
    running.stop().await;
    assert!(broker.waits_nothing().await);
}
