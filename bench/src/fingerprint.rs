//! Fingerprints, compared with the crates that canonicalise JSON, with the parser, and with the digest alone.

use std::hint::black_box;
use std::time::Instant;

use idem_core::Fingerprint;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::contest::{Outcome, Row, Sample, p50};
use crate::document::document;
use crate::error::Error;
use crate::judged::Goal;
use crate::pace::Pace;
use crate::report::Report;

/// What a turn does, once.
type Work<'a> = Box<dyn Fn() + 'a>;

pub(crate) fn run(pace: Pace, report: &mut Report) -> Result<(), Error> {
    for (label, bytes) in [("1 KiB", 1 << 10), ("100 KiB", 100 << 10)] {
        let text = document(bytes)?;
        let canonicalised = || -> Result<(), serde_json::Error> {
            let value: Value = serde_json::from_slice(black_box(&text))?;
            black_box(Sha256::digest(serde_jcs::to_vec(&value)?));
            Ok(())
        };
        canonicalised()?;
        let contestants: [(&'static str, Work<'_>); 3] = [
            (
                "idem",
                Box::new(|| {
                    black_box(Fingerprint::of_json("pay", black_box(&text)));
                }),
            ),
            ("RFC 8785 and SHA-256", Box::new(|| drop(black_box(canonicalised())))),
            ("parsing", Box::new(|| drop(black_box(serde_json::from_slice::<Value>(black_box(&text)))))),
        ];
        let outcome = take_turns(&format!("JSON fingerprint, {label}"), &contestants, pace);
        let figure = outcome.ratio("RFC 8785 and SHA-256", "idem", p50);
        report.judge(&format!("JSON fingerprint of {label} against RFC 8785 + SHA-256"), Goal::AtLeast(5.0), figure);
        let figure = outcome.ratio("idem", "parsing", p50);
        report.judge(&format!("JSON fingerprint of {label} against parsing it to a tree"), Goal::AtMost(1.2), figure);
        report.add(outcome);
    }
    for (label, bytes) in [("16 KiB", 16 << 10), ("1 MiB", 1 << 20)] {
        let body = vec![b'x'; bytes];
        let contestants: [(&'static str, Work<'_>); 2] = [
            (
                "idem",
                Box::new(|| {
                    black_box(Fingerprint::of_bytes("pay", black_box(&body)));
                }),
            ),
            (
                "SHA-256",
                Box::new(|| {
                    black_box(Sha256::digest(black_box(&body)));
                }),
            ),
        ];
        let outcome = take_turns(&format!("raw fingerprint, {label}"), &contestants, pace);
        let figure = outcome.ratio("idem", "SHA-256", p50);
        report.judge(&format!("raw fingerprint of {label} against SHA-256 alone"), Goal::AtMost(1.05), figure);
        report.add(outcome);
    }
    Ok(())
}

/// Turns of a tenth of the usual length: there is no server whose variation must even out.
fn take_turns(name: &str, contestants: &[(&'static str, Work<'_>)], pace: Pace) -> Outcome {
    let mut rows: Vec<Row> =
        contestants.iter().map(|(name, _)| Row { contestant: name, samples: Vec::new() }).collect();
    for round in 0..=pace.rounds * 3 {
        for ((_, work), row) in contestants.iter().zip(&mut rows) {
            let started = Instant::now();
            let mut done = 0_u32;
            while started.elapsed() < pace.turn / 10 {
                for _ in 0..8 {
                    work();
                }
                done += 8;
            }
            let each = started.elapsed().as_secs_f64() / f64::from(done);
            if round > 0 {
                row.samples.push(Sample { per_second: 1.0 / each, p50: Some(each * 1e6), ..Sample::default() });
            }
        }
    }
    println!("\n{name}");
    let outcome = Outcome { name: name.to_owned(), rows };
    outcome.print();
    outcome
}
