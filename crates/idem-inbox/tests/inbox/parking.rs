//! Parked messages: listed, replayed, purged.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use idem_core::engine::{Context, Contract};
use idem_inbox::{Decision, Inbox, Message, MessageError, ParkReason, ParkedMessage};
use tokio::sync::Notify;

use crate::support::{Kind, PATIENCE, Place, handle, late, message, on_each};

on_each!(
    a_parked_message_is_listed_whole,
    a_replay_takes_effect_once_and_a_late_delivery_does_not_bring_it_back,
    a_replay_that_fails_is_parked_with_its_reason,
    a_replay_of_a_message_that_may_run_again_is_its_next_run,
    a_replay_waits_for_a_delivery_that_runs,
    a_replay_has_the_downstream_keys_of_its_message,
    replays_of_two_messages_with_one_id_have_different_keys,
    a_replay_of_a_forgotten_message_is_its_first_run,
    two_forgotten_messages_with_one_id_are_both_replayed,
    only_what_is_parked_is_replayed,
    a_list_goes_on_after_its_last_entry,
    entries_are_purged_and_parked_messages_stay,
    a_reason_of_any_text_is_kept,
);

fn most(count: u32) -> NonZeroU32 {
    NonZeroU32::new(count).unwrap()
}

async fn reject(inbox: &Inbox, message: &Message, why: &str) {
    let why = why.to_owned();
    let decision = inbox.handle(message, |_, _| async { Err(MessageError::Reject { why }) }).await;
    assert!(matches!(decision, Decision::Parked(_)), "{decision:?}");
}

async fn list(place: &Place) -> Vec<ParkedMessage> {
    place.parking.list("billing", false, None, most(100)).await.unwrap()
}

/// Replays what was requested, with an effect.
async fn replay(place: &Place, inbox: &Inbox) -> usize {
    let requested = place.parking.list("billing", true, None, most(100)).await.unwrap();
    for parked in &requested {
        let effects = place.effects();
        inbox.replay(parked, |context, message| async move { effects.add(&context, &message.id).await }).await;
    }
    requested.len()
}

async fn a_parked_message_is_listed_whole(kind: Kind) {
    let place = Place::new(kind).await;
    let inbox = place.inbox(Contract::Transactional);
    let mut whole = Message::new("nul \0 and ä", "invoices.\0", vec![0, 159, 146, 150]);
    whole.ordering_key = Some("account 7".into());
    whole.headers = vec![("Trace\0".into(), Bytes::from_static(&[0, 255])), ("b".into(), Bytes::new())];
    whole.delivery = 2;
    whole.age = Some(Duration::from_secs(1));
    reject(&inbox, &whole, "it is broken").await;
    reject(&inbox, &whole, "it is broken").await;
    let [parked] = &list(&place).await[..] else { panic!("it is parked once") };
    whole.delivery = 1;
    whole.age = None;
    assert_eq!(parked.message, whole);
    assert_eq!((parked.reason.as_str(), parked.replays, parked.is_requested), ("failed: it is broken", 0, false));
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_micros();
    let age = i64::try_from(now).unwrap() - parked.parked_at_micros;
    assert!((-1_000_000..60_000_000).contains(&age), "{age} µs");
    assert_eq!(place.parking.list("audit", false, None, most(9)).await.unwrap(), []);
}

async fn a_replay_takes_effect_once_and_a_late_delivery_does_not_bring_it_back(kind: Kind) {
    for contract in [Contract::Transactional, Contract::AtMostOnce, Contract::AtLeastOnce] {
        let place = Place::new(kind).await;
        let inbox = place.inbox(contract);
        reject(&inbox, &message("1"), "not yet").await;
        assert_eq!(replay(&place, &inbox).await, 0, "{contract:?}: only what an operator asks for");
        assert!(place.parking.request_replay("billing", &message("1").parking_key()).await.unwrap());
        let requested = place.parking.list("billing", true, None, most(9)).await.unwrap();
        assert_eq!(replay(&place, &inbox).await, 1);
        assert_eq!(place.effects().all().await, ["1"], "{contract:?}");
        assert_eq!(list(&place).await, [], "{contract:?}");
        // The report of the replay was lost, or another consumer replays as well.
        let effects = place.effects();
        inbox.replay(&requested[0], |context, message| async move { effects.add(&context, &message.id).await }).await;
        assert_eq!(place.effects().all().await, ["1"], "{contract:?}");
        let late = handle(&inbox, &place.effects(), &message("1")).await;
        assert_eq!(late, Decision::Parked(ParkReason::Failed("not yet".into())), "{contract:?}: its record has failed");
        assert_eq!(list(&place).await, [], "{contract:?}: it is not parked again");
        assert_eq!(place.effects().all().await, ["1"], "{contract:?}");
    }
}

