//! Consumers of a real stream of Redis.

use std::collections::BTreeSet;
use std::time::Duration;

use idem_core::engine::Contract;
use idem_inbox::{Consumer, MessageError, RedisStreamSubscription};
use idem_servers::Redis;
use redis::aio::MultiplexedConnection;
use redis::streams::StreamPendingReply;
use redis::{Client, cmd};
use tokio::time::{Instant, sleep, timeout};

use crate::support::{Kind, PATIENCE, Place, Running};

const STREAM: &str = "invoices";

struct Broker {
    server: Redis,
    client: Client,
    connection: MultiplexedConnection,
}

impl Broker {
    async fn start() -> Self {
        // So that a crash loses nothing.
        let server = Redis::start_with(&["--appendonly", "yes", "--appendfsync", "always"]).unwrap();
        let client = Client::open(server.url()).unwrap();
        let connection = client.get_multiplexed_async_connection().await.unwrap();
        Self { server, client, connection }
    }

    async fn publish(&mut self, key: &str, id: &str) {
        let mut add = cmd("XADD");
        add.arg(STREAM).arg("*").arg("id").arg(id).arg("payload").arg(format!("payload of {id}"));
        add.arg("ordering-key").arg(key).arg("header:Trace").arg("t");
        add.query_async::<()>(&mut self.connection).await.unwrap();
    }

    fn subscription(&self, consumer: &str) -> RedisStreamSubscription {
        let subscription = RedisStreamSubscription::new(self.client.clone(), STREAM, "billing", consumer);
        subscription.idle_limit(Duration::from_secs(2))
    }

    async fn crash(&mut self) {
        self.server.kill().unwrap();
        self.server.start_again().unwrap();
        self.connection = self.client.get_multiplexed_async_connection().await.unwrap();
    }

