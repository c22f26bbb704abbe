//! What gets out of the outbox.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::{self, stream};
use futures_util::StreamExt as _;
use idem_outbox::{MessageToSend, NatsPublisher, Relay};
use idem_servers::Nats;
use tokio::time::sleep;

use crate::support::{Kind, Place, Recorder, Running, message, on_each};

on_each!(
    messages_of_a_key_are_sent_in_the_order_of_their_commits,
    a_refused_message_holds_up_its_key_alone,
    a_relay_that_crashes_loses_nothing,
    of_two_relays_one_sends,
    more_messages_than_a_batch_are_sent,
    refused_messages_at_the_head_do_not_hold_up_the_others,
    a_client_that_panics_ends_no_relay,
    large_messages_are_claimed_a_few_at_a_time,
);

async fn messages_of_a_key_are_sent_in_the_order_of_their_commits(kind: Kind) {
    let place = Arc::new(Place::new(kind).await);
    let recorder = Arc::new(Recorder::default());
    let relay = place.relay(&recorder);
    // Two writers of one key. Each notes the order of commits while it still holds the key.
    let order = Arc::new(tokio::sync::Mutex::new(Vec::new()));
    let mut writers = tokio::task::JoinSet::new();
    for writer in 0..2 {
        let (place, order) = (Arc::clone(&place), Arc::clone(&order));
        writers.spawn(async move {
            for number in 0..30 {
                let id = format!("{writer}-{number}");
                let mut business = place.begin().await;
                // SQLite refuses a second writer after its `busy_timeout` only.
                business.publish(&message(&id).ordered_by("account 7")).await.unwrap();
                order.lock().await.push(id);
                tokio::task::yield_now().await;
                business.commit().await;
            }
        });
    }
    while writers.join_next().await.is_some() {}
    place.drained().await;
    relay.stop().await;
    assert_eq!(recorder.ids(), *order.lock().await);
}

