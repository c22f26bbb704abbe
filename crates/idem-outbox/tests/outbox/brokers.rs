//! What the clients of brokers send, and what they take for sent. RabbitMQ and JetStream are real servers. Kafka is the mock cluster of
//! librdkafka, whose brokers speak its protocol over sockets.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use async_nats::connection::State;
use async_nats::jetstream::{self, stream};
use futures_util::future::join_all;
use idem_outbox::{KafkaPublisher, MessageToSend, NatsPublisher, Publisher as _, RabbitMqPublisher, Relay};
use idem_servers::{Nats, RabbitMq};
use lapin::options::QueueDeclareOptions;
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};
use rdkafka::ClientConfig;
use rdkafka::consumer::{Consumer as _, StreamConsumer};
use rdkafka::message::{Headers as _, Message as _};
use rdkafka::mocking::MockCluster;
use tokio::time::{sleep, timeout};

use crate::support::{Kind, PATIENCE, Place, Running, message};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_each_message_gets_its_own_confirmation() {
    let server = RabbitMq::start().unwrap();
    let connection = Connection::connect(&server.url(), ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    channel.queue_declare("taken".into(), durable, FieldTable::default()).await.unwrap();
    let publisher = RabbitMqPublisher::new(server.url(), "").unwrap();
    let to = |number: usize| {
        let mut message = message(&format!("{number}"));
        message.topic = if number.is_multiple_of(3) { "taken by no queue" } else { "taken" }.replace(' ', "-");
        message
    };
    let messages: Vec<MessageToSend> = (0..300).map(to).collect();
    // The second time there are channels to use again.
    for _ in 0..2 {
        let sent = join_all(messages.iter().map(|message| publisher.publish(message))).await;
        for (number, sent) in sent.into_iter().enumerate() {
            match sent {
                Ok(()) => assert!(!number.is_multiple_of(3), "{number} was returned"),
                Err(error) => {
                    assert!(number.is_multiple_of(3), "{number}: {error}");
                    assert!(error.to_string().contains("no queue takes"), "{error}");
                }
            }
        }
    }
    let queue = channel.queue_declare("taken".into(), durable, FieldTable::default()).await.unwrap();
    assert_eq!(queue.message_count(), 400);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jetstream_a_message_is_not_sent_after_it_was_refused() {
    let mut server = Nats::start().unwrap();
    let client = async_nats::connect(server.url()).await.unwrap();
    let context = jetstream::new(client.clone());
    let config = stream::Config { name: "INVOICES".into(), subjects: vec!["invoices.>".into()], ..Default::default() };
    let stream = context.create_stream(config).await.unwrap();
    let publisher = NatsPublisher::new(context);
    server.kill().unwrap();
    let state = |wanted: State| {
        let client = client.clone();
        async move {
            let reached = async {
                while client.connection_state() != wanted {
                    sleep(Duration::from_millis(10)).await;
                }
            };
            timeout(PATIENCE, reached).await.unwrap();
        }
    };
    state(State::Disconnected).await;
    publisher.publish(&message("refused")).await.unwrap_err();
    server.start_again().unwrap();
    state(State::Connected).await;
    publisher.publish(&message("sent")).await.unwrap();
    assert_eq!(stream.get_info().await.unwrap().state.messages, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_gets_every_message_in_the_order_of_its_key_although_all_brokers_go_down() {
    let place = Place::new(Kind::Sqlite).await;
    let cluster = MockCluster::new(3).unwrap();
    cluster.create_topic("invoices.paid", 2, 3).unwrap();
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", cluster.bootstrap_servers());
    let publisher = Arc::new(KafkaPublisher::new(config.clone()).unwrap());
    let relay = Running::start(Relay::new(Arc::clone(&place.outbox), publisher));
    for number in 0..150 {
        match number {
            50 => (1..=3).for_each(|broker| cluster.broker_down(broker).unwrap()),
            100 => {
                // Longer than the client tries.
                sleep(Duration::from_secs(6)).await;
                (1..=3).for_each(|broker| cluster.broker_up(broker).unwrap());
            }
            _ => {}
        }
        let message = message(&format!("{number:03}")).ordered_by(format!("{}", number % 3)).header("Trace", "t");
        place.publish(&message).await;
    }
    place.drained().await;
    relay.stop().await;
    config.set("group.id", "observer").set("auto.offset.reset", "earliest");
    let consumer: StreamConsumer = config.create().unwrap();
    consumer.subscribe(&["invoices.paid"]).unwrap();
    let (mut seen, mut first) = (HashSet::new(), Vec::new());
    while first.len() < 150 {
        let record = timeout(PATIENCE, consumer.recv()).await.unwrap().unwrap();
        let field = |name: &str| {
            let found = record.headers().unwrap().iter().find(|field| field.key == name).unwrap();
            String::from_utf8(found.value.unwrap().to_vec()).unwrap()
        };
        let (id, key) = (field("Idem-Message-Id"), String::from_utf8(record.key().unwrap().to_vec()).unwrap());
        assert_eq!((id.parse::<usize>().unwrap() % 3).to_string(), key);
        assert_eq!((field("Trace").as_str(), record.payload().unwrap()), ("t", format!("payload of {id}").as_bytes()));
        if seen.insert(id.clone()) {
            first.push(id);
        }
    }
    for key in 0..3 {
        let of_key: Vec<_> = first.iter().filter(|id| id.parse::<usize>().unwrap() % 3 == key).collect();
        assert!(of_key.is_sorted(), "{of_key:?}");
    }
}
