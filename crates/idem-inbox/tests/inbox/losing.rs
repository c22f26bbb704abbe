//! Messages whose runs are lost, and databases that are unavailable.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use idem_core::engine::Contract;
use idem_inbox::{Decision, Message, ParkReason, SUSPECT_FROM};
use idem_postgres::PostgresTransaction;
use idem_servers::Postgres;
use sqlx::AssertSqlSafe;
use tokio::sync::Notify;

use crate::support::{Effects, Kind, Place, delivery, handle, late, message, on_each, settings};

on_each!(
    a_suspect_is_parked_after_its_lost_runs,
    a_suspect_that_ends_well_is_no_suspect_any_more,
    a_suspect_that_is_in_progress_elsewhere_keeps_its_count,
    suspects_run_one_at_a_time,
    a_parked_message_that_was_lost_is_acknowledged_if_it_took_effect,
);

fn suspect(id: &str) -> Message {
    delivery(id, SUSPECT_FROM)
}

/// A run that began and whose process ended.
async fn lose(place: &Place, id: &str) -> u32 {
    place.parking.begin("billing", &message(id).parking_key()).await.unwrap()
}

async fn a_suspect_is_parked_after_its_lost_runs(kind: Kind) {
    for contract in [Contract::Transactional, Contract::AtMostOnce, Contract::AtLeastOnce] {
        let place = Place::new(kind).await;
        let (inbox, effects) = (place.inbox(contract), place.effects());
        for lost in 1..=3 {
            assert_eq!(lose(&place, "1").await, lost);
        }
        assert_eq!(handle(&inbox, &effects, &suspect("1")).await, Decision::Parked(ParkReason::Lost), "{contract:?}");
        assert_eq!(handle(&inbox, &effects, &message("1")).await, Decision::Parked(ParkReason::Lost), "{contract:?}");
        assert_eq!(effects.all().await, [""; 0], "{contract:?}");
        let parked = place.parking.list("billing", false, None, 9.try_into().unwrap()).await.unwrap();
        assert_eq!(parked.len(), 1, "{contract:?}");
        assert_eq!(parked[0].reason, ParkReason::Lost.to_string());
    }
}

async fn a_suspect_that_ends_well_is_no_suspect_any_more(kind: Kind) {
    let place = Place::new(kind).await;
    let (inbox, effects) = (place.inbox(Contract::Transactional), place.effects());
    lose(&place, "1").await;
    lose(&place, "1").await;
    assert_eq!(handle(&inbox, &effects, &suspect("1")).await, Decision::Ack, "its last run of three");
    assert_eq!(lose(&place, "1").await, 1, "the count has started again");
}

async fn a_suspect_that_is_in_progress_elsewhere_keeps_its_count(kind: Kind) {
    let place = Place::new(kind).await;
    let (inbox, effects) = (place.inbox(Contract::AtLeastOnce), place.effects());
    lose(&place, "1").await;
    let (begun, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let elsewhere = {
        let (inbox, begun, go_on) = (inbox.clone(), Arc::clone(&begun), Arc::clone(&go_on));
        tokio::spawn(async move {
            let delivered = message("1");
            let run = inbox.handle(&delivered, |_, _| async move {
                begun.notify_one();
                go_on.notified().await;
                Ok(())
            });
            run.await
        })
    };
    begun.notified().await;
    for _ in 0..9 {
        let decision = handle(&inbox, &effects, &suspect("1")).await;
        assert!(matches!(decision, Decision::RedeliverAfter(_)), "{decision:?}");
    }
    assert_eq!(lose(&place, "1").await, 2, "deliveries that did not run count nothing, and forget nothing");
    go_on.notify_one();
    assert_eq!(elsewhere.await.unwrap(), Decision::Ack);
}

async fn suspects_run_one_at_a_time(kind: Kind) {
    let place = Place::new(kind).await;
    let inbox = place.inbox(Contract::AtLeastOnce);
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut runs = tokio::task::JoinSet::new();
    for id in ["1", "2", "3", "4"] {
        let (inbox, running, most) = (inbox.clone(), Arc::clone(&running), Arc::clone(&most));
        runs.spawn(async move {
            let delivered = suspect(id);
            let run = inbox.handle(&delivered, |_, _| async move {
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(30)).await;
                running.fetch_sub(1, Ordering::SeqCst);
                Ok(())
            });
            run.await
        });
    }
    let decisions = runs.join_all().await;
    assert_eq!(decisions, [Decision::Ack, Decision::Ack, Decision::Ack, Decision::Ack]);
    assert_eq!(most.load(Ordering::SeqCst), 1);
}

