//! Bugs in idem-inbox and idem-outbox.

use super::{Patch, patch};

const INBOX: &str = "crates/idem-inbox/src/inbox.rs";
const CONSUMER: &str = "crates/idem-inbox/src/consumer.rs";
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
        INBOX,
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
        "let scope = Scope::single_tenant(format!(\"inbox:{}:replay:{}\", shared.subscriber, parked.replays));",
        "let replays = if PLANTED { 0 } else { parked.replays };
        let scope = Scope::single_tenant(format!(\"inbox:{}:replay:{replays}\", shared.subscriber));",
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