async fn a_replay_that_fails_is_parked_with_its_reason(kind: Kind) {
    let place = Place::new(kind).await;
    let inbox = place.inbox(Contract::Transactional);
    reject(&inbox, &message("1"), "not yet").await;
    assert!(place.parking.request_replay("billing", &message("1").parking_key()).await.unwrap());
    let requested = place.parking.list("billing", true, None, most(9)).await.unwrap();
    inbox.replay(&requested[0], |_, _| async { Err(MessageError::Reject { why: "still not".into() }) }).await;
    let [parked] = &list(&place).await[..] else { panic!("it is parked") };
    assert_eq!((parked.reason.as_str(), parked.replays, parked.is_requested), ("failed: still not", 1, false));
    // The second replay has a record of its own.
    assert!(place.parking.request_replay("billing", &message("1").parking_key()).await.unwrap());
    // A late report of the first one changes nothing.
    place.parking.replayed("billing", &requested[0], None).await.unwrap();
    assert_eq!(replay(&place, &inbox).await, 1);
    assert_eq!((place.effects().all().await, list(&place).await), (vec!["1".to_owned()], vec![]));
}

/// Replays until nothing is requested any more.
async fn replay_all(place: &Place, inbox: &Inbox) {
    let replayed = async {
        while replay(place, inbox).await > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, replayed).await.unwrap();
}

/// As after an operator has resolved the unknown outcome of a parked message.
async fn a_replay_of_a_message_that_may_run_again_is_its_next_run(kind: Kind) {
    for contract in [Contract::AtMostOnce, Contract::AtLeastOnce] {
        let place = Place::new(kind).await;
        let inbox = place.inbox(contract);
        let retry = |_, _| async { Err(MessageError::Retry { after: None, why: "the bank is away".into() }) };
        let decision = inbox.handle(&message("1"), retry).await;
        assert!(matches!(decision, Decision::RedeliverAfter(_)), "{contract:?}: {decision:?}");
        place.parking.park("billing", &message("1"), "outcome unknown").await.unwrap();
        assert!(place.parking.request_replay("billing", &message("1").parking_key()).await.unwrap());
        replay_all(&place, &inbox).await;
        assert_eq!(place.effects().all().await, ["1"], "{contract:?}");
        assert_eq!(
            handle(&inbox, &place.effects(), &message("1")).await,
            Decision::Ack,
            "{contract:?}: a late delivery"
        );
        assert_eq!(place.effects().all().await, ["1"], "{contract:?}");
    }
}

