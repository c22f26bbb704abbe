//! What a broker is told, by outcome and contract.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use idem_core::engine::Contract;
use idem_inbox::{Decision, Inbox, InvalidInbox, Message, MessageError, ParkReason};
use tokio::sync::Notify;

use crate::support::{Kind, Place, delivery, handle, inbox_settings, late, message, on_each, settings};

const CONTRACTS: [Contract; 3] = [Contract::Transactional, Contract::AtMostOnce, Contract::AtLeastOnce];

on_each!(
    each_message_takes_effect_once,
    a_run_knows_the_trace_of_its_message,
    of_two_deliveries_at_once_one_runs,
    a_rejected_message_is_parked_and_stays_so,
    a_fault_runs_again_until_its_attempts_are_used_up,
    a_panic_is_a_fault,
    another_payload_under_an_id_is_parked,
    subscribers_do_not_share_messages,
    an_id_that_is_no_key_is_recognised,
    messages_without_an_id_are_parked_one_by_one,
    a_message_that_was_delivered_too_long_ago_is_not_run_again,
);

async fn each_message_takes_effect_once(kind: Kind) {
    for contract in CONTRACTS {
        let place = Place::new(kind).await;
        let (inbox, effects) = (place.inbox(contract), place.effects());
        for number in 1..5 {
            let decision = handle(&inbox, &effects, &delivery("1", number)).await;
            assert_eq!(decision, Decision::Ack, "{contract:?}, {number}");
        }
        assert_eq!(handle(&inbox, &effects, &message("2")).await, Decision::Ack);
        let mut all = effects.all().await;
        all.sort_unstable();
        assert_eq!(all, ["1", "2"], "{contract:?}");
    }
}

async fn a_run_knows_the_trace_of_its_message(kind: Kind) {
    let place = Place::new(kind).await;
    let inbox = place.inbox(Contract::Transactional);
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let field = || ("Traceparent".to_owned(), Bytes::from(parent));
    let spoiled = || ("traceparent".to_owned(), Bytes::from_static(b"\xFF"));
    let cases = [vec![field()], vec![], vec![spoiled()], vec![field(), field()]];
    for (number, headers) in cases.into_iter().enumerate() {
        let expected = (number == 0).then(|| parent.parse().unwrap());
        let mut message = message(&number.to_string());
        message.headers = headers;
        let run = inbox.handle(&message, move |context, _| async move {
            assert_eq!(context.trace(), expected);
            Ok(())
        });
        assert_eq!(run.await, Decision::Ack);
    }
}