async fn a_refused_message_holds_up_its_key_alone(kind: Kind) {
    let place = Place::new(kind).await;
    let recorder = Arc::new(Recorder::default());
    recorder.refuse("a-1");
    for id in ["a-0", "a-1", "a-2", "b-0", "b-1"] {
        place.publish(&message(id).ordered_by(&id[..1])).await;
    }
    place.publish(&message("without a key")).await;
    let relay = place.relay(&recorder);
    // A batch is removed after all of it was sent.
    let others = async {
        while place.outbox.backlog().await.unwrap().messages > 2 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(crate::support::PATIENCE, others).await.unwrap();
    assert_eq!(
        recorder.ids().iter().collect::<HashSet<_>>(),
        ["a-0", "b-0", "b-1", "without a key"].map(String::from).iter().collect()
    );
    assert_eq!(place.outbox.backlog().await.unwrap().messages, 2);
    place.publish(&message("b-2").ordered_by("b")).await;
    recorder.refuse_no_more();
    place.drained().await;
    relay.stop().await;
    let of_a: Vec<_> = recorder.ids().into_iter().filter(|id| id.starts_with("a-")).collect();
    assert_eq!(of_a, ["a-0", "a-1", "a-2"]);
}

async fn a_relay_that_crashes_loses_nothing(kind: Kind) {
    let place = Place::new(kind).await;
    let recorder = Arc::new(Recorder::default());
    for number in 0..300 {
        place.publish(&message(&format!("{number:03}")).ordered_by(format!("{}", number % 5))).await;
    }
    let relay = place.relay(&recorder);
    while recorder.ids().len() < 20 {
        tokio::task::yield_now().await;
    }
    relay.abort().await;
    let relay = place.relay(&recorder);
    place.drained().await;
    relay.stop().await;
    let mut seen = HashSet::new();
    let first: Vec<_> = recorder.ids().into_iter().filter(|id| seen.insert(id.clone())).collect();
    assert_eq!(first.len(), 300);
    for key in 0..5 {
        let of_key: Vec<_> = first.iter().filter(|id| id.parse::<usize>().unwrap() % 5 == key).collect();
        assert!(of_key.is_sorted(), "{of_key:?}");
    }
}

async fn of_two_relays_one_sends(kind: Kind) {
    let place = Place::new(kind).await;
    let recorder = Arc::new(Recorder::default());
    let relays = [place.relay(&recorder), place.relay(&recorder)];
    for number in 0..200 {
        place.publish(&message(&format!("{number:03}")).ordered_by("one key")).await;
    }
    place.drained().await;
    for relay in relays {
        relay.stop().await;
    }
    let ids = recorder.ids();
    assert_eq!((ids.len(), ids.is_sorted()), (200, true), "each was sent once, in order");
}

async fn more_messages_than_a_batch_are_sent(kind: Kind) {
    let place = Place::new(kind).await;
    let mut business = place.begin().await;
    for number in 0..600 {
        business.publish(&message(&format!("{number}"))).await.unwrap();
    }
    business.commit().await;
    let recorder = Arc::new(Recorder::default());
    let relay = place.relay(&recorder);
    place.drained().await;
    relay.stop().await;
    assert_eq!(recorder.ids().into_iter().collect::<HashSet<_>>().len(), 600);
}

async fn refused_messages_at_the_head_do_not_hold_up_the_others(kind: Kind) {
    let place = Place::new(kind).await;
    let recorder = Arc::new(Recorder::default());
    let mut business = place.begin().await;
    // More than two batches of refused messages, and a key with more than a batch behind a refused one.
    for number in 0..300 {
        let id = format!("refused-{number}");
        recorder.refuse(&id);
        business.publish(&message(&id)).await.unwrap();
    }
    recorder.refuse("hot-0");
    for number in 0..300 {
        business.publish(&message(&format!("hot-{number}")).ordered_by("hot")).await.unwrap();
    }
    for number in 0..300 {
        business.publish(&message(&format!("good-{number}"))).await.unwrap();
    }
    business.commit().await;
    let relay = place.relay(&recorder);
    let good = async {
        while recorder.ids().len() < 300 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(crate::support::PATIENCE, good).await.unwrap();
    assert!(recorder.ids().iter().all(|id| id.starts_with("good-")));
    recorder.refuse_no_more();
    place.drained().await;
    relay.stop().await;
    let hot: Vec<usize> =
        recorder.ids().iter().filter_map(|id| id.strip_prefix("hot-")).map(|number| number.parse().unwrap()).collect();
    assert!(hot.len() == 300 && hot.is_sorted(), "{hot:?}");
}

async fn a_client_that_panics_ends_no_relay(kind: Kind) {
    let place = Place::new(kind).await;
    let recorder = Arc::new(Recorder::default());
    recorder.panic_on("1");
    place.publish(&message("1")).await;
    place.publish(&message("2")).await;
    let relay = place.relay(&recorder);
    let other = async {
        while recorder.ids() != ["2"] {
            sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(crate::support::PATIENCE, other).await.unwrap();
    relay.stop().await;
    assert_eq!(place.outbox.backlog().await.unwrap().messages, 1);
}

async fn large_messages_are_claimed_a_few_at_a_time(kind: Kind) {
    let place = Place::new(kind).await;
    for number in 0..8 {
        let mut large = MessageToSend::new("invoices.paid", vec![7; 900 * 1024]);
        large.id = format!("{number}");
        place.publish(&large.ordered_by("one")).await;
    }
    let claim = place.outbox.claim(256.try_into().unwrap(), &[]).await.unwrap().unwrap();
    let claimed = claim.messages().len();
    assert!((1..=5).contains(&claimed), "{claimed} messages, which is {} KiB", claimed * 900);
    claim.finish(&[]).await.unwrap();
    let recorder = Arc::new(Recorder::default());
    let relay = place.relay(&recorder);
    place.drained().await;
    relay.stop().await;
    assert_eq!(recorder.ids(), ["0", "1", "2", "3", "4", "5", "6", "7"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_of_the_broker_loses_nothing() {
    let mut server = Nats::start().unwrap();
    let context = jetstream::new(async_nats::connect(server.url()).await.unwrap());
    let config = stream::Config { name: "INVOICES".into(), subjects: vec!["invoices.>".into()], ..Default::default() };
    let stream = context.create_stream(config).await.unwrap();
    let place = Place::new(Kind::Postgres).await;
    let publisher = Arc::new(NatsPublisher::new(context.clone()));
    let relay = Running::start(Relay::new(Arc::clone(&place.outbox), publisher));
    for number in 0..150 {
        if number == 50 {
            server.kill().unwrap();
        }
        if number == 100 {
            server.start_again().unwrap();
        }
        let message = message(&format!("{number:03}")).ordered_by(format!("{}", number % 3)).header("Trace", "t");
        place.publish(&message).await;
    }
    place.drained().await;
    relay.stop().await;
    let consumer = stream.create_consumer(jetstream::consumer::pull::OrderedConfig::default()).await.unwrap();
    let count = stream.get_info().await.unwrap().state.messages;
    let messages = consumer.messages().await.unwrap().take(count.try_into().unwrap());
    let messages: Vec<_> = messages.map(Result::unwrap).collect().await;
    let field = |message: &jetstream::Message, name: &str| {
        message.headers.as_ref().unwrap().get(name).unwrap().as_str().to_owned()
    };
    let mut seen = HashSet::new();
    let ids = messages.iter().map(|message| field(message, "Nats-Msg-Id"));
    let first: Vec<_> = ids.filter(|id| seen.insert(id.clone())).collect();
    assert_eq!(first.len(), 150);
    for key in 0..3 {
        let of_key: Vec<_> = first.iter().filter(|id| id.parse::<usize>().unwrap() % 3 == key).collect();
        assert!(of_key.is_sorted(), "{of_key:?}");
    }
    let number: usize = field(&messages[0], "Nats-Msg-Id").parse().unwrap();
    assert_eq!(field(&messages[0], "Idem-Ordering-Key"), format!("{}", number % 3));
    assert_eq!((field(&messages[0], "Trace").as_str(), messages[0].subject.as_str()), ("t", "invoices.paid"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_that_falls_silent_is_replaced() {
    let place = Place::new(Kind::Postgres).await;
    place.publish(&message("1")).await;
    // Holds its claim, and does nothing.
    let claim = place.outbox.claim(9.try_into().unwrap(), &[]).await.unwrap().unwrap();
    assert_eq!(claim.messages().len(), 1);
    let second = place.outbox.claim(9.try_into().unwrap(), &[]).await.unwrap();
    assert!(second.is_none(), "{second:?}");
    let begun = tokio::time::Instant::now();
    let recorder = Arc::new(Recorder::default());
    let relay = place.relay(&recorder);
    place.drained().await;
    relay.stop().await;
    let waited = begun.elapsed();
    assert!((25..55).contains(&waited.as_secs()), "{waited:?}");
    claim.finish(&[1]).await.unwrap_err();
    assert_eq!(recorder.ids(), ["1"]);
}