async fn a_replay_waits_for_a_delivery_that_runs(kind: Kind) {
    let place = Place::new(kind).await;
    let inbox = place.inbox(Contract::AtLeastOnce);
    let (entered, goes_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let delivery = tokio::spawn({
        let (inbox, effects) = (place.inbox(Contract::AtLeastOnce), place.effects());
        let (entered, goes_on) = (Arc::clone(&entered), Arc::clone(&goes_on));
        async move {
            let handler = |context: Context, message: Message| async move {
                entered.notify_one();
                goes_on.notified().await;
                effects.add(&context, &message.id).await
            };
            inbox.handle(&message("1"), handler).await
        }
    });
    entered.notified().await;
    place.parking.park("billing", &message("1"), "outcome unknown").await.unwrap();
    assert!(place.parking.request_replay("billing", &message("1").parking_key()).await.unwrap());
    assert_eq!(replay(&place, &inbox).await, 1);
    assert_eq!(place.effects().all().await, [""; 0]);
    goes_on.notify_one();
    assert_eq!(delivery.await.unwrap(), Decision::Ack);
    replay_all(&place, &inbox).await;
    assert_eq!((place.effects().all().await, list(&place).await), (vec!["1".to_owned()], vec![]));
}

/// Handles a message, or its replay, and returns the key that its handler would give to another system.
async fn key_of(inbox: &Inbox, what: Result<&ParkedMessage, &Message>) -> Option<String> {
    let key = Arc::<Mutex<Option<String>>>::default();
    let seen = Arc::clone(&key);
    let handler = |context: Context, _| async move {
        *seen.lock().unwrap() = Some(context.downstream_key("charge"));
        Err(MessageError::Reject { why: "the database is away".into() })
    };
    match what {
        Ok(parked) => inbox.replay(parked, handler).await,
        Err(message) => drop(inbox.handle(message, handler).await),
    }
    key.lock().unwrap().take()
}

async fn a_replay_has_the_downstream_keys_of_its_message(kind: Kind) {
    for contract in [Contract::Transactional, Contract::AtMostOnce, Contract::AtLeastOnce] {
        let place = Place::new(kind).await;
        let inbox = place.inbox(contract);
        let first = key_of(&inbox, Err(&message("1"))).await;
        assert!(first.is_some());
        for _ in 0..2 {
            assert!(place.parking.request_replay("billing", &message("1").parking_key()).await.unwrap());
            let requested = place.parking.list("billing", true, None, most(9)).await.unwrap();
            assert_eq!(key_of(&inbox, Ok(&requested[0])).await, first, "{contract:?}");
        }
    }
}

async fn replays_of_two_messages_with_one_id_have_different_keys(kind: Kind) {
    let place = Place::new(kind).await;
    let inbox = place.inbox(Contract::Transactional);
    let other = Message::new("1", "invoices", "another payload");
    let first = key_of(&inbox, Err(&message("1"))).await;
    assert_eq!(inbox.handle(&other, |_, _| async { Ok(()) }).await, Decision::Parked(ParkReason::OtherPayload));
    let mut keys = Vec::new();
    for _ in 0..2 {
        for parked in [&message("1"), &other] {
            assert!(place.parking.request_replay("billing", &parked.parking_key()).await.unwrap());
        }
        for parked in place.parking.list("billing", true, None, most(9)).await.unwrap() {
            keys.push((parked.message.payload.clone(), key_of(&inbox, Ok(&parked)).await));
        }
    }
    assert_eq!(keys.len(), 4);
    let of =
        |payload: &Bytes| keys.iter().filter(|(other, _)| other == payload).map(|(_, key)| key).collect::<Vec<_>>();
    assert_eq!(of(&message("1").payload), [&first, &first]);
    let others = of(&other.payload);
    assert!(others[0].is_some() && others[0] != &first && others[0] == others[1], "{others:?} and {first:?}");
    for parked in [&message("1"), &other] {
        assert!(place.parking.request_replay("billing", &parked.parking_key()).await.unwrap());
    }
    assert_eq!(replay(&place, &inbox).await, 2);
    assert_eq!((place.effects().all().await, list(&place).await), (vec!["1".to_owned(), "1".to_owned()], vec![]));
}

async fn a_replay_of_a_forgotten_message_is_its_first_run(kind: Kind) {
    for contract in [Contract::Transactional, Contract::AtMostOnce, Contract::AtLeastOnce] {
        let place = Place::new(kind).await;
        let (inbox, effects) = (place.inbox(contract), place.effects());
        let forgotten = late("1", 2, Duration::MAX);
        assert_eq!(handle(&inbox, &effects, &forgotten).await, Decision::Parked(ParkReason::Forgotten));
        assert!(place.parking.request_replay("billing", &forgotten.parking_key()).await.unwrap());
        assert_eq!(replay(&place, &inbox).await, 1);
        assert_eq!(effects.all().await, ["1"], "{contract:?}");
        // A relay that was away has published it once more.
        assert_eq!(handle(&inbox, &effects, &message("1")).await, Decision::Ack, "{contract:?}");
        assert_eq!(effects.all().await, ["1"], "{contract:?}");
    }
}

async fn two_forgotten_messages_with_one_id_are_both_replayed(kind: Kind) {
    let place = Place::new(kind).await;
    let (inbox, effects) = (place.inbox(Contract::Transactional), place.effects());
    let mut other = late("1", 2, Duration::MAX);
    other.payload = "another payload".into();
    for forgotten in [&late("1", 2, Duration::MAX), &other] {
        assert_eq!(handle(&inbox, &effects, forgotten).await, Decision::Parked(ParkReason::Forgotten));
        assert!(place.parking.request_replay("billing", &forgotten.parking_key()).await.unwrap());
    }
    let requested = place.parking.list("billing", true, None, most(9)).await.unwrap();
    let first = key_of(&inbox, Ok(&requested[0])).await;
    let second = key_of(&inbox, Ok(&requested[1])).await;
    assert!(first.is_some() && second.is_some() && first != second, "{first:?} {second:?}");
    for parked in &requested {
        assert!(place.parking.request_replay("billing", &parked.message.parking_key()).await.unwrap());
    }
    let requested = place.parking.list("billing", true, None, most(9)).await.unwrap();
    assert_eq!(requested[1].reason, format!("{}; its replay failed: the database is away", ParkReason::OtherPayload));
    assert_eq!(key_of(&inbox, Ok(&requested[0])).await, first);
    assert_eq!(key_of(&inbox, Ok(&requested[1])).await, second);
}

async fn only_what_is_parked_is_replayed(kind: Kind) {
    let place = Place::new(kind).await;
    let inbox = place.inbox(Contract::Transactional);
    let request = |id: &'static str| {
        let parking = &place.parking;
        async move { parking.request_replay("billing", &message(id).parking_key()).await.unwrap() }
    };
    assert!(!request("1").await, "it is unknown");
    place.parking.begin("billing", &message("1").parking_key()).await.unwrap();
    assert!(!request("1").await, "it runs");
    reject(&inbox, &message("1"), "no").await;
    assert!(request("1").await);
    assert!(!request("1").await, "its replay is requested already");
    assert_eq!(replay(&place, &inbox).await, 1);
    assert!(!request("1").await, "it was replayed");
}

