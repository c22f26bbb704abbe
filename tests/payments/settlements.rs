//! What settles how, under each contract.

use crate::support::{Backend, Contract, Request, Server, eventually, on_every_backend, on_every_database};

on_every_backend! {
    every_status_settles_as_the_policy_says,
    a_panic_is_answered_with_a_problem,
    a_fault_under_at_least_once_runs_again_after_its_backoff,
}

on_every_database! {
    under_transactional_only_intended_answers_keep_their_writes,
}

/// What a repeat meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Repeat {
    Replay,
    RunsAgain,
    Backoff,
}

fn repeat(server: &Server, request: &Request) -> Repeat {
    let first = server.send(request);
    assert!(!first.is_replay());
    let again = server.send(request);
    if again.problem().as_deref() == Some("backoff") {
        assert!(again.retry_after().is_some());
        return Repeat::Backoff;
    }
    assert_eq!(again.status, first.status);
    if again.is_replay() { Repeat::Replay } else { Repeat::RunsAgain }
}

fn every_status_settles_as_the_policy_says(backend: Backend) {
    const STORED: [u16; 9] = [200, 201, 202, 302, 400, 404, 409, 418, 422];
    const RELEASED: [u16; 7] = [401, 403, 407, 408, 421, 425, 429];
    for &contract in backend.contracts() {
        let server = Server::start_on(backend, contract, &[]);
        let after_effect = |status: u16| {
            repeat(&server, &Request::pay(&format!("after-{status}")).simulate(&format!("status={status}")))
        };
        for status in STORED {
            assert_eq!(after_effect(status), Repeat::Replay, "{status} under {contract:?}");
        }
        for status in RELEASED {
            assert_eq!(after_effect(status), Repeat::RunsAgain, "{status} under {contract:?}");
        }
        let fault = match contract {
            Contract::Transactional => Repeat::RunsAgain,
            Contract::AtMostOnce => Repeat::Replay,
            Contract::AtLeastOnce => Repeat::Backoff,
        };
        for status in [500, 503, 599] {
            assert_eq!(after_effect(status), fault, "{status} under {contract:?}");
        }
        for panic in ["panic-before", "panic-after"] {
            assert_eq!(repeat(&server, &Request::pay(panic).simulate(panic)), fault, "{panic} under {contract:?}");
        }
    }
}

fn under_transactional_only_intended_answers_keep_their_writes(backend: Backend) {
    let server = Server::start_on(backend, Contract::Transactional, &[]);
    let effects_of = |what: &str| {
        let before = server.effects();
        server.send(&Request::pay(what).simulate(what));
        server.effects() - before
    };
    for kept in ["status=200", "status=302"] {
        assert_eq!(effects_of(kept), 1, "{kept}");
    }
    for discarded in ["status=404", "status=422", "status=429", "status=500", "panic-after"] {
        assert_eq!(effects_of(discarded), 0, "{discarded}");
    }
}

fn a_panic_is_answered_with_a_problem(backend: Backend) {
    for &contract in backend.contracts() {
        let server = Server::start_on(backend, contract, &[]);
        let answer = server.send(&Request::pay("k").simulate("panic-after"));
        assert_eq!((answer.status, answer.problem().as_deref()), (500, Some("handler-failed")), "{contract:?}");
        assert_eq!(server.send(&Request::pay("other")).status, 201, "the server goes on");
    }
}

fn a_fault_under_at_least_once_runs_again_after_its_backoff(backend: Backend) {
    let server = Server::start_on(backend, Contract::AtLeastOnce, &[]);
    assert_eq!(server.send(&Request::pay("k").simulate("status-before=503")).status, 503);
    let resting = server.send(&Request::pay("k"));
    assert_eq!((resting.status, resting.problem().as_deref(), resting.retry_after()), (409, Some("backoff"), Some(1)));
    let answer = eventually("the end of the backoff", || {
        let answer = server.send(&Request::pay("k"));
        (answer.status != 409).then_some(answer)
    });
    assert_eq!(answer.status, 201);
    assert!(!answer.is_replay());
    assert_eq!(server.effects(), 1);
}
