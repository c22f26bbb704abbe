//! What each outcome settles as, under each contract.

use crate::client::Request;
use crate::eventually;
use crate::target::{Contract, Target};

/// What a repeat gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Repeat {
    Replay,
    RunsAgain,
    Backoff,
}

fn repeat(target: &Target, request: &Request) -> Repeat {
    let first = target.send(request);
    assert!(!first.is_replay());
    let again = target.send(request);
    if again.problem().as_deref() == Some("backoff") {
        assert_eq!(again.status, 409);
        assert!(again.retry_after().is_some());
        return Repeat::Backoff;
    }
    assert_eq!(again.status, first.status, "{first:?}, and then {again:?}");
    if again.is_replay() { Repeat::Replay } else { Repeat::RunsAgain }
}

/// What repeats get after an answer with this status: once after the effect, and once in place of it.
fn of_status(target: &Target, status: u16) -> [Repeat; 2] {
    ["status", "status-before"].map(|simulation| {
        let key = format!("{simulation}-{status}");
        repeat(target, &target.pay(&key).simulate(&format!("{simulation}={status}")))
    })
}

/// The statuses in use that are final for the operation.
const REPLAYED: [u16; 27] = [
    200, 201, 202, 203, 206, 300, 301, 302, 303, 304, 307, 308, 400, 402, 404, 406, 409, 410, 412, 413, 415, 418, 422,
    423, 424, 428, 451,
];

/// What a repeat gets after a fault.
pub(super) fn fault(contract: Contract) -> Repeat {
    match contract {
        Contract::Transactional => Repeat::RunsAgain,
        Contract::AtMostOnce => Repeat::Replay,
        Contract::AtLeastOnce => Repeat::Backoff,
    }
}

pub(super) fn every_status_that_says_something_about_the_operation_is_replayed(target: &Target) {
    for status in REPLAYED {
        assert_eq!(of_status(target, status), [Repeat::Replay; 2], "{status}");
    }
}

pub(super) fn every_status_that_says_nothing_about_it_frees_the_key(target: &Target) {
    for status in [401, 403, 405, 407, 421, 425, 429] {
        assert_eq!(of_status(target, status), [Repeat::RunsAgain; 2], "{status}");
    }
}

pub(super) fn a_fault_is_settled_as_the_contract_says(target: &Target) {
    for status in [408, 500, 501, 503, 504, 599] {
        assert_eq!(of_status(target, status), [fault(target.contract()); 2], "{status}");
    }
}

pub(super) fn a_panic_is_settled_as_a_fault_and_answered_with_a_problem(target: &Target) {
    for panic in ["panic-before", "panic-after"] {
        let answer = target.send(&target.pay(panic).simulate(panic));
        assert_eq!((answer.status, answer.problem().as_deref()), (500, Some("handler-failed")), "{panic}");
        let expected = fault(target.contract());
        assert_eq!(repeat(target, &target.pay(&format!("{panic}-again")).simulate(panic)), expected, "{panic}");
    }
    assert_eq!(target.send(&target.pay("other")).status, 201, "the server goes on");
}

pub(super) fn under_transactional_only_intended_answers_keep_their_writes(target: &Target) {
    let is_kept = |what: &str| {
        let before = target.effects();
        let _ = target.send(&target.pay(what).simulate(what));
        target.effects() > before
    };
    for what in ["status=200", "status=302"] {
        assert!(is_kept(what), "{what}");
    }
    let expected = target.contract() != Contract::Transactional;
    for what in ["status=404", "status=422", "status=429", "status=500", "panic-after"] {
        assert_eq!(is_kept(what), expected, "{what}");
    }
}

pub(super) fn a_fault_runs_again_when_the_contract_says_so(target: &Target) {
    assert_eq!(target.send(&target.pay("k").simulate("status-before=503")).status, 503);
    let next = target.send(&target.pay("k"));
    let (answer, attempt) = match target.contract() {
        // It was rolled back, without a trace.
        Contract::Transactional => (next, "1"),
        Contract::AtMostOnce => {
            assert_eq!((next.status, next.is_replay(), target.effects()), (503, true, 0));
            return;
        }
        Contract::AtLeastOnce => {
            assert_eq!((next.status, next.problem().as_deref()), (409, Some("backoff")));
            assert!((1..=60).contains(&next.retry_after().unwrap()), "{next:?}");
            let answer = eventually("the end of the backoff", || {
                let answer = target.ask(&target.pay("k"));
                (answer.status != 409).then_some(answer)
            });
            (target.note(answer), "2")
        }
    };
    assert_eq!((answer.status, answer.is_replay(), answer.header("x-attempt")), (201, false, Some(attempt)));
    assert_eq!(target.effects(), 1);
}

pub(super) fn a_handler_may_say_how_its_answer_is_settled(target: &Target) {
    let meets = |directive: &str, simulate: &str| repeat(target, &target.pay(directive).simulate(simulate));
    assert_eq!(meets("do-not-store", "do-not-store"), Repeat::RunsAgain);
    assert_eq!(target.effects(), 2, "what an answer that is not stored has written stays");
    // A retryable failure keeps no writes, if they can be rolled back.
    let payments = if target.contract() == Contract::Transactional { 2 } else { 3 };
    assert_eq!(meets("retryable-after", "retryable-after=30"), Repeat::Backoff);
    assert_eq!(target.effects(), payments);
    let told = target.send(&target.pay("told-when").simulate("status-before=503,retryable-after=30"));
    assert_eq!((told.status, told.retry_after()), (503, Some(30)));
    assert_eq!(meets("keep-writes", "status=404,keep-writes"), Repeat::Replay);
    assert_eq!(target.effects(), payments + 1);
    let unkept = target.pay("do-not-retain-body");
    assert_eq!(target.send(&unkept.clone().simulate("do-not-retain-body")).status, 201);
    assert_eq!(target.send(&unkept).problem().as_deref(), Some("body-not-retained"));
    let short = target.pay("retain-for");
    let first = target.send(&short.clone().simulate("retain-for=1"));
    let next = eventually("the end of its retention", || {
        let answer = target.ask(&short);
        // A cache may report a run in progress for a while after its end.
        (!answer.is_replay() && answer.status != 409).then_some(answer)
    });
    assert_eq!((first.status, next.status), (201, 201));
    assert_ne!(next.body, first.body);
}
