//! What is left of a server after the process that started it.

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::client::{ask, port};

/// A process that holds a server whose folder is in this one.
fn parent(folder: &Path) -> (Child, u16) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hold-server"));
    let mut parent = command.env("TMPDIR", folder).stdout(Stdio::piped()).spawn().unwrap();
    let mut url = String::new();
    BufReader::new(parent.stdout.take().unwrap()).read_line(&mut url).unwrap();
    let port = port(url.trim_end());
    (parent, port)
}

/// A folder in which the account of the server can reach its own.
fn open_folder() -> TempDir {
    use std::os::unix::fs::PermissionsExt;
    let folder = TempDir::new().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    folder
}

fn expect_nothing_left(folder: &Path, port: u16) {
    let start = Instant::now();
    let is_left =
        || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok() || folder.read_dir().unwrap().next().is_some();
    while is_left() {
        assert!(start.elapsed() < Duration::from_secs(20), "the server outlived its parent");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_killed_parent_leaves_no_server_and_no_folder_behind() {
    let folder = open_folder();
    let (mut parent, port) = parent(folder.path());
    assert_eq!(ask(port, "SELECT 1").unwrap(), "1");
    parent.kill().unwrap();
    parent.wait().unwrap();
    expect_nothing_left(folder.path(), port);
}

#[test]
fn a_parent_killed_while_the_server_starts_leaves_nothing_behind() {
    let folder = open_folder();
    for wait_ms in [50, 200, 800, 1500] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hold-server"));
        let mut parent = command.env("TMPDIR", folder.path()).stdout(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(wait_ms));
        parent.kill().unwrap();
        parent.wait().unwrap();
        let start = Instant::now();
        while folder.path().read_dir().unwrap().next().is_some() {
            assert!(start.elapsed() < Duration::from_secs(20), "a folder outlived its parent after {wait_ms} ms");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
