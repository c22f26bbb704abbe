//! What gets into the outbox.

use std::sync::Arc;
use std::time::Duration;

use idem_core::engine::{Conclusion, Context, Disposition, Idempotency, Operation, Settings};
use idem_core::{Fingerprint, Scope, StoreErrorKind, StoredResponse, Writes};
use idem_outbox::{InvalidMessage, MessageToSend, Outbox as _, OutboxError, PostgresOutbox};
use idem_schemas::Schema;
use idem_sqlite::{SqliteConfig, SqliteStore};
use sqlx::{AssertSqlSafe, PgPool};

use crate::support::{Kind, Place, Recorder, message, on_each};

const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

on_each!(
    a_committed_message_is_sent_whole,
    a_message_that_was_rolled_back_is_never_sent,
    an_id_is_in_the_outbox_once,
    what_cannot_be_sent_is_refused,
    the_backlog_is_counted,
);

async fn a_committed_message_is_sent_whole(kind: Kind) {
    let place = Place::new(kind).await;
    let whole = message("1").header("traceparent", "00-ä").header("b", "").ordered_by("account 7");
    place.publish(&whole).await;
    let bytes = MessageToSend::new("raw", vec![0, 159, 255]);
    place.publish(&bytes).await;
    let recorder = Arc::new(Recorder::default());
    let relay = place.relay(&recorder);
    place.drained().await;
    relay.stop().await;
    let mut sent = recorder.sent();
    sent.sort_by_key(|message| message.topic.clone());
    assert_eq!(sent, [whole, bytes]);
}

async fn a_message_that_was_rolled_back_is_never_sent(kind: Kind) {
    let place = Place::new(kind).await;
    let recorder = Arc::new(Recorder::default());
    let relay = place.relay(&recorder);
    for round in 0..20 {
        let mut business = place.begin().await;
        business.publish(&message(&format!("lost-{round}"))).await.unwrap();
        business.roll_back().await;
        place.publish(&message(&format!("kept-{round}"))).await;
    }
    place.drained().await;
    relay.stop().await;
    let ids = recorder.ids();
    assert_eq!(ids.len(), 20, "{ids:?}");
    assert!(ids.iter().all(|id| id.starts_with("kept-")), "{ids:?}");
}

async fn an_id_is_in_the_outbox_once(kind: Kind) {
    let place = Place::new(kind).await;
    place.publish(&message("1")).await;
    place.publish(&message("1")).await;
    assert_eq!(place.outbox.backlog().await.unwrap().messages, 1);
    let mut other = message("1");
    other.payload = "other".into();
    for other in [other, message("1").ordered_by("a"), message("1").header("a", "b")] {
        let mut business = place.begin().await;
        let error = business.publish(&other).await.unwrap_err();
        assert!(matches!(&error, OutboxError::OtherMessage { id } if id == "1"), "{error:?}");
    }
}

async fn what_cannot_be_sent_is_refused(kind: Kind) {
    let place = Place::new(kind).await;
    let mut business = place.begin().await;
    let (large, limit) = (960 * 1024 + 1, 960 * 1024);
    let too_long = |part, bytes, limit| InvalidMessage::TooLong { part, bytes, limit };
    let name = |name: &str| InvalidMessage::HeaderName(name.to_owned());
    let with = |name: &str| MessageToSend::new("t", "").header(name, "1");
    let mut twice = with("a");
    twice.headers.push(("A".into(), "2".into()));
    let refused = [
        (MessageToSend::new("", ""), InvalidMessage::Empty { part: "topic" }),
        (MessageToSend::new("a\nb", ""), InvalidMessage::ControlCharacter { part: "topic" }),
        (MessageToSend::new("a b", ""), InvalidMessage::Topic("a b".into())),
        (MessageToSend::new("t".repeat(256), ""), too_long("topic", 256, 255)),
        (MessageToSend::new("t", "").ordered_by("a\0"), InvalidMessage::ControlCharacter { part: "ordering key" }),
        (
            MessageToSend::new("t", "").header("a", "b\r\nc"),
            InvalidMessage::ControlCharacter { part: "value of a header field" },
        ),
        (MessageToSend::new("t", "").header("a", "b".repeat(32 * 1024)), too_long("header", 32 * 1024 + 1, 32 * 1024)),
        (with(""), name("")),
        (with("X Trace"), name("X Trace")),
        (with("größe"), name("größe")),
        (with("a:b"), name("a:b")),
        (with("Nats-Rollup"), name("Nats-Rollup")),
        (with("idem-ordering-key"), name("idem-ordering-key")),
        (twice, name("A")),
        (MessageToSend::new("t", vec![0; large]), too_long("payload", large, limit)),
    ];
    for (message, why) in refused {
        let error = business.publish(&message).await.unwrap_err();
        assert!(matches!(&error, OutboxError::Invalid(invalid) if *invalid == why), "{error:?}");
    }
    // The transaction is usable after a refusal.
    business.publish(&MessageToSend::new("t", vec![0; limit])).await.unwrap();
    business.commit().await;
    assert_eq!(place.outbox.backlog().await.unwrap().messages, 1);
}

