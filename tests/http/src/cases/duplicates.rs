//! Requests with one key at the same time.

use std::net::TcpStream;

use crate::client::{Answer, Request};
use crate::target::Target;

pub(super) fn a_duplicate_of_a_running_request_is_409_and_says_when_to_come_back(target: &Target) {
    let running = target.pay("k").simulate("delay-before=1000").begin(target.address());
    target.await_run();
    let duplicate = target.send(&target.pay("k"));
    assert_eq!((duplicate.status, duplicate.problem().as_deref()), (409, Some("in-progress")));
    // A second where a transaction's lock is all there is of a run; the rest of the lease elsewhere.
    assert!((1..=30).contains(&duplicate.retry_after().unwrap()), "{duplicate:?}");
    assert!(!duplicate.is_replay());
    let first = target.note(Answer::read(running, "POST").unwrap());
    assert_eq!((first.status, target.effects()), (201, 1));
}

pub(super) fn a_client_may_ask_to_wait(target: &Target) {
    let running = target.pay("k").simulate("delay-before=1000").begin(target.address());
    target.await_run();
    let waited = target.send(&target.pay("k").waiting());
    let first = target.note(Answer::read(running, "POST").unwrap());
    assert_eq!((first.status, first.is_replay(), waited.is_replay()), (201, false, true));
    assert_eq!(waited.essence(), first.essence());
}

/// Sends the same request on many connections at once, after one that runs already, and reads what they get.
fn storm(target: &Target, clients: usize, request: &Request) -> (Answer, Vec<Answer>) {
    let first = request.begin(target.address());
    target.await_run();
    let others: Vec<TcpStream> = (0..clients).map(|_| request.begin(target.address())).collect();
    let others = others.into_iter().map(|stream| Answer::read(stream, "POST").unwrap());
    let others = others.collect();
    (Answer::read(first, "POST").unwrap(), others)
}

pub(super) fn of_100_duplicates_one_runs_and_the_others_are_turned_away(target: &Target) {
    let (first, others) = storm(target, 100, &target.pay("k").simulate("delay-before=4000"));
    assert_eq!((first.status, first.is_replay()), (201, false));
    for other in others {
        assert_eq!((other.status, other.problem().as_deref()), (409, Some("in-progress")));
    }
    assert_eq!(target.effects(), 1);
}

pub(super) fn of_100_duplicates_that_wait_all_get_the_same_answer(target: &Target) {
    let (first, others) = storm(target, 100, &target.pay("k").simulate("delay-before=1000").waiting());
    assert_eq!((first.status, first.is_replay()), (201, false));
    for other in others {
        assert!(other.is_replay());
        assert_eq!(other.essence(), first.essence());
    }
    assert_eq!(target.effects(), 1);
}

pub(super) fn of_1000_that_wait_for_one_key_none_runs_again(target: &Target) {
    let (first, others) = storm(target, 1000, &target.pay("k").simulate("delay-before=2000").waiting());
    assert_eq!((first.status, first.is_replay()), (201, false));
    for other in others {
        // A server under such a load may turn a waiter away, and never runs it.
        assert!(other.is_replay() || other.status == 409 || other.status == 503, "{other:?}");
    }
    assert_eq!(target.effects(), 1);
}
