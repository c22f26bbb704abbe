//! What a replay keeps, and what it leaves out.

use crate::support::{Backend, Contract, Request, Server, on_every_backend};

on_every_backend! {
    header_fields_survive_in_order_repeated_and_not_utf_8,
    a_cookie_reaches_the_first_client_only,
    a_streamed_answer_is_replayed_whole,
    an_answer_over_the_limit_leaves_a_tombstone_and_never_runs_again,
    an_answer_of_exactly_one_mebibyte_is_kept_by_default,
    a_large_answer_streams_on_beyond_what_is_kept,
    answers_without_a_body_are_replayed_without_one,
}

fn header_fields_survive_in_order_repeated_and_not_utf_8(backend: Backend) {
    for &contract in backend.contracts() {
        let server = Server::start_on(backend, contract, &[]);
        let request = Request::pay("k").simulate("raw-header");
        let (first, again) = (server.send(&request), server.send(&request));
        assert!(again.is_replay());
        assert_eq!(first.values("x-raw"), [b"\xFF\xFE raw"]);
        assert_eq!(first.values("x-repeated"), [b"one", b"two"]);
        assert_eq!(again.essence(), first.essence());
        assert_eq!(server.send(&request).essence(), first.essence(), "replays are stable");
    }
}

fn a_cookie_reaches_the_first_client_only(backend: Backend) {
    let server = Server::start_on(backend, backend.strongest_contract(), &[]);
    let request = Request::pay("k").simulate("set-cookie");
    let (first, again) = (server.send(&request), server.send(&request));
    assert_eq!(first.header("set-cookie"), Some("session=secret"));
    assert!(again.is_replay());
    assert_eq!(again.header("set-cookie"), None);
    assert_eq!(again.body, first.body);
}

fn a_streamed_answer_is_replayed_whole(backend: Backend) {
    let server = Server::start_on(backend, Contract::AtLeastOnce, &[]);
    let request = Request::pay("k").simulate("stream=300000");
    let (first, again) = (server.send(&request), server.send(&request));
    assert_eq!(first.body.len(), 300_000);
    assert!(again.is_replay());
    assert_eq!(again.essence(), first.essence());
}

fn an_answer_over_the_limit_leaves_a_tombstone_and_never_runs_again(backend: Backend) {
    for &contract in backend.contracts() {
        let server = Server::start_on(backend, contract, &["--stored-limit", "1000"]);
        for (key, length, kept) in [("999", 999, true), ("1000", 1000, true), ("1001", 1001, false)] {
            let request = Request::pay(key).simulate(&format!("stream={length}"));
            let (first, again) = (server.send(&request), server.send(&request));
            assert_eq!((first.status, first.body.len()), (201, length), "the first client gets all of it");
            assert!(again.is_replay());
            if kept {
                assert_eq!(again.essence(), first.essence());
            } else {
                assert_eq!((again.status, again.problem().as_deref()), (410, Some("body-not-retained")));
                assert_eq!(again.json()["original_status"], 201);
                assert_eq!(again.header("location"), first.header("location"));
            }
        }
        assert_eq!(server.effects(), 3, "{contract:?}");
    }
}

fn an_answer_of_exactly_one_mebibyte_is_kept_by_default(backend: Backend) {
    let server = Server::start_on(backend, backend.strongest_contract(), &[]);
    let request = Request::pay("k").simulate("stream=1048576");
    let (first, again) = (server.send(&request), server.send(&request));
    assert!(again.is_replay());
    assert_eq!(again.essence(), first.essence());
}

fn a_large_answer_streams_on_beyond_what_is_kept(backend: Backend) {
    let server = Server::start_on(backend, backend.strongest_contract(), &[]);
    let request = Request::pay("k").simulate("stream=20000000");
    assert_eq!(server.send(&request).body.len(), 20_000_000);
    assert_eq!(server.send(&request).status, 410);
    assert_eq!(server.effects(), 1);
}

fn answers_without_a_body_are_replayed_without_one(backend: Backend) {
    let server = Server::start_on(backend, backend.strongest_contract(), &[]);
    let request = Request::pay("k").simulate("stream=0");
    let (first, again) = (server.send(&request), server.send(&request));
    assert_eq!((first.status, first.body.len()), (201, 0));
    assert!(again.is_replay());
    assert_eq!(again.essence(), first.essence());
}