async fn a_parked_message_that_was_lost_is_acknowledged_if_it_took_effect(kind: Kind) {
    let place = Place::new(kind).await;
    let (inbox, effects) = (place.inbox(Contract::Transactional), place.effects());
    assert_eq!(handle(&inbox, &effects, &message("1")).await, Decision::Ack);
    for _ in 0..5 {
        lose(&place, "1").await;
    }
    assert_eq!(handle(&inbox, &effects, &suspect("1")).await, Decision::Ack, "the record has the result");
    assert_eq!(effects.all().await, ["1"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_whose_transaction_can_never_be_committed_is_parked() {
    let place = Place::new(Kind::Postgres).await;
    let (inbox, effects) = (place.inbox(Contract::Transactional), place.effects());
    let Effects::Postgres(pool, schema) = &effects else { unreachable!() };
    let insert = format!("INSERT INTO \"{schema}\".once VALUES ('taken')");
    sqlx::raw_sql(AssertSqlSafe(insert.clone())).execute(pool).await.unwrap();
    let mut losses = 0;
    let decision = loop {
        let insert = insert.clone();
        let delivered = message("1");
        let run = inbox.handle(&delivered, |context, _| async move {
            let mut transaction = context.transaction::<PostgresTransaction>()?;
            sqlx::raw_sql(AssertSqlSafe(insert)).execute(&mut **transaction).await?;
            Ok(())
        });
        match run.await {
            Decision::RedeliverAfter(_) => losses += 1,
            decision => break decision,
        }
        assert!(losses < 9, "it is never parked");
    };
    assert_eq!((decision, losses), (Decision::Parked(ParkReason::Lost), 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interrupted_run_under_at_most_once_is_parked_as_unknown() {
    let place = Place::new(Kind::Postgres).await;
    let crashed = tokio::task::spawn_blocking({
        let inbox = place.inbox(Contract::AtMostOnce);
        move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let delivered = message("1");
            let run = inbox.handle(&delivered, |_, _| std::future::pending());
            // The runtime ends with the run in it, and the lease is renewed no more.
            runtime.block_on(async { tokio::time::timeout(Duration::from_millis(500), run).await.unwrap_err() });
        }
    });
    crashed.await.unwrap();
    let (inbox, effects) = (place.inbox(Contract::AtMostOnce), place.effects());
    let decision = loop {
        match handle(&inbox, &effects, &message("1")).await {
            Decision::RedeliverAfter(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            decision => break decision,
        }
    };
    assert_eq!(decision, Decision::Parked(ParkReason::OutcomeUnknown));
    assert_eq!(effects.all().await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_database_is_away_nothing_is_acknowledged() {
    let mut postgres = Postgres::start().unwrap();
    let place = Place::in_postgres(&postgres.url()).await;
    let inbox = place.inbox_with(Contract::Transactional, settings().store_timeout(Duration::from_millis(300)));
    let effects = place.effects();
    postgres.kill().unwrap();
    for again in [message("1"), suspect("2"), late("3", 2, Duration::MAX)] {
        let decision = handle(&inbox, &effects, &again).await;
        assert!(matches!(decision, Decision::Pause(_)), "{again:?}: {decision:?}");
    }
    postgres.start_again().unwrap();
    let decision = loop {
        match handle(&inbox, &effects, &message("1")).await {
            Decision::Ack => break Decision::Ack,
            Decision::Pause(_) | Decision::RedeliverAfter(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            decision => break decision,
        }
    };
    assert_eq!(decision, Decision::Ack);
    assert_eq!(effects.all().await, ["1"]);
}