    /// Waits until every entry is acknowledged.
    async fn drained(&mut self) {
        let drained = async {
            loop {
                let mut groups = cmd("XINFO");
                groups.arg("GROUPS").arg(STREAM);
                let groups: redis::streams::StreamInfoGroupsReply =
                    groups.query_async(&mut self.connection).await.unwrap();
                if groups.groups.iter().any(|group| group.pending == 0 && group.lag == Some(0)) {
                    return;
                }
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(PATIENCE, drained).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_message_takes_effect_once_across_crashes_of_the_broker() {
    let mut broker = Broker::start().await;
    let place = Place::new(Kind::Sqlite).await;
    for number in 0..100 {
        for _ in 0..2 {
            broker.publish("a", &format!("m-{number}")).await;
        }
    }
    let inbox = place.inbox(Contract::Transactional);
    let running = Running::start(Consumer::new(inbox, broker.subscription("one")).unwrap(), &place);
    let reached = async {
        while place.effects().all().await.len() < 30 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, reached).await.unwrap();
    broker.crash().await;
    broker.drained().await;
    running.stop().await;
    let all = place.effects().all().await;
    assert_eq!((all.len(), all.iter().collect::<BTreeSet<_>>().len()), (100, 100));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_consumer_gets_the_entries_of_one_that_has_disappeared() {
    let mut broker = Broker::start().await;
    let place = Place::new(Kind::Sqlite).await;
    broker.publish("a", "1").await;
    let consumer = Consumer::new(place.inbox(Contract::Transactional), broker.subscription("one")).unwrap();
    let (tried, mut trying) = tokio::sync::mpsc::unbounded_channel();
    let handler = move |_, message: idem_inbox::Message| {
        tried.send((message.delivery, message.header("trace").cloned())).unwrap();
        async { Err(MessageError::Retry { after: Some(Duration::from_secs(1)), why: "later".into() }) }
    };
    let task = tokio::spawn(consumer.run_until(std::future::pending(), handler));
    let seen = timeout(PATIENCE, trying.recv()).await.unwrap();
    assert_eq!(seen, Some((1, Some("t".into()))));
    task.abort();
    let inbox = place.inbox(Contract::Transactional);
    let running = Running::start(Consumer::new(inbox, broker.subscription("two")).unwrap(), &place);
    broker.drained().await;
    running.stop().await;
    assert_eq!(place.effects().all().await, ["1"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_handler_keeps_its_message_and_a_stopped_consumer_gives_back_what_waits() {
    let mut broker = Broker::start().await;
    let place = Place::new(Kind::Sqlite).await;
    broker.publish("a", "long").await;
    let consumer = Consumer::new(place.inbox(Contract::AtLeastOnce), broker.subscription("one")).unwrap();
    let other = Consumer::new(place.inbox(Contract::AtLeastOnce), broker.subscription("two")).unwrap();
    let (begun, mut beginning) = tokio::sync::mpsc::unbounded_channel();
    let handler = move |_, message: idem_inbox::Message| {
        begun.send(message.delivery).unwrap();
        async {
            sleep(Duration::from_secs(5)).await;
            Err(MessageError::Retry { after: Some(Duration::from_secs(1)), why: "later".into() })
        }
    };
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let task = tokio::spawn(consumer.run_until(async { drop(stopped.await) }, handler));
    assert_eq!(timeout(PATIENCE, beginning.recv()).await.unwrap(), Some(1));
    let running = Running::start(other, &place);
    sleep(Duration::from_secs(4)).await;
    assert_eq!(place.effects().all().await, [""; 0], "it is not claimed while its handler runs");
    let stopping = Instant::now();
    stop.send(()).unwrap();
    timeout(PATIENCE, task).await.unwrap().unwrap();
    broker.drained().await;
    assert!(stopping.elapsed() < Duration::from_secs(15), "{:?}", stopping.elapsed());
    running.stop().await;
    assert_eq!(place.effects().all().await, ["long"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_of_a_key_are_handled_in_order_across_failures_and_restarts() {
    let mut broker = Broker::start().await;
    let place = Place::new(Kind::Sqlite).await;
    for number in 0..90 {
        broker.publish(["a", "b", "c"][number % 3], &format!("m-{number:02}")).await;
    }
    let consumer = Consumer::new(place.inbox(Contract::Transactional), broker.subscription("one")).unwrap().ordered();
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
    let others_are_done = async {
        while place.effects().all().await.len() < 60 + 2 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, others_are_done).await.unwrap();
    task.abort();
    broker.publish("a", "m-90").await;
    broker.publish("b", "m-91").await;
    // A process with another name.
    let consumer = Consumer::new(place.inbox(Contract::Transactional), broker.subscription("two")).unwrap();
    let running = Running::start(consumer.ordered(), &place);
    broker.drained().await;
    running.stop().await;
    let all = place.effects().all().await;
    assert_eq!(all.len(), 92);
    for key in 0..3 {
        let of_key: Vec<_> = all.iter().filter(|id| id[2..].parse::<usize>().unwrap() % 3 == key).collect();
        assert!(of_key.is_sorted(), "{of_key:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_entry_that_was_removed_is_acknowledged() {
    let mut broker = Broker::start().await;
    let place = Place::new(Kind::Sqlite).await;
    broker.publish("a", "1").await;
    let mut create = cmd("XGROUP");
    create.arg("CREATE").arg(STREAM).arg("billing").arg("0").query_async::<()>(&mut broker.connection).await.unwrap();
    let mut read = cmd("XREADGROUP");
    read.arg("GROUP").arg("billing").arg("one").arg("STREAMS").arg(STREAM).arg(">");
    read.query_async::<()>(&mut broker.connection).await.unwrap();
    cmd("XTRIM").arg(STREAM).arg("MAXLEN").arg(0).query_async::<()>(&mut broker.connection).await.unwrap();
    broker.publish("a", "2").await;
    let inbox = place.inbox(Contract::Transactional);
    let running = Running::start(Consumer::new(inbox, broker.subscription("one")).unwrap(), &place);
    let handled = async {
        loop {
            let mut pending = cmd("XPENDING");
            pending.arg(STREAM).arg("billing");
            let pending: StreamPendingReply = pending.query_async(&mut broker.connection).await.unwrap();
            if pending.count() == 0 && place.effects().all().await == ["2"] {
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, handled).await.unwrap();
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_are_acknowledged_after_every_connection_was_lost() {
    let mut broker = Broker::start().await;
    let place = Place::new(Kind::Sqlite).await;
    broker.publish("a", "1").await;
    let inbox = place.inbox(Contract::Transactional);
    let running = Running::start(Consumer::new(inbox, broker.subscription("one")).unwrap(), &place);
    broker.drained().await;
    let mut kill = cmd("CLIENT");
    kill.arg("KILL").arg("TYPE").arg("normal").arg("SKIPME").arg("yes");
    let killed: usize = kill.query_async(&mut broker.connection).await.unwrap();
    assert!(killed >= 2, "the consumer has a connection that reads and one that acknowledges");
    broker.publish("a", "2").await;
    broker.drained().await;
    running.stop().await;
    assert_eq!(place.effects().all().await, ["1", "2"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_field_with_an_id_of_any_bytes_is_its_own() {
    let mut broker = Broker::start().await;
    let place = Place::new(Kind::Sqlite).await;
    for id in [&[0_u8, 0, 0, 128][..], &[0, 0, 0, 129]] {
        let mut add = cmd("XADD");
        add.arg(STREAM).arg("*").arg("id").arg(id).arg("payload").arg("x");
        add.query_async::<()>(&mut broker.connection).await.unwrap();
    }
    let inbox = place.inbox(Contract::Transactional);
    let running = Running::start(Consumer::new(inbox, broker.subscription("one")).unwrap().ordered(), &place);
    broker.drained().await;
    running.stop().await;
    assert_eq!(place.effects().all().await, ["hex:00000080", "hex:00000081"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_field_whose_name_is_no_text_stops_no_consumer() {
    let mut broker = Broker::start().await;
    let place = Place::new(Kind::Sqlite).await;
    let mut add = cmd("XADD");
    add.arg(STREAM).arg("*").arg("id").arg("1").arg("payload").arg("x").arg(&b"\xff\xfe"[..]).arg(&b"\x00\xff"[..]);
    add.query_async::<()>(&mut broker.connection).await.unwrap();
    broker.publish("a", "2").await;
    let inbox = place.inbox(Contract::Transactional);
    let running = Running::start(Consumer::new(inbox, broker.subscription("one")).unwrap().ordered(), &place);
    broker.drained().await;
    running.stop().await;
    assert_eq!(place.effects().all().await.into_iter().collect::<BTreeSet<_>>(), ["1", "2"].map(String::from).into());
}
