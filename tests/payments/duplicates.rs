//! Many requests with one key at the same time.

use std::sync::Barrier;

use crate::support::{Answer, Backend, Request, Server, on_every_backend};

on_every_backend! {
    of_200_duplicates_one_runs_and_the_others_are_turned_away,
    of_200_duplicates_that_wait_all_get_the_same_answer,
}

const CLIENTS: usize = 200;

/// Sends the same request from many clients at once.
fn storm(server: &Server, request: &Request) -> Vec<Answer> {
    let barrier = Barrier::new(CLIENTS);
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                scope.spawn(|| {
                    barrier.wait();
                    server.send(request)
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    })
}

fn of_200_duplicates_one_runs_and_the_others_are_turned_away(backend: Backend) {
    for &contract in backend.contracts() {
        let server = Server::start_on(backend, contract, &[]);
        // Long enough for all clients to connect while the first runs.
        let answers = storm(&server, &Request::pay("k").simulate("delay-before=5000"));
        let (first, others): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status == 201);
        assert_eq!(first.len(), 1, "{contract:?}");
        for other in others {
            assert_eq!((other.status, other.problem().as_deref()), (409, Some("in-progress")));
            assert!(other.retry_after().is_some());
        }
        assert_eq!(server.effects(), 1, "{contract:?}");
    }
}

fn of_200_duplicates_that_wait_all_get_the_same_answer(backend: Backend) {
    for &contract in backend.contracts() {
        let server = Server::start_on(backend, contract, &["--wait-ms", "5000"]);
        let answers = storm(&server, &Request::pay("k").simulate("delay-before=1000"));
        let first = answers.iter().find(|answer| !answer.is_replay()).unwrap();
        assert_eq!(answers.iter().filter(|answer| !answer.is_replay()).count(), 1);
        for answer in &answers {
            assert_eq!(answer.essence(), first.essence(), "{contract:?}");
            assert_eq!(answer.status, 201);
        }
        assert_eq!(server.effects(), 1, "{contract:?}");
    }
}
