//! Timeouts of the application, outside and inside the layer.

use super::settlements::{Repeat, fault};
use crate::client::{Answer, Request};
use crate::target::{Contract, Target};

/// The answer to a request that times out while it is held.
fn timed_out(target: &Target, hold: &str, request: &Request) -> Answer {
    let held = target.begin(request);
    if hold == "hold-before" {
        target.await_run();
    } else {
        target.await_effect();
    }
    target.time_out();
    let answer = target.note(held.answer().unwrap());
    assert_eq!((answer.status, &answer.json()["type"]), (504, &"urn:payments:problem:timed-out".into()));
    answer
}

pub(super) fn a_timeout_outside_answers_the_client_and_the_run_goes_on(target: &Target) {
    for (hold, payments) in [("hold-before", 1), ("hold-after", 2)] {
        let request = target.pay(hold);
        let _ = timed_out(target, hold, &request.clone().simulate(&format!("{hold},timeout-outside")));
        target.stays_held();
        let duplicate = target.send(&request);
        assert_eq!((duplicate.status, duplicate.problem().as_deref()), (409, Some("in-progress")), "{hold}");
        target.release();
        let retry = target.send(&request.waiting());
        assert_eq!((retry.status, retry.is_replay(), target.effects()), (201, true, payments), "{hold}");
    }
}

pub(super) fn a_timeout_inside_is_a_fault(target: &Target) {
    for hold in ["hold-before", "hold-after"] {
        let request = target.pay(hold).simulate(&format!("{hold},timeout-inside"));
        let first = timed_out(target, hold, &request);
        let again = target.send(&target.pay(hold));
        match fault(target.contract()) {
            Repeat::Replay => assert_eq!((again.is_replay(), again.essence()), (true, first.essence()), "{hold}"),
            Repeat::RunsAgain => assert_eq!((again.status, again.is_replay()), (201, false), "{hold}"),
            Repeat::Backoff => assert_eq!(again.problem().as_deref(), Some("backoff"), "{hold}"),
        }
    }
    // Writes from before the timeout are gone with their transaction, and stay without one.
    let expected = if target.contract() == Contract::Transactional { 2 } else { 1 };
    assert_eq!(target.effects(), expected);
}