async fn of_two_deliveries_at_once_one_runs(kind: Kind) {
    for contract in CONTRACTS {
        let place = Place::new(kind).await;
        let (inbox, effects) = (place.inbox(contract), place.effects());
        let (begun, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let first = {
            let (inbox, effects, begun, go_on) =
                (inbox.clone(), effects.clone(), Arc::clone(&begun), Arc::clone(&go_on));
            tokio::spawn(async move {
                let delivered = message("1");
                let run = inbox.handle(&delivered, |context, message| async move {
                    begun.notify_one();
                    go_on.notified().await;
                    effects.add(&context, &message.id).await
                });
                run.await
            })
        };
        begun.notified().await;
        let second = handle(&inbox, &effects, &message("1")).await;
        assert!(matches!(second, Decision::RedeliverAfter(_)), "{contract:?}: {second:?}");
        go_on.notify_one();
        assert_eq!(first.await.unwrap(), Decision::Ack, "{contract:?}");
        assert_eq!(handle(&inbox, &effects, &message("1")).await, Decision::Ack, "{contract:?}");
        assert_eq!(effects.all().await, ["1"], "{contract:?}");
    }
}

async fn a_rejected_message_is_parked_and_stays_so(kind: Kind) {
    for contract in CONTRACTS {
        let place = Place::new(kind).await;
        let (inbox, effects) = (place.inbox(contract), place.effects());
        let reject = |inbox: Inbox| async move {
            let effects = effects.clone();
            let delivered = message("1");
            let reject = inbox.handle(&delivered, |context, message| async move {
                effects.add(&context, &message.id).await?;
                Err(MessageError::Reject { why: "no such account".into() })
            });
            reject.await
        };
        let parked = Decision::Parked(ParkReason::Failed("no such account".into()));
        assert_eq!(reject(inbox.clone()).await, parked, "{contract:?}");
        let again = handle(&inbox, &place.effects(), &message("1")).await;
        assert_eq!(again, parked, "{contract:?}: the repeat gets the first reason");
        let kept = usize::from(contract != Contract::Transactional);
        assert_eq!(place.effects().all().await.len(), kept, "{contract:?}: a transaction is rolled back");
    }
}

async fn a_fault_runs_again_until_its_attempts_are_used_up(kind: Kind) {
    for contract in [Contract::Transactional, Contract::AtLeastOnce] {
        let place = Place::new(kind).await;
        let inbox = place.inbox(contract);
        let mut runs = 0;
        let decision = loop {
            let delivered = message("1");
            let fault =
                inbox.handle(&delivered, |_, _| async { Err(std::io::Error::other("the bank is away").into()) });
            match fault.await {
                Decision::RedeliverAfter(delay) => {
                    assert!(delay <= Duration::from_secs(1), "{contract:?}: {delay:?}");
                    runs += 1;
                    tokio::time::sleep(Duration::from_millis(120)).await;
                }
                decision => break decision,
            }
            assert!(runs < 50, "{contract:?}: it is never parked");
        };
        assert_eq!(decision, Decision::Parked(ParkReason::Failed("the bank is away".into())), "{contract:?}");
        assert!(runs >= 3, "{contract:?}: {runs}");
    }
}

async fn a_panic_is_a_fault(kind: Kind) {
    let place = Place::new(kind).await;
    let inbox = place.inbox(Contract::AtMostOnce);
    let delivered = message("1");
    let decision = inbox.handle(&delivered, |_, _| async { panic!("on purpose") }).await;
    assert_eq!(decision, Decision::Parked(ParkReason::Failed("the handler panicked".into())));
    let inbox = place.inbox(Contract::Transactional);
    let delivered = message("2");
    let decision = inbox.handle(&delivered, |_, _| async { panic!("on purpose") }).await;
    assert!(matches!(decision, Decision::RedeliverAfter(_)), "{decision:?}");
    tokio::time::sleep(Duration::from_millis(120)).await;
    assert_eq!(handle(&inbox, &place.effects(), &message("2")).await, Decision::Ack, "the next attempt succeeds");
}

async fn another_payload_under_an_id_is_parked(kind: Kind) {
    let place = Place::new(kind).await;
    let (inbox, effects) = (place.inbox(Contract::Transactional), place.effects());
    assert_eq!(handle(&inbox, &effects, &message("1")).await, Decision::Ack);
    let other = Message::new("1", "invoices", "something else");
    assert_eq!(handle(&inbox, &effects, &other).await, Decision::Parked(ParkReason::OtherPayload));
    assert_eq!(handle(&inbox, &effects, &message("1")).await, Decision::Ack, "the first one stays handled");
    assert_eq!(effects.all().await, ["1"]);
}

async fn subscribers_do_not_share_messages(kind: Kind) {
    let place = Place::new(kind).await;
    let effects = place.effects();
    for subscriber in ["billing", "audit"] {
        let engine = place.engine(Contract::Transactional, settings());
        let inbox = Inbox::new(subscriber, engine, Arc::clone(&place.parking), inbox_settings()).unwrap();
        assert_eq!(handle(&inbox, &effects, &message("1")).await, Decision::Ack);
        assert_eq!(handle(&inbox, &effects, &message("1")).await, Decision::Ack);
    }
    assert_eq!(effects.all().await, ["1", "1"]);
}

async fn an_id_that_is_no_key_is_recognised(kind: Kind) {
    let place = Place::new(kind).await;
    let (inbox, effects) = (place.inbox(Contract::Transactional), place.effects());
    let long = "x".repeat(300);
    let hashed = Message::new("with a blank", "t", "").key();
    let ids = ["with a blank", "ümlaut", &long, hashed.as_str()];
    for id in ids {
        assert_eq!(handle(&inbox, &effects, &message(id)).await, Decision::Ack, "{id}");
        assert_eq!(handle(&inbox, &effects, &message(id)).await, Decision::Ack, "{id}");
    }
    assert_eq!(effects.all().await.len(), ids.len(), "no two of them have one key");
}

async fn messages_without_an_id_are_parked_one_by_one(kind: Kind) {
    let place = Place::new(kind).await;
    let (inbox, effects) = (place.inbox(Contract::Transactional), place.effects());
    for _ in 0..2 {
        assert_eq!(handle(&inbox, &effects, &message("")).await, Decision::Parked(ParkReason::NoId));
    }
    let parked = place.parking.list("billing", false, None, 9.try_into().unwrap()).await.unwrap();
    assert_eq!(parked.len(), 2);
    assert_eq!(effects.all().await, [""; 0]);
}

async fn a_message_that_was_delivered_too_long_ago_is_not_run_again(kind: Kind) {
    let place = Place::new(kind).await;
    let day = Duration::from_secs(24 * 60 * 60);
    let (inbox, effects) = (place.inbox_with(Contract::Transactional, settings().retention(day)), place.effects());
    let decision = handle(&inbox, &effects, &late("1", 2, day)).await;
    assert_eq!(decision, Decision::Parked(ParkReason::Forgotten), "its record may have been purged");
    assert_eq!(handle(&inbox, &effects, &late("2", 1, day)).await, Decision::Ack, "it never ran");
    assert_eq!(handle(&inbox, &effects, &late("2", 2, day)).await, Decision::Ack, "its record is there");
    assert_eq!(handle(&inbox, &effects, &late("3", 2, day - Duration::from_secs(1))).await, Decision::Ack);
    assert_eq!(effects.all().await.len(), 2);
}

#[tokio::test]
async fn an_inbox_that_cannot_work_is_refused() {
    let place = Place::new(Kind::Sqlite).await;
    let inbox = |subscriber: &str, settings| {
        let engine = place.engine(Contract::AtLeastOnce, settings);
        Inbox::new(subscriber, engine, Arc::clone(&place.parking), inbox_settings())
    };
    for name in ["", "two words", "ä", &"x".repeat(65)] {
        assert_eq!(inbox(name, settings()).unwrap_err(), InvalidInbox::Subscriber(name.to_owned()));
    }
    let open = inbox("billing", settings().dangerous_fail_open());
    assert_eq!(open.unwrap_err(), InvalidInbox::FailsOpen);
    let (redelivery, retention) = (Duration::from_secs(7200), Duration::from_secs(3600));
    let inbox = inbox("billing", settings().retention(retention)).unwrap();
    assert_eq!(inbox.check_retention(redelivery), Err(InvalidInbox::Retention { redelivery, retention }));
    assert_eq!(inbox.check_retention(retention), Ok(()));
}
