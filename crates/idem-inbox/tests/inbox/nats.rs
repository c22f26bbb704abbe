//! Consumers of a real JetStream.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::jetstream::consumer::{AckPolicy, pull};
use async_nats::jetstream::{self, stream};
use futures_util::StreamExt as _;
use idem_core::engine::Contract;
use idem_inbox::{Consumer, InvalidInbox, MessageError, NatsError, NatsSubscription, Subscription as _};
use idem_servers::{Nats, Postgres};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use crate::support::{Kind, PATIENCE, Place, Running, message, settings};

/// A stream with a durable consumer.
struct Broker {
    server: Nats,
    stream: stream::Stream,
    context: jetstream::Context,
}

impl Broker {
    async fn start(ack_wait: Duration) -> Self {
        let server = Nats::start().unwrap();
        let context = jetstream::new(async_nats::connect(server.url()).await.unwrap());
        let config = stream::Config {
            name: "INVOICES".into(),
            subjects: vec!["invoices.>".into()],
            // So short that repeats reach the consumer.
            duplicate_window: Duration::from_millis(100),
            ..Default::default()
        };
        let stream = context.create_stream(config).await.unwrap();
        let broker = Self { server, stream, context };
        broker.add_consumer(pull::Config { ack_wait, ..durable("billing") }).await;
        broker
    }

    async fn add_consumer(&self, config: pull::Config) {
        self.stream.create_consumer(config).await.unwrap();
    }

    async fn publish(&self, key: &str, id: &str) {
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Msg-Id", id);
        let sent =
            self.context.publish_with_headers(format!("invoices.{key}"), headers, format!("payload of {id}").into());
        sent.await.unwrap().await.unwrap();
    }

    async fn subscription(&self) -> NatsSubscription {
        NatsSubscription::open(&self.stream, "billing").await.unwrap()
    }

