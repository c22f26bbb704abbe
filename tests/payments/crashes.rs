//! `kill -9` during a payment, a restart, and a retry.

use std::time::{Duration, Instant};

use crate::support::{Answer, Contract, Request, Server, Setup, eventually, on_every_backend, on_every_database};

on_every_database! {
    transactional_makes_the_payment_exactly_once_within_a_lease,
}

on_every_backend! {
    at_most_once_never_makes_a_second_payment,
    at_least_once_runs_again_as_attempt_2,
    a_process_that_dies_between_the_effect_and_its_answer_keeps_its_contract,
    what_was_settled_before_the_process_died_is_replayed_after_it,
    a_payment_that_takes_longer_than_its_lease_is_not_made_twice,
}

/// Longer than a restart takes on a loaded machine.
const LEASE_MS: &str = "4000";
const LEASE: Duration = Duration::from_secs(4);

/// Time for the retries themselves, on a loaded machine.
const MARGIN: Duration = Duration::from_secs(5);

/// Kills a server during a payment and restarts it. Returns the server and the time of its death.
fn crashed(setup: Setup, contract: Contract, simulate: &str, effects_before_death: u64) -> (Server, Instant) {
    let mut server = Server::start_on(setup, contract, &["--lease-ms", LEASE_MS]);
    let stream = Request::pay("k").simulate(simulate).begin(server.address);
    server.await_running();
    eventually("the effect", || (server.effects() == effects_before_death).then_some(()));
    server.kill();
    let died_at = Instant::now();
    assert_eq!(Answer::read(stream, "POST"), None, "nobody was answered");
    server.start_again();
    (server, died_at)
}

/// Retries until the answer is not 409. Checks that it came within a lease of `died_at`, and returns it.
fn retried(server: &Server, died_at: Instant) -> Answer {
    let answer = eventually("an answer", || {
        let answer = server.send(&Request::pay("k"));
        if answer.status == 409 {
            assert_eq!(answer.problem().as_deref(), Some("in-progress"));
            assert!((1..=5).contains(&answer.retry_after().unwrap()), "not the rest of the lease: {answer:?}");
        }
        (answer.status != 409).then_some(answer)
    });
    let took = died_at.elapsed();
    assert!(took < LEASE + MARGIN, "stuck for {took:?}");
    answer
}

fn transactional_makes_the_payment_exactly_once_within_a_lease(setup: Setup) {
    // Before the effect, and after it but before the commit. An uncommitted effect is invisible, so the ledger says 0.
    for simulate in ["delay-before=60000", "delay-after=60000"] {
        let (server, died_at) = crashed(setup, Contract::Transactional, simulate, 0);
        let answer = retried(&server, died_at);
        assert_eq!(answer.status, 201, "{simulate}");
        assert!(!answer.is_replay());
        assert!(server.send(&Request::pay("k")).is_replay());
        assert_eq!(server.effects(), 1, "{simulate}");
    }
}

fn at_most_once_never_makes_a_second_payment(setup: Setup) {
    for (simulate, effects) in [("delay-before=60000", 0), ("delay-after=60000", 1)] {
        let (server, died_at) = crashed(setup, Contract::AtMostOnce, simulate, effects);
        let first_retry = server.send(&Request::pay("k"));
        assert_eq!(first_retry.status, 409, "the lease of the dead still holds");
        let answer = retried(&server, died_at);
        assert_eq!((answer.status, answer.problem().as_deref()), (504, Some("outcome-unknown")), "{simulate}");
        let again = server.send(&Request::pay("k"));
        assert_eq!(again.essence(), answer.essence());
        assert_eq!(server.effects(), effects, "{simulate}");
    }
}

fn at_least_once_runs_again_as_attempt_2(setup: Setup) {
    for (simulate, effects) in [("delay-before=60000", 0), ("delay-after=60000", 1)] {
        let (server, died_at) = crashed(setup, Contract::AtLeastOnce, simulate, effects);
        let answer = retried(&server, died_at);
        assert_eq!(answer.status, 201, "{simulate}");
        assert!(!answer.is_replay());
        assert_eq!(answer.header("x-attempt"), Some("2"));
        assert_eq!(server.effects(), effects + 1, "{simulate}");
        assert!(server.send(&Request::pay("k")).is_replay());
    }
}

fn a_process_that_dies_between_the_effect_and_its_answer_keeps_its_contract(setup: Setup) {
    for &contract in setup.contracts() {
        let (status, effects) = match contract {
            Contract::Transactional => (201, 1),
            Contract::AtMostOnce => (504, 1),
            Contract::AtLeastOnce => (201, 2),
        };
        let mut server = Server::start_on(setup, contract, &["--lease-ms", LEASE_MS]);
        assert_eq!(Request::pay("k").simulate("abort-after-effect").try_send(server.address), None);
        let died_at = Instant::now();
        assert!(!server.wait().success());
        server.start_again();
        assert_eq!(retried(&server, died_at).status, status, "{contract:?}");
        assert_eq!(server.effects(), effects, "{contract:?}");
    }
}

fn what_was_settled_before_the_process_died_is_replayed_after_it(setup: Setup) {
    for &contract in setup.contracts() {
        let mut server = Server::start_on(setup, contract, &["--lease-ms", LEASE_MS]);
        let stream = Request::pay("k").simulate("delay-answer=60000").begin(server.address);
        eventually("the effect", || (server.effects() == 1).then_some(()));
        let settled = eventually("the settlement", || {
            let answer = server.send(&Request::pay("k"));
            answer.is_replay().then_some(answer)
        });
        server.kill();
        assert_eq!(Answer::read(stream, "POST"), None, "the first client was not answered");
        server.start_again();
        let retry = server.send(&Request::pay("k"));
        assert!(retry.is_replay(), "{contract:?}");
        assert_eq!(retry.essence(), settled.essence(), "{contract:?}");
        assert_eq!(server.effects(), 1, "{contract:?}");
    }
}

fn a_payment_that_takes_longer_than_its_lease_is_not_made_twice(setup: Setup) {
    for &contract in setup.contracts() {
        let server = Server::start_on(setup, contract, &["--lease-ms", "1500"]);
        let stream = Request::pay("k").simulate("delay-before=5000").begin(server.address);
        server.await_running();
        let started = Instant::now();
        while started.elapsed() < Duration::from_millis(3500) {
            assert_eq!(server.send(&Request::pay("k")).status, 409, "the lease is renewed under {contract:?}");
        }
        assert_eq!(Answer::read(stream, "POST").unwrap().status, 201);
        assert_eq!(server.effects(), 1);
    }
}