async fn the_backlog_is_counted(kind: Kind) {
    let place = Place::new(kind).await;
    let empty = place.outbox.backlog().await.unwrap();
    assert_eq!((empty.messages, empty.lag), (0, Duration::ZERO));
    place.publish(&message("1")).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    place.publish(&message("2")).await;
    let backlog = place.outbox.backlog().await.unwrap();
    assert_eq!(backlog.messages, 2);
    assert!(backlog.lag >= Duration::from_millis(290), "{backlog:?}: the older one counts");
}

#[tokio::test]
async fn a_message_of_a_run_has_one_id_in_all_attempts() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite://{}", folder.path().join("idem.db").display());
    let store = Arc::new(SqliteStore::open(SqliteConfig::new(url)).await.unwrap());
    let engine = Idempotency::at_least_once(store, Settings::new());
    let operation = |key: &str| {
        let scope = Scope::new("acme", "POST /payments");
        let operation = Operation::new(scope, key.parse().unwrap(), Fingerprint::of_bytes("", b""));
        operation.trace(Some(TRACE.parse().unwrap()))
    };
    let id_of = async |key: &str, name: &'static str| {
        let run = move |context: Context| async move {
            let message = MessageToSend::of_run(&context, name, "t", "");
            let record = context.record_id().to_string();
            let field = |name: &str, value: &str| (name.to_owned(), value.to_owned());
            assert_eq!(message.headers, [field("Idem-Record", &record), field("traceparent", TRACE)]);
            let own = message.clone().header("Traceparent", "of a span");
            assert_eq!(own.headers, [field("Idem-Record", &record), field("Traceparent", "of a span")]);
            let disposition = Disposition::Release { writes: Writes::Discard };
            Conclusion { value: message.id, disposition, retention: None }
        };
        let panicked = || Conclusion {
            value: String::new(),
            disposition: Disposition::Fail { response: StoredResponse::new(500, "") },
            retention: None,
        };
        match engine.execute(operation(key), run, panicked).await.unwrap() {
            idem_core::engine::Answer::Ran { value, .. } => value,
            other => panic!("{other:?}"),
        }
    };
    let first = id_of("1", "paid").await;
    assert_eq!(id_of("1", "paid").await, first, "the next attempt");
    assert_ne!(id_of("1", "shipped").await, first, "another message of the run");
    assert_ne!(id_of("2", "paid").await, first, "another run");
}

#[tokio::test]
async fn a_backlog_that_waits_for_a_lock_is_a_timeout() {
    let schema = Schema::new();
    let pool = PgPool::connect(&idem_servers::postgres_url()).await.unwrap();
    let outbox = PostgresOutbox::open(pool.clone(), &schema.name).await.unwrap();
    let mut other = pool.begin().await.unwrap();
    let lock = format!("LOCK TABLE \"{}\".idem_outbox", schema.name);
    sqlx::raw_sql(AssertSqlSafe(lock)).execute(&mut *other).await.unwrap();
    let backlog = tokio::time::timeout(Duration::from_secs(20), outbox.backlog()).await;
    other.rollback().await.unwrap();
    assert_eq!(backlog.unwrap().unwrap_err().kind(), StoreErrorKind::Timeout);
}
