//! An operator and a key that is stuck: found, explained, resolved with a reason, and replayed to the client.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::support::{Answer, Backend, Contract, Request, Server, Setup, eventually};

#[test]
fn on_a_file() {
    a_stuck_key_is_resolved(Backend::Sqlite);
}

#[test]
fn on_postgres() {
    a_stuck_key_is_resolved(Backend::Postgres);
}

#[test]
fn on_redis() {
    a_stuck_key_is_resolved(Backend::Redis);
}

#[test]
fn behind_a_cache() {
    a_stuck_key_is_resolved(Backend::Hybrid);
}

/// The program `idem` on the store of a server.
struct Operator(Vec<String>);

impl Operator {
    /// Runs a command, and reads its lines.
    fn run(&self, arguments: &[&str]) -> Vec<Value> {
        // Cargo names only the programs of this package, and puts the others beside them.
        let program = Path::new(env!("CARGO_BIN_EXE_payments")).with_file_name("idem");
        assert!(program.exists(), "run `cargo build -p idem-cli` first: there is no {}", program.display());
        let ran = Command::new(program).args(&self.0).arg("--json").args(arguments).output().unwrap();
        let (printed, complained) = (String::from_utf8(ran.stdout).unwrap(), String::from_utf8(ran.stderr).unwrap());
        assert!(ran.status.success(), "{arguments:?}: {printed}{complained}");
        printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn a_stuck_key_is_resolved(backend: Backend) {
    let mut server = Server::start_on(Setup::from(backend), Contract::AtMostOnce, &["--lease-ms", "1000"]);
    let operator = Operator(server.store_arguments());
    let stream = Request::pay("stuck").simulate("delay-after=60000").begin(server.address);
    eventually("the effect", || (server.effects() == 1).then_some(()));
    server.kill();
    assert_eq!(Answer::read(stream, "POST"), None);
    let found = eventually("an abandoned record", || operator.run(&["list", "--abandoned"]).pop());
    assert_eq!((&found["state"], &found["takeover"]), (&"in-progress".into(), &"unknown".into()));
    let id = found["id"].as_str().unwrap().to_owned();
    server.start_again();
    let retry = || server.send(&Request::pay("stuck"));
    let body = server.store().with_file_name("answer");
    std::fs::write(&body, "{\"found\":true}").unwrap();
    let resolve = |how: &str| {
        let shown = operator.run(&["show", &id]);
        let seen = shown[0]["version"].as_str().unwrap();
        let given = ["resolve", &id, "--as", how, "--reason", "the ledger has it", "--seen", seen, "--yes"];
        let answer =
            ["--status", "201", "--header", "content-type: application/json", "--body-file", body.to_str().unwrap()];
        let answer = if how == "completed" { &answer[..] } else { &[] };
        operator.run(&[&given[..], answer].concat())
    };
    resolve("unknown");
    let unknown = retry();
    assert_eq!((unknown.status, unknown.problem().as_deref()), (504, Some("outcome-unknown")));
    resolve("completed");
    let replayed = retry();
    assert_eq!((replayed.status, replayed.is_replay()), (201, true));
    assert_eq!(replayed.json()["found"], true);
    assert_eq!(server.effects(), 1);
    let repairs = operator.run(&["repairs"]);
    let noted: Vec<_> =
        repairs.iter().map(|repair| (repair["resolution"].as_str(), repair["outcome"].as_str())).collect();
    assert_eq!(noted, [(Some("completed"), Some("resolved")), (Some("outcome-unknown"), Some("resolved"))]);
    assert!(repairs.iter().all(|repair| repair["record"] == id.as_str()), "{repairs:?}");
}
