//! Work whose instructions callgrind counts: `idem-counts WORK TIMES`.
//!
//! The caller counts two numbers of times, so that the cost of the process itself cancels out.

mod document;
mod work;

use std::process::ExitCode;

use crate::work::{ALL, Fixture};

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let (name, times) = (words.next(), words.next().and_then(|word| word.parse::<u64>().ok()));
    let work = name.as_deref().and_then(|name| ALL.iter().find(|(other, _)| *other == name));
    let (Some((_, work)), Some(times)) = (work, times) else {
        // Without a known name and a number, it lists the names.
        for (name, _) in ALL {
            println!("{name}");
        }
        return ExitCode::SUCCESS;
    };
    match Fixture::new() {
        Ok(fixture) => {
            for _ in 0..times {
                work(&fixture);
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
