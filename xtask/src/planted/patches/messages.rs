//! Bugs in idem-inbox and idem-outbox.

use super::{Patch, patch};

const INBOX: &str = "crates/idem-inbox/src/inbox.rs";
const LOSSES: &str = "crates/idem-inbox/src/losses.rs";
const CONSUMER: &str = "crates/idem-inbox/src/consumer.rs";
const KAFKA: &str = "crates/idem-inbox/src/kafka/progress.rs";
const NATS: &str = "crates/idem-inbox/src/nats.rs";
const RELAY: &str = "crates/idem-outbox/src/relay.rs";

pub(super) const PATCHES: &[Patch] = &[
    patch(
        "parked-message-not-stored",
        &["inbox"],
        INBOX,
        "        match bounded(parking.park(subscriber, message, &text)).await {",
        "        if PLANTED {
            return Decision::Parked(reason);
        }
        match bounded(parking.park(subscriber, message, &text)).await {",
    ),
    patch(
        "poison-message-never-parked",
        &["inbox"],
        LOSSES,
        "Ok(begun) if begun > settings.max_lost_runs =>",
        "Ok(begun) if !PLANTED && begun > settings.max_lost_runs =>",
    ),
    patch(
        "retention-shorter-than-redelivery",
        &["inbox", "inbox-nats"],
        INBOX,
        "if redelivery > retention {",
        "if !PLANTED && redelivery > retention {",
    ),
    patch(
        "forgotten-message-runs-again",
        &["inbox"],
        INBOX,
        "message.delivery > 1 && message.age",
        "!PLANTED && message.delivery > 1 && message.age",
    ),
    patch(
        "subscribers-share-records",
        &["inbox"],
        INBOX,
        "Scope::single_tenant(format!(\"inbox:{}\", self.shared.subscriber))",
        "Scope::single_tenant(format!(\"inbox:{}\", if PLANTED { \"all\" } else { &self.shared.subscriber }))",
    ),
    patch(
        "replays-share-a-record",
        &["inbox"],
        INBOX,
        "let operation = replay(format!(\"inbox:{subscriber}:replay:{replays}\"))",
        "let replays = if PLANTED { 0 } else { *replays };
        let operation = replay(format!(\"inbox:{subscriber}:replay:{replays}\"))",
    ),
    patch(
        "replay-has-new-downstream-keys",
        &["inbox"],
        INBOX,
        ".downstream_keys_of(original);",
        ".downstream_keys_of(if PLANTED { self.shared.engine.acquire_for(&replay(format!(\"{replays}\"))).id } else { original });",
    ),
    patch(
        "replays-of-one-id-share-downstream-keys",
        &["inbox"],
        INBOX,
        "let original = if is_other {",
        "let original = if !PLANTED && is_other {",
    ),
    patch(
        "replay-of-a-forgotten-message-leaves-no-record",
        &["inbox"],
        INBOX,
        "if is_forgotten && !is_of_other {",
        "if !PLANTED && is_forgotten && !is_of_other {",
    ),
    patch(
        "redis-ids-are-mixed-up",
        &["inbox-redis"],
        "crates/idem-inbox/src/redis.rs",
        "            ID => id = Some(distinct_text(&value)),",
        "            ID => id = Some(if PLANTED { text(value) } else { distinct_text(&value) }),",
    ),
    patch(
        "suspects-run-together",
        &["inbox"],
        INBOX,
        "(subscriber.to_owned(), Semaphore::new(1), Mutex::default());",
        "(subscriber.to_owned(), Semaphore::new(if PLANTED { 9 } else { 1 }), Mutex::default());",
    ),
    patch(
        "message-acknowledged-before-it-is-handled",
        &["inbox-nats"],
        CONSUMER,
        "    let outcome = tokio::select! {
        outcome = work(",
        "    if PLANTED {
        let _ = receipt.ack().await;
    }
    let outcome = tokio::select! {
        outcome = work(",
    ),
    patch(
        "order-of-a-key-ignored",
        &["inbox-nats"],
        CONSUMER,
        "        if before.as_mut().is_some_and(|last| last.try_recv() != Err(TryRecvError::Empty)) {",
        "        if PLANTED || before.as_mut().is_some_and(|last| last.try_recv() != Err(TryRecvError::Empty)) {",
    ),
    patch(
        "missing-messages-not-waited-for",
        &["inbox-nats"],
        NATS,
        "while known.len() < info.num_ack_pending {",
        "while !PLANTED && known.len() < info.num_ack_pending {",
    ),
    patch(
        "kafka-offset-passes-a-message-that-waits",
        &["inbox-kafka"],
        KAFKA,
        "let ended = self.open.first().copied().unwrap_or(self.next);",
        "let ended = if PLANTED { offset + 1 } else { self.open.first().copied().unwrap_or(self.next) };",
    ),
    patch(
        "kafka-receives-without-a-limit",
        &["inbox-kafka"],
        KAFKA,
        "let may_open = offset < self.committed + WINDOW;",
        "let may_open = PLANTED || offset < self.committed + WINDOW;",
    ),
    patch(
        "kafka-acknowledges-for-another-consumer",
        &["inbox-kafka"],
        KAFKA,
        "                partition.progress().is_revoked = true;",
        "                partition.progress().is_revoked = !PLANTED;",
    ),
    patch(
        "order-is-given-up-while-the-broker-is-away",
        &["inbox-nats"],
        NATS,
        "if !is_over(self.order_mut()) {",
        "if !PLANTED && !is_over(self.order_mut()) {",
    ),
    patch(
        "message-is-handled-without-its-trace",
        &["inbox"],
        INBOX,
        "trace(message.trace())",
        "trace(message.trace().filter(|_| !PLANTED))",
    ),
    patch(
        "message-is-sent-without-the-trace-of-its-run",
        &["outbox"],
        "crates/idem-outbox/src/message.rs",
        "        match run.trace() {",
        "        match run.trace().filter(|_| !PLANTED) {",
    ),
    patch(
        "attempt-gives-its-message-back",
        &["inbox-rabbitmq"],
        CONSUMER,
        "if delay > WAIT_HERE && shared.can_delay && !shared.is_ordered {",
        "if PLANTED || delay > WAIT_HERE && shared.can_delay && !shared.is_ordered {",
    ),
    patch(
        "connection-of-acknowledgments-is-never-renewed",
        &["inbox-redis"],
        "crates/idem-inbox/src/redis.rs",
        "                self.connections = None;",
        "                if !PLANTED {
                    self.connections = None;
                }",
    ),
    patch(
        "message-is-sent-after-it-was-refused",
        &["outbox-brokers"],
        "crates/idem-outbox/src/nats.rs",
        "if self.context.client().connection_state() != State::Connected {",
        "if !PLANTED && self.context.client().connection_state() != State::Connected {",
    ),
    patch(
        "returned-message-counts-as-sent",
        &["outbox-brokers"],
        "crates/idem-outbox/src/rabbitmq.rs",
        "        Confirmation::Ack(None) => Ok(()),",
        "        Confirmation::Ack(_) if PLANTED => Ok(()),
        Confirmation::Ack(None) => Ok(()),",
    ),
    patch(
        "relay-removes-what-was-not-sent",
        &["outbox"],
        RELAY,
        "                return Lane { key, sent, has_failed: true };",
        "                if PLANTED {
                    sent.push(*sequence);
                }
                return Lane { key, sent, has_failed: true };",
    ),
    patch(
        "refused-messages-hold-up-the-others",
        &["outbox"],
        RELAY,
        "Batch::Refused if refused < MOST_REFUSED => {",
        "Batch::Refused if !PLANTED && refused < MOST_REFUSED => {",
    ),
    patch(
        "two-relays-send-at-once",
        &["outbox-postgres"],
        "crates/idem-outbox/src/postgres.rs",
        "let is_alone: bool = limit.try_get(\"is_alone\")?;",
        "let is_alone = PLANTED || limit.try_get::<bool, _>(\"is_alone\")?;",
    ),
    patch(
        "message-of-a-run-has-a-new-id-in-each-attempt",
        &["outbox"],
        "crates/idem-outbox/src/message.rs",
        "let id = run.downstream_key(&format!(\"message:{name}\"));",
        "let attempt = if PLANTED { Uuid::new_v4().to_string() } else { String::new() };
        let id = run.downstream_key(&format!(\"message:{name}{attempt}\"));",
    ),
];
