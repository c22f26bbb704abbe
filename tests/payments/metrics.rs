//! The page of metrics, beside what the clients of a process saw.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::thread;

use crate::support::{Answer, Backend, Framework, OPERATOR, Request, Server, Setup};

// Which store answers changes nothing about how its answers are counted, so a few setups are enough.
#[test]
fn on_a_file() {
    each_counter_says_what_the_clients_saw(Setup { framework: Framework::Actix, backend: Backend::Sqlite });
}

#[test]
fn behind_a_cache() {
    each_counter_says_what_the_clients_saw(Setup { framework: Framework::Axum, backend: Backend::Hybrid });
}

const CLIENTS: usize = 6;
const TURNS: usize = 6;

/// How often each outcome was seen.
type Seen = BTreeMap<String, u64>;

fn each_counter_says_what_the_clients_saw(setup: Setup) {
    for &contract in setup.contracts() {
        let server = Server::start_on(setup, contract, &[]);
        let mut seen = Seen::new();
        thread::scope(|scope| {
            let clients: Vec<_> = (0..CLIENTS)
                .map(|client| {
                    scope.spawn({
                        let server = &server;
                        move || ask(server, client)
                    })
                })
                .collect();
            for (outcome, count) in clients.into_iter().flat_map(|client| client.join().unwrap()) {
                *seen.entry(outcome).or_default() += count;
            }
        });
        for expected in ["executed", "replayed", "in-progress", "mismatch", "key-missing"] {
            assert!(seen.contains_key(expected), "the load has no {expected}: {seen:?}");
        }
        let page = page(&server);
        // Counters of alerts begin at 0.
        let counted: Seen = series(&page, "idem_requests_total", "outcome").filter(|(_, count)| *count > 0).collect();
        assert_eq!(counted, seen, "{contract:?}");
        let runs = sum(&page, "idem_run_seconds_count");
        assert_eq!(runs, seen["executed"], "{contract:?}: each run is measured");
        assert_eq!(sum(&page, "idem_running") + sum(&page, "idem_waiting") + sum(&page, "idem_settling"), 0, "{page}");
        assert!(
            !page.contains("acme") && !page.contains("shared-"),
            "neither a principal nor a key is a label: {page}"
        );
    }
}

/// Sends requests of all kinds one after the other, and counts their outcomes.
fn ask(server: &Server, client: usize) -> Seen {
    let mut seen = Seen::new();
    let mut count = |outcome: String| *seen.entry(outcome).or_default() += 1;
    for turn in 0..TURNS {
        // The clients meet at these keys.
        let shared = Request::pay(&format!("shared-{turn}")).simulate("delay-before=50");
        count(outcome(&server.send(&shared)));
        let own = Request::pay(&format!("own-{client}-{turn}"));
        count(outcome(&server.send(&own)));
        count(outcome(&server.send(&own)));
        count(outcome(&server.send(&own.body("{}"))));
        count(outcome(&server.send(&Request::pay("k").without("Idempotency-Key"))));
        count(outcome(&server.send(&Request::pay("k").without("Authorization"))));
        let failing = Request::pay(&format!("failing-{client}-{turn}")).simulate("status-before=503");
        count(outcome(&server.send(&failing)));
        count(outcome(&server.send(&failing)));
        // The client goes away while it reads its answer.
        let mut lost = Request::pay(&format!("lost-{client}-{turn}")).begin(server.address);
        lost.read_exact(&mut [0]).unwrap();
        drop(lost);
        count("executed".to_owned());
    }
    seen
}

/// The outcome as an engine names it.
fn outcome(answer: &Answer) -> String {
    match (answer.is_replay(), answer.status) {
        (true, 201) => "replayed".to_owned(),
        (true, _) => "replayed-failure".to_owned(),
        (false, 201 | 503) => "executed".to_owned(),
        (false, _) => answer.problem().unwrap_or_else(|| panic!("{answer:?}")),
    }
}

fn page(server: &Server) -> String {
    let stranger = server.send(&Request::get("/metrics"));
    assert_eq!(stranger.status, 401);
    let answer = server.send(&Request::get("/metrics").tenant(OPERATOR));
    assert_eq!(answer.status, 200);
    String::from_utf8(answer.body).unwrap()
}

/// The time series of a metric: the value of a label, and the count.
fn series<'a>(page: &'a str, metric: &'a str, label: &'a str) -> impl Iterator<Item = (String, u64)> + 'a {
    page.lines().filter_map(move |line| {
        let (labels, count) = line.strip_prefix(metric)?.strip_prefix('{')?.split_once("} ")?;
        let value = labels.split(',').find_map(|pair| pair.strip_prefix(label)?.strip_prefix("=\""))?;
        Some((value.trim_end_matches('"').to_owned(), count.parse().unwrap()))
    })
}

fn sum(page: &str, metric: &str) -> u64 {
    let label = if metric.ends_with("_count") { "operation" } else { "engine" };
    let all: Vec<_> = series(page, metric, label).map(|(_, count)| count).collect();
    assert!(!all.is_empty(), "there is no {metric}: {page}");
    all.iter().sum()
}
