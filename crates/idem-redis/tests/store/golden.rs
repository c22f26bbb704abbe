//! Records as this version writes them, which later versions have to read.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use idem_redis::TimeOffset;
use idem_servers::Reply;
use idem_testkit::golden::{self, ALL, FUTURE_MICROS, PAST_MICROS};

use crate::support::Time;
use crate::world::World;

fn golden_file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/format-1.txt")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

/// A head with times that stay the same.
fn at_golden_times(mut head: Vec<u8>, is_released: bool) -> Vec<u8> {
    let till = if is_released { PAST_MICROS } else { FUTURE_MICROS };
    for (place, time) in [(13, till), (21, PAST_MICROS), (29, PAST_MICROS), (37, FUTURE_MICROS)] {
        if head[place..place + 8] != [0; 8] {
            head[place..place + 8].copy_from_slice(&time.to_be_bytes());
        }
    }
    head
}

fn bytes_of(reply: &Reply) -> Vec<u8> {
    match reply {
        Reply::Bytes(bytes) => bytes.clone(),
        other => panic!("{other:?}"),
    }
}

/// A line for each field of each record: the record, the name, the value.
fn dump(world: &World) -> String {
    let mut lines = String::new();
    for number in ALL {
        let reply = world.ask(&["HGETALL", &world.key(&golden::id(number))]);
        let values: Vec<Vec<u8>> = reply.items().iter().map(bytes_of).collect();
        let pairs = values.chunks(2).map(|pair| (String::from_utf8(pair[0].clone()).unwrap(), pair[1].clone()));
        let mut fields: BTreeMap<String, Vec<u8>> = pairs.collect();
        let is_released = fields["who"].ends_with(&[0; 16]);
        let head = fields.remove("head").unwrap();
        fields.insert("head".to_owned(), at_golden_times(head, is_released));
        for (name, value) in fields {
            writeln!(lines, "{number} {name} {}", hex(&value)).unwrap();
        }
    }
    lines
}

#[tokio::test]
async fn this_version_writes_records_in_format_1() {
    let url = idem_servers::redis_url();
    let port = crate::support::ports(&url)[0];
    let offset = TimeOffset::default();
    let world = World::with(&url, port, |config| config.time_offset(offset.clone())).await;
    let time = Time { offset, servers: vec![port.into()], prefix: world.prefix.clone() };
    golden::write(&world.store, &time).await;
    golden::expect(&golden_file(), &dump(&world));
}

#[tokio::test]
async fn records_in_format_1_are_read() {
    let world = World::shared().await;
    for line in std::fs::read_to_string(golden_file()).unwrap().lines() {
        let mut words = line.split(' ');
        let (number, name) = (words.next().unwrap().parse().unwrap(), words.next().unwrap());
        let value = bytes(words.next().unwrap());
        world.ask(&[&b"HSET"[..], world.key(&golden::id(number)).as_bytes(), name.as_bytes(), &value]);
    }
    golden::check(&world.store).await;
}
