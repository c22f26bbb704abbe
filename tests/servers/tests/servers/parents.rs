//! Tests that no server outlives the process that started it.

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use idem_servers::redis_command;
use tempfile::TempDir;

use crate::client;

/// Starts a process that holds a server of this kind, with its temporary files in this folder.
fn parent(kind: &str, folder: &Path, printed: Stdio) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hold-server"));
    command.arg(kind).env("TMPDIR", folder).stdout(printed).spawn().unwrap()
}

/// The URL that the process prints once the server is up.
fn url(parent: &mut Child) -> String {
    let mut url = String::new();
    BufReader::new(parent.stdout.take().unwrap()).read_line(&mut url).unwrap();
    url.trim_end().to_owned()
}

/// The ports in a URL with several addresses.
fn ports(url: &str) -> Vec<u16> {
    let (_, addresses) = url.split_once("://").unwrap();
    addresses.split(',').map(|address| address.rsplit_once(':').unwrap().1.parse().unwrap()).collect()
}

/// A folder in which the server's account can reach its own folder.
fn open_folder() -> TempDir {
    use std::os::unix::fs::PermissionsExt;
    let folder = TempDir::new().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    folder
}

fn kill(mut parent: Child) {
    parent.kill().unwrap();
    parent.wait().unwrap();
}

fn expect_nothing_left(folder: &Path, ports: &[u16], circumstances: &str) {
    let start = Instant::now();
    // Only folders with the log of a keeper count. A parent that is killed after it made a folder, and before it started the
    // keeper that would remove it, leaves a folder without a log, and no server.
    let has_keeper = |path: &Path| path.join("log").exists();
    let is_left = || {
        ports.iter().any(|port| TcpStream::connect((Ipv4Addr::LOCALHOST, *port)).is_ok())
            || folder.read_dir().unwrap().any(|entry| has_keeper(&entry.unwrap().path()))
    };
    while is_left() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "a server or its folder outlived its parent: {circumstances}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Kills parents that are still starting their server.
fn expect_nothing_left_of_a_start(kind: &str, waits_ms: &[u64]) {
    let folder = open_folder();
    for wait_ms in waits_ms {
        let parent = parent(kind, folder.path(), Stdio::null());
        std::thread::sleep(Duration::from_millis(*wait_ms));
        kill(parent);
        expect_nothing_left(folder.path(), &[], &format!("{kind} after {wait_ms} ms"));
    }
}

#[test]
fn a_killed_parent_leaves_no_postgres_and_no_folder_behind() {
    let folder = open_folder();
    let mut parent = parent("postgres", folder.path(), Stdio::piped());
    let port = client::port(&url(&mut parent));
    assert_eq!(client::ask(port, "SELECT 1").unwrap(), "1");
    kill(parent);
    expect_nothing_left(folder.path(), &[port], "postgres");
}

#[test]
fn a_killed_parent_leaves_no_redis_and_no_folder_behind() {
    let folder = open_folder();
    let mut parent = parent("redis", folder.path(), Stdio::piped());
    let port = url(&mut parent).rsplit_once(':').unwrap().1.parse().unwrap();
    redis_command(port, &["PING"]).unwrap();
    kill(parent);
    expect_nothing_left(folder.path(), &[port], "redis");
}

#[test]
fn a_killed_parent_leaves_nothing_of_a_group_with_sentinels_behind() {
    let folder = open_folder();
    let mut parent = parent("redis-sentinel", folder.path(), Stdio::piped());
    let mut ports = ports(url(&mut parent).strip_suffix("/idem").unwrap());
    let primary = redis_command(ports[0], &["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "idem"]).unwrap();
    ports.push(primary.items()[1].text().unwrap().parse().unwrap());
    kill(parent);
    expect_nothing_left(folder.path(), &ports, "redis-sentinel");
}

#[test]
fn a_killed_parent_leaves_nothing_of_a_cluster_behind() {
    let folder = open_folder();
    let mut parent = parent("redis-cluster", folder.path(), Stdio::piped());
    let ports = ports(&url(&mut parent));
    assert_eq!(ports.len(), 6);
    kill(parent);
    expect_nothing_left(folder.path(), &ports, "redis-cluster");
}

#[test]
fn a_parent_killed_while_postgres_starts_leaves_nothing_behind() {
    expect_nothing_left_of_a_start("postgres", &[50, 200, 800, 1500]);
}

#[test]
fn a_parent_killed_while_redis_starts_leaves_nothing_behind() {
    expect_nothing_left_of_a_start("redis", &[5, 15, 30, 60]);
    expect_nothing_left_of_a_start("redis-sentinel", &[50, 150, 300]);
    expect_nothing_left_of_a_start("redis-cluster", &[50, 200, 800]);
}
