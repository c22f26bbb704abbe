//! Records as this version writes them, which later versions have to read.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use idem_redis::TimeOffset;
use idem_testkit::golden::{self, ALL, PAST_MICROS};

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

/// Replaces the times of a record by fixed ones: it lasts for a year, and its lease or backoff, if any, for an hour.
fn at_golden_times(mut record: Vec<u8>) -> Vec<u8> {
    let [life, hold, slack, created] = [24, 32, 40, 42];
    record[life..hold].copy_from_slice(&YEAR_MICROS.to_be_bytes());
    if record[hold..slack] != [0; 8] {
        record[hold..slack].copy_from_slice(&HOUR_MICROS.to_be_bytes());
    }
    record[slack..created].fill(0);
    record[created..created + 8].copy_from_slice(&PAST_MICROS.to_be_bytes());
    record
}

const HOUR_MICROS: u64 = 3_600_000_000;
const YEAR_MICROS: u64 = 365 * 24 * HOUR_MICROS;

/// A line for each record.
fn dump(world: &World) -> String {
    let mut lines = String::new();
    for number in ALL {
        writeln!(lines, "{number} {}", hex(&at_golden_times(world.stored(&golden::id(number))))).unwrap();
    }
    lines
}

#[tokio::test]
async fn this_version_writes_records_in_format_1() {
    let url = idem_servers::redis_url();
    let offset = TimeOffset::default();
    let world = World::with(&url, crate::support::ports(&url)[0], |config| config.time_offset(offset.clone())).await;
    let time = Time { offset, servers: vec![world.port.into()], prefix: world.prefix.clone() };
    golden::write(&world.store, &time).await;
    golden::expect(&golden_file(), &dump(&world));
}

#[tokio::test]
async fn records_in_format_1_are_read() {
    let world = World::shared().await;
    for line in std::fs::read_to_string(golden_file()).unwrap().lines() {
        let (number, record) = line.split_once(' ').unwrap();
        let (key, life) = (world.key(&golden::id(number.parse().unwrap())), (YEAR_MICROS / 1_000).to_string());
        world.ask(&[&b"SET"[..], key.as_bytes(), &bytes(record), b"PX", life.as_bytes()]);
    }
    golden::check(&world.store).await;
}