async fn a_list_goes_on_after_its_last_entry(kind: Kind) {
    let place = Place::new(kind).await;
    let inbox = place.inbox(Contract::Transactional);
    let ids: Vec<String> = (0..7).map(|number| format!("m-{number}")).collect();
    for id in &ids {
        reject(&inbox, &message(id), "no").await;
    }
    let (mut found, mut last) = (Vec::new(), None);
    loop {
        let page = place.parking.list("billing", false, last.as_ref(), most(3)).await.unwrap();
        let Some(end) = page.last() else { break };
        last = Some(end.clone());
        found.extend(page.into_iter().map(|parked| parked.message.id));
    }
    assert_eq!(found, ids);
}

async fn entries_are_purged_and_parked_messages_stay(kind: Kind) {
    let place = Place::new(kind).await;
    let inbox = place.inbox(Contract::Transactional);
    reject(&inbox, &message("parked"), "no").await;
    reject(&inbox, &message("replayed"), "no").await;
    place.parking.request_replay("billing", &message("replayed").parking_key()).await.unwrap();
    replay(&place, &inbox).await;
    place.parking.begin("billing", &message("running").parking_key()).await.unwrap();
    assert_eq!(place.parking.purge("billing", Duration::from_secs(60), most(9)).await.unwrap(), 0, "they are young");
    assert_eq!(place.parking.purge("billing", Duration::ZERO, most(1)).await.unwrap(), 1);
    assert_eq!(place.parking.purge("billing", Duration::ZERO, most(9)).await.unwrap(), 1);
    assert_eq!(place.parking.purge("billing", Duration::ZERO, most(9)).await.unwrap(), 0);
    assert_eq!(list(&place).await.len(), 1);
    assert_eq!(place.parking.begin("billing", &message("running").parking_key()).await.unwrap(), 1);
}

async fn a_reason_of_any_text_is_kept(kind: Kind) {
    let place = Place::new(kind).await;
    let inbox = place.inbox(Contract::Transactional);
    reject(&inbox, &message("1"), &format!("nul \0 and {}", "ä".repeat(2_000))).await;
    let [parked] = &list(&place).await[..] else { panic!("it is parked") };
    assert!(parked.reason.starts_with("failed: nul  and ää"), "{}", parked.reason);
    assert!(parked.reason.len() <= 1024, "{}", parked.reason.len());
}
