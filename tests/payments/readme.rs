//! Runs the README's curl lines one by one.

use std::process::Command;

use crate::support::{Contract, Server};

#[test]
fn the_curl_lines_of_the_readme_do_what_it_says() {
    let mut server = Server::start(Contract::Transactional, &[]);
    let readme = include_str!("../../README.md");
    let lines: Vec<&str> = readme.lines().filter(|line| line.starts_with("curl ")).collect();
    let run = |server: &Server, line: &str| {
        let line = line.replace("127.0.0.1:8080", &server.address.to_string());
        let output = Command::new("sh").args(["-c", &line]).output().unwrap();
        assert!(output.status.success(), "{line}: {output:?}; is curl installed?");
        String::from_utf8(output.stdout).unwrap()
    };
    let outputs: Vec<String> = lines.iter().map(|line| run(&server, line)).collect();
    let [first, again, other_body, no_key, no_principal, ledger] = outputs.as_slice() else {
        panic!("the README has {} curl lines", outputs.len())
    };
    let body = |output: &str| output.split_once("\r\n\r\n").unwrap().1.to_owned();
    assert!(first.starts_with("HTTP/1.1 201") && !first.contains("idempotency-replayed"), "{first}");
    assert!(again.starts_with("HTTP/1.1 201") && again.contains("idempotency-replayed: true"), "{again}");
    assert_eq!(body(first), body(again));
    assert!(other_body.starts_with("HTTP/1.1 422") && other_body.contains("#mismatch"), "{other_body}");
    assert!(no_key.starts_with("HTTP/1.1 400") && no_key.contains("#key-missing"), "{no_key}");
    assert!(no_principal.starts_with("HTTP/1.1 401") && no_principal.contains("#principal-missing"), "{no_principal}");
    assert_eq!(ledger, r#"{"effects":1,"total":1250}"#);
    server.terminate();
    assert_eq!(server.wait().code(), Some(0));
    server.start_again();
    let restarted = run(&server, lines[1]);
    assert!(restarted.contains("idempotency-replayed: true"), "{restarted}");
    assert_eq!(body(&restarted), body(first));
}
