//! The page for browsers, what it reads, and payments that settle their own runs.

use crate::support::{Backend, Contract, Framework, Request, Server, Setup};

const FRAMEWORKS: [Framework; 3] = [Framework::Axum, Framework::Actix, Framework::Hyper];

#[test]
fn the_page_for_browsers_shows_the_record_of_a_key() {
    for framework in FRAMEWORKS {
        let server = Server::start_on(Setup { framework, backend: Backend::Sqlite }, Contract::Transactional, &[]);
        let page = server.send(&Request::get("/").without("Authorization"));
        assert_eq!(
            (page.status, page.header("content-type")),
            (200, Some("text/html; charset=utf-8")),
            "{framework:?}"
        );
        let record = |key: &str| server.send(&Request::get(&format!("/v1/records/{key}"))).json();
        assert_eq!(record("k"), serde_json::json!({ "state": "absent" }), "{framework:?}");
        assert_eq!(server.send(&Request::pay("k")).status, 201);
        let completed = serde_json::json!({ "state": "completed", "attempt": 1, "status": 201 });
        assert_eq!(record("k"), completed, "{framework:?}");
        assert_eq!(record("other"), serde_json::json!({ "state": "absent" }), "{framework:?}");
        let strange = Request::get("/v1/records/k").tenant("another");
        assert_eq!(server.send(&strange).json(), serde_json::json!({ "state": "absent" }), "{framework:?}");
        assert_eq!(server.send(&Request::get("/v1/records/k").without("Authorization")).status, 401, "{framework:?}");
    }
}

/// actix does not keep the order of header fields.
#[test]
fn a_payment_that_settles_its_run_is_no_replay_to_its_first_client() {
    for framework in FRAMEWORKS {
        let setup = Setup { framework, backend: Backend::Postgres };
        let server = Server::start_on(setup, Contract::AtLeastOnce, &["--settle-in-handler"]);
        for number in 0..8 {
            let pay = Request::pay(&format!("k{number}"));
            let (first, again) = (server.send(&pay), server.send(&pay));
            assert_eq!((first.status, first.is_replay(), again.is_replay()), (201, false, true), "{framework:?}");
            assert_eq!(again.essence().body, first.essence().body, "{framework:?}");
        }
        assert_eq!(server.effects(), 8, "{framework:?}");
    }
}
