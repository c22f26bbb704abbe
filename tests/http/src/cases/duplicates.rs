//! Concurrent requests with one key.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::PATIENCE;
use crate::client::{Answer, Request};
use crate::exchange::Exchange;
use crate::target::Target;

pub(super) fn a_duplicate_of_a_running_request_is_409_and_says_when_to_come_back(target: &Target) {
    let running = target.begin(&target.pay("k").simulate("hold-before"));
    target.await_run();
    let duplicate = target.send(&target.pay("k"));
    assert_eq!((duplicate.status, duplicate.problem().as_deref()), (409, Some("in-progress")));
    // It grows with the age of the run. If a transaction has no record yet, its age is not known, and it is one second.
    assert!((1..=5).contains(&duplicate.retry_after().unwrap()), "{duplicate:?}");
    assert!(!duplicate.is_replay());
    target.release();
    let first = target.note(running.answer().unwrap());
    assert_eq!((first.status, target.effects()), (201, 1));
}

/// A held run, and `clients` requests on other connections.
fn storm(target: &Target, clients: u64, request: &Request) -> (Exchange, Vec<Exchange>) {
    let first = target.begin(&target.pay("k").simulate("hold-before"));
    target.await_run();
    (first, (0..clients).map(|_| target.begin(request)).collect())
}

/// The server counts the waiting requests of all tenants, so only one storm of them may run at a time.
static STORM: Mutex<()> = Mutex::new(());

/// The same, once all other requests wait.
fn waiting_storm(target: &Target, clients: u64) -> (Exchange, Vec<Exchange>, MutexGuard<'static, ()>) {
    let alone = STORM.lock().unwrap_or_else(PoisonError::into_inner);
    let (first, others) = storm(target, clients, &target.pay("k").waiting());
    // A request may stop waiting before the last one arrives, but only on a slow machine.
    target.await_stages("all the waiting, each for 25 s", |stages| {
        stages.open == clients + 1 && stages.waiting >= clients
    });
    (first, others, alone)
}

fn read_all(streams: Vec<Exchange>) -> impl Iterator<Item = Answer> {
    streams.into_iter().map(|stream| stream.answer().unwrap())
}

pub(super) fn a_client_may_ask_to_wait(target: &Target) {
    let (first, waiting, _alone) = waiting_storm(target, 1);
    target.release();
    let first = target.note(first.answer().unwrap());
    assert_eq!((first.status, first.is_replay()), (201, false));
    for waited in read_all(waiting) {
        assert!(waited.is_replay());
        assert_eq!(target.note(waited).essence(), first.essence());
    }
}

pub(super) fn a_wait_ends_when_the_client_said(target: &Target) {
    let running = target.begin(&target.pay("k").simulate("hold-before"));
    target.await_run();
    let began = Instant::now();
    let duplicate = target.send(&target.pay("k").header("Prefer", "wait=1"));
    let waited = began.elapsed();
    assert!((Duration::from_secs(1)..PATIENCE / 2).contains(&waited), "it waited for {waited:?}");
    assert_eq!((duplicate.status, duplicate.problem().as_deref()), (409, Some("in-progress")));
    assert!(duplicate.retry_after().is_some());
    target.release();
    let first = target.note(running.answer().unwrap());
    assert_eq!((first.status, target.effects()), (201, 1));
}

pub(super) fn of_100_duplicates_one_runs_and_the_others_are_turned_away(target: &Target) {
    let (first, others) = storm(target, 100, &target.pay("k"));
    for other in read_all(others) {
        assert_eq!((other.status, other.problem().as_deref()), (409, Some("in-progress")));
    }
    target.release();
    assert_eq!(first.answer().unwrap().status, 201);
    assert_eq!(target.effects(), 1);
}

pub(super) fn of_100_duplicates_that_wait_all_get_the_same_answer(target: &Target) {
    let (first, others, _alone) = waiting_storm(target, 100);
    target.release();
    let first = first.answer().unwrap();
    assert_eq!((first.status, first.is_replay()), (201, false));
    for other in read_all(others) {
        assert!(other.is_replay());
        assert_eq!(other.essence(), first.essence());
    }
    assert_eq!(target.effects(), 1);
}

/// The memory that a waiting client may cost the server for its connection, request and place.
const BYTES_PER_WAITER: u64 = 128 * 1024;

/// The memory that the server may use besides, with the bodies of all other cases.
const AT_REST: u64 = 128 * 1024 * 1024;

pub(super) fn of_1000_that_wait_for_one_key_none_runs_again_and_each_takes_little_room(target: &Target) {
    const CLIENTS: u64 = 1000;
    let (first, others, _alone) = waiting_storm(target, CLIENTS);
    if let Some(taken) = target.stages().memory_bytes {
        assert!(taken < AT_REST + CLIENTS * BYTES_PER_WAITER, "{taken} bytes while {CLIENTS} wait");
    }
    target.release();
    let first = first.answer().unwrap();
    assert_eq!((first.status, first.is_replay()), (201, false));
    for other in read_all(others) {
        assert!(other.is_replay(), "{other:?}");
        assert_eq!(other.essence(), first.essence());
    }
    assert_eq!(target.effects(), 1);
}