    /// Waits until every message is acknowledged.
    async fn drained(&self) {
        let consumer: jetstream::consumer::PullConsumer = self.stream.get_consumer("billing").await.unwrap();
        let drained = async {
            loop {
                if let Ok(info) = consumer.get_info().await
                    && info.num_pending == 0
                    && info.num_ack_pending == 0
                {
                    return;
                }
                sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(PATIENCE, drained).await.unwrap();
    }
}

fn durable(name: &str) -> pull::Config {
    pull::Config { durable_name: Some(name.into()), ack_policy: AckPolicy::Explicit, ..Default::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_message_takes_effect_once_however_often_it_is_published() {
    for kind in [Kind::Sqlite, Kind::Postgres] {
        let broker = Broker::start(Duration::from_secs(30)).await;
        let place = Place::new(kind).await;
        for _ in 0..3 {
            for number in 0..20 {
                broker.publish("a", &format!("m-{number}")).await;
            }
            sleep(Duration::from_millis(150)).await;
        }
        let inbox = place.inbox(Contract::Transactional);
        let running = Running::start(Consumer::new(inbox, broker.subscription().await).unwrap(), &place);
        broker.drained().await;
        running.stop().await;
        let all = place.effects().all().await;
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!((all.len(), distinct.len()), (20, 20), "{kind:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_handler_keeps_its_message() {
    let broker = Broker::start(Duration::from_secs(1)).await;
    let place = Place::new(Kind::Sqlite).await;
    broker.publish("a", "1").await;
    let consumer = Consumer::new(place.inbox(Contract::AtLeastOnce), broker.subscription().await).unwrap();
    let (stop, deliveries) = (Arc::new(Notify::new()), Arc::new(AtomicUsize::new(0)));
    let (stopped, seen) = (Arc::clone(&stop), Arc::clone(&deliveries));
    let handler = move |_, message: idem_inbox::Message| {
        seen.fetch_max(message.delivery as usize, Ordering::SeqCst);
        async {
            sleep(Duration::from_secs(4)).await;
            Ok(())
        }
    };
    let task = tokio::spawn(consumer.run_until(async move { stopped.notified().await }, handler));
    broker.drained().await;
    stop.notify_one();
    task.await.unwrap();
    let consumer: jetstream::consumer::PullConsumer = broker.stream.get_consumer("billing").await.unwrap();
    let info = consumer.get_info().await.unwrap();
    assert_eq!((info.delivered.consumer_sequence, deliveries.load(Ordering::SeqCst)), (1, 1), "it was delivered once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_survive_a_crash_of_the_broker() {
    let mut broker = Broker::start(Duration::from_secs(2)).await;
    let place = Place::new(Kind::Sqlite).await;
    for number in 0..200 {
        broker.publish("a", &format!("m-{number}")).await;
    }
    let inbox = place.inbox(Contract::Transactional);
    let running = Running::start(Consumer::new(inbox, broker.subscription().await).unwrap(), &place);
    for crashed_at in [20, 100] {
        let reached = async {
            while place.effects().all().await.len() < crashed_at {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(PATIENCE, reached).await.unwrap();
        broker.server.kill().unwrap();
        broker.server.start_again().unwrap();
    }
    broker.drained().await;
    running.stop().await;
    let all = place.effects().all().await;
    let distinct: std::collections::BTreeSet<_> = all.iter().collect();
    assert_eq!((all.len(), distinct.len()), (200, 200));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_consumer_gives_back_what_waits() {
    let broker = Broker::start(Duration::from_secs(30)).await;
    let place = Place::new(Kind::Sqlite).await;
    let consumer = Consumer::new(place.inbox(Contract::Transactional), broker.subscription().await).unwrap();
    broker.publish("a", "1").await;
    let (stop, tried) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (stopped, trying) = (Arc::clone(&stop), Arc::clone(&tried));
    let handler = move |_, _| {
        trying.notify_one();
        async { Err(MessageError::Retry { after: Some(Duration::from_secs(3)), why: "later".into() }) }
    };
    let task = tokio::spawn(consumer.run_until(async move { stopped.notified().await }, handler));
    timeout(PATIENCE, tried.notified()).await.unwrap();
    stop.notify_one();
    timeout(PATIENCE, task).await.unwrap().unwrap();
    let begun = Instant::now();
    let inbox = place.inbox(Contract::Transactional);
    let running = Running::start(Consumer::new(inbox, broker.subscription().await).unwrap(), &place);
    broker.drained().await;
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}: not after the ack_wait of 30 s", begun.elapsed());
    running.stop().await;
    assert_eq!(place.effects().all().await, ["1"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_of_a_key_are_handled_in_order_across_failures_and_restarts() {
    let broker = Broker::start(Duration::from_secs(2)).await;
    let place = Place::new(Kind::Sqlite).await;
    for number in 0..60 {
        broker.publish(["a", "b", "c"][number % 3], &format!("m-{number:02}")).await;
    }
    // The first consumer disappears without a word while it holds messages, of which one fails again and again.
    let consumer = Consumer::new(place.inbox(Contract::Transactional), broker.subscription().await).unwrap().ordered();
    let effects = place.effects();
    let handler = move |context, message: idem_inbox::Message| {
        let effects = effects.clone();
        async move {
            if message.id == "m-07" {
                return Err(MessageError::Retry { after: Some(Duration::from_secs(1)), why: "later".into() });
            }
            effects.add(&context, &message.id).await
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
    let consumer = Consumer::new(place.inbox(Contract::Transactional), broker.subscription().await).unwrap();
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
async fn a_requested_replay_is_handled_by_the_consumer() {
    let broker = Broker::start(Duration::from_secs(30)).await;
    let place = Place::new(Kind::Sqlite).await;
    let inbox = place.inbox(Contract::Transactional);
    inbox.handle(&message("1"), |_, _| async { Err(MessageError::Reject { why: "not yet".into() }) }).await;
    place.parking.request_replay("billing", &message("1").parking_key()).await.unwrap();
    let running = Running::start(Consumer::new(inbox, broker.subscription().await).unwrap(), &place);
    let replayed = async {
        while place.effects().all().await.is_empty() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, replayed).await.unwrap();
    running.stop().await;
    assert_eq!(place.effects().all().await, ["1"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_that_would_lose_messages_is_refused() {
    let broker = Broker::start(Duration::from_secs(30)).await;
    let place = Place::new(Kind::Sqlite).await;
    broker.add_consumer(pull::Config { ack_policy: AckPolicy::None, ..durable("unacknowledged") }).await;
    broker.add_consumer(pull::Config { max_deliver: 5, ..durable("dropping") }).await;
    let open = async |name| NatsSubscription::open(&broker.stream, name).await;
    assert!(matches!(open("unacknowledged").await, Err(NatsError::AckPolicy { .. })));
    assert!(matches!(open("dropping").await, Err(NatsError::MaxDeliver { max_deliver: 5, .. })));
    assert!(matches!(open("absent").await, Err(NatsError::Lookup { .. })));
    let config = stream::Config {
        name: "OLD".into(),
        subjects: vec!["old".into()],
        max_age: Duration::from_secs(7200),
        ..Default::default()
    };
    let old = broker.context.create_stream(config).await.unwrap();
    old.create_consumer(durable("billing")).await.unwrap();
    let consumer = |retention| {
        let inbox = place.inbox_with(Contract::Transactional, settings().retention(retention));
        let old = old.clone();
        async move { Consumer::new(inbox, NatsSubscription::open(&old, "billing").await.unwrap()) }
    };
    let refused = consumer(Duration::from_secs(3600)).await;
    assert!(matches!(refused, Err(InvalidInbox::Retention { redelivery: Duration { .. }, .. })), "{refused:?}");
    assert!(consumer(Duration::from_secs(7200)).await.is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ordered_consumer_begins_while_messages_keep_coming() {
    let broker = Arc::new(Broker::start(Duration::from_secs(2)).await);
    let place = Place::new(Kind::Sqlite).await;
    // An earlier consumer has received messages, and has disappeared.
    for number in 0..10 {
        broker.publish("a", &format!("m-{number:04}")).await;
    }
    let mut earlier = broker.subscription().await;
    let receipts = [earlier.receive().await.unwrap(), earlier.receive().await.unwrap()];
    drop((receipts, earlier));
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let publishing = {
        let broker = Arc::clone(&broker);
        tokio::spawn(async move {
            let mut number = 10;
            let mut stopped = std::pin::pin!(stopped);
            while timeout(Duration::from_millis(2), &mut stopped).await.is_err() {
                broker.publish("a", &format!("m-{number:04}")).await;
                number += 1;
            }
            number
        })
    };
    let inbox = place.inbox(Contract::Transactional);
    let running = Running::start(Consumer::new(inbox, broker.subscription().await).unwrap().ordered(), &place);
    let begun = async {
        while place.effects().all().await.len() < 50 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, begun).await.unwrap();
    stop.send(()).unwrap();
    let published = publishing.await.unwrap();
    broker.drained().await;
    running.stop().await;
    let all = place.effects().all().await;
    assert_eq!((all.len(), all.is_sorted()), (published, true), "{all:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_order_is_kept_if_the_broker_is_away_for_longer_than_messages_are_waited_for() {
    const ACK_WAIT: Duration = Duration::from_secs(1);
    let mut broker = Broker::start(ACK_WAIT).await;
    let place = Place::new(Kind::Sqlite).await;
    for number in 0..10 {
        broker.publish("a", &format!("m-{number:02}")).await;
    }
    // An earlier consumer has received messages, and has disappeared.
    let consumer: jetstream::consumer::PullConsumer = broker.stream.get_consumer("billing").await.unwrap();
    assert_eq!(consumer.fetch().max_messages(2).messages().await.unwrap().count().await, 2);
    let inbox = place.inbox(Contract::Transactional);
    let running = Running::start(Consumer::new(inbox, broker.subscription().await).unwrap().ordered(), &place);
    let waits = async {
        while consumer.get_info().await.unwrap().num_pending > 0 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, waits).await.unwrap();
    broker.server.kill().unwrap();
    sleep(3 * ACK_WAIT).await;
    broker.server.start_again().unwrap();
    // The server delivers these first.
    for number in 10..20 {
        broker.publish("a", &format!("m-{number:02}")).await;
    }
    broker.drained().await;
    running.stop().await;
    let expected: Vec<String> = (0..20).map(|number| format!("m-{number:02}")).collect();
    assert_eq!(place.effects().all().await, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_waits_for_its_database_and_loses_nothing() {
    let broker = Broker::start(Duration::from_secs(30)).await;
    let mut postgres = Postgres::start().unwrap();
    let place = Place::in_postgres(&postgres.url()).await;
    let inbox = place.inbox(Contract::Transactional);
    let running = Running::start(Consumer::new(inbox, broker.subscription().await).unwrap(), &place);
    broker.publish("a", "before").await;
    broker.drained().await;
    postgres.kill().unwrap();
    for number in 0..50 {
        broker.publish("a", &format!("m-{number}")).await;
    }
    sleep(Duration::from_secs(3)).await;
    let consumer: jetstream::consumer::PullConsumer = broker.stream.get_consumer("billing").await.unwrap();
    let info = consumer.get_info().await.unwrap();
    assert!(
        info.num_ack_pending + usize::try_from(info.num_pending).unwrap() == 50,
        "nothing was acknowledged: {info:?}"
    );
    postgres.start_again().unwrap();
    broker.drained().await;
    running.stop().await;
    let all = place.effects().all().await;
    let distinct: std::collections::BTreeSet<_> = all.iter().collect();
    assert_eq!((all.len(), distinct.len()), (51, 51));
    let parked = place.parking.list("billing", false, None, 9.try_into().unwrap()).await.unwrap();
    assert!(parked.is_empty(), "{parked:?}");
}
