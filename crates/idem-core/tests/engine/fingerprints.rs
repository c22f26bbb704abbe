//! Records whose fingerprints were made by another algorithm, as by another version.

use std::time::Duration;

use idem_core::engine::{Answer, Disposition, ExecuteError, Idempotency, Operation};
use idem_core::{Algorithm, Fingerprint, Scope, Writes};
use idem_testkit::{Fault, Verb};
use tokio::task::JoinHandle;

use crate::support::{Result, World, assert_ran, assert_replays, done};

fn by(algorithm: u16, digest: u8) -> Fingerprint {
    Fingerprint::from_parts(Algorithm::from_number(algorithm), [digest; 32])
}

fn operation(fingerprint: Fingerprint) -> Operation {
    Operation::new(Scope::new("acme", "pay"), "k".parse().unwrap(), fingerprint)
}

/// The same request, by a version that knows the algorithm 7 and one that has changed to 8.
fn earlier() -> Operation {
    operation(by(7, 1))
}

fn later() -> Operation {
    operation(by(8, 2)).also_fingerprinted(by(7, 1))
}

/// A run of the earlier version that has begun, takes 3 s, and ends so.
async fn running_earlier(world: &World, end: Disposition) -> JoinHandle<Result> {
    let running = tokio::spawn({
        let world = world.clone();
        async move {
            let engine = world.at_least_once();
            world.run_as(&engine, earlier(), Duration::from_secs(3), end).await
        }
    });
    while world.record().await.is_none() {
        tokio::task::yield_now().await;
    }
    running
}

#[tokio::test(start_paused = true)]
async fn a_record_is_compared_by_the_algorithm_that_it_was_made_with() {
    let world = World::new();
    let engine = world.at_least_once();
    assert_ran(&world.run_as(&engine, earlier(), Duration::ZERO, done()).await);
    assert_replays(&world.run_as(&engine, later(), Duration::ZERO, done()).await, "paid");
    let another = operation(by(8, 3)).also_fingerprinted(by(7, 4));
    for other in [another, operation(by(8, 2)), operation(by(8, 2)).also_fingerprinted(by(9, 1))] {
        let answer = world.run_as(&engine, other, Duration::ZERO, done()).await;
        assert!(matches!(answer, Ok(Answer::Mismatch)), "{answer:?}");
    }
    assert_eq!(world.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_new_record_is_made_with_the_operations_own_algorithm() {
    let world = World::new();
    let engine = world.at_least_once();
    assert_ran(&world.run_as(&engine, later(), Duration::ZERO, done()).await);
    assert_eq!(world.record().await.unwrap().fingerprint, by(8, 2));
    assert_replays(&world.run_as(&engine, later(), Duration::ZERO, done()).await, "paid");
    let answer = world.run_as(&engine, earlier(), Duration::ZERO, done()).await;
    assert!(matches!(answer, Ok(Answer::Mismatch)), "a version that does not know 8 cannot compare: {answer:?}");
}

#[tokio::test(start_paused = true)]
async fn a_run_of_the_other_version_is_waited_for() {
    let world = World::new();
    let running = running_earlier(&world, done()).await;
    let engine = world.at_least_once();
    let waiting = later().wait(Duration::from_secs(30));
    assert_replays(&world.run_as(&engine, waiting, Duration::ZERO, done()).await, "paid");
    assert_ran(&running.await.unwrap());
    assert_eq!(world.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_runs_after_all_makes_its_record_with_its_own_algorithm() {
    let world = World::new();
    let running = running_earlier(&world, Disposition::Release { writes: Writes::Discard }).await;
    let waiting = later().wait(Duration::from_secs(30));
    assert_ran(&world.run_as(&world.at_least_once(), waiting, Duration::ZERO, done()).await);
    assert_ran(&running.await.unwrap());
    assert_eq!(world.record().await.unwrap().fingerprint, by(8, 2));
}

#[tokio::test(start_paused = true)]
async fn a_record_of_another_algorithm_is_a_record_also_where_operations_run_without_protection() {
    let world = World::new();
    let engine = Idempotency::at_least_once(world.store.clone(), world.settings().dangerous_fail_open());
    assert_ran(&world.run_as(&engine, earlier(), Duration::ZERO, done()).await);
    for fault in [Fault::None, Fault::ErrorBefore, Fault::ErrorBefore] {
        world.store.next(Verb::Acquire, fault);
    }
    let answer = world.run_as(&engine, later(), Duration::ZERO, done()).await;
    assert!(matches!(answer, Err(ExecuteError::NotAdmitted(_))), "{answer:?}");
    assert_eq!(world.runs(), 1);
}
