//! Renews the tables of a Markdown page from a run.
//!
//! The tables are between marks, which Markdown does not show: `<!-- goals -->` or `<!-- contests: NAME | NAME -->`, with the
//! beginnings of the contests' names, and `<!-- end -->`. People write the text around them.

use crate::contest::{Outcome, Sample, p50, p99, per_second};
use crate::error::Error;
use crate::judged::Judged;

const END: &str = "<!-- end -->";

/// `page` with the tables of this run. If the run has nothing for a table, the table stays as it is.
pub(crate) fn renewed(page: &str, goals: &[Judged], outcomes: &[Outcome]) -> Result<String, Error> {
    let mut renewed = Vec::new();
    let mut old_table_of = None;
    for line in page.lines() {
        if line == END {
            old_table_of = None;
        } else if old_table_of.is_some() {
            continue;
        }
        renewed.push(line.to_owned());
        let rows = table(line, goals, outcomes);
        if !rows.is_empty() {
            old_table_of = Some(line);
            renewed.extend(rows);
        }
    }
    match old_table_of {
        Some(mark) => Err(format!("the page has {mark:?} and no {END:?} after it").into()),
        None => Ok(renewed.join("\n") + "\n"),
    }
}

/// The table below a mark; empty below any other line.
fn table(line: &str, goals: &[Judged], outcomes: &[Outcome]) -> Vec<String> {
    if line == "<!-- goals -->" && !goals.is_empty() {
        let head = ["| goal | wanted | figure | min – max | met |", "|---|---|---|---|---|"].map(str::to_owned);
        return head.into_iter().chain(goals.iter().map(Judged::row)).collect();
    }
    let names = line.strip_prefix("<!-- contests: ").and_then(|rest| rest.strip_suffix(" -->"));
    let names: Vec<&str> = names.map(|names| names.split(" | ").collect()).unwrap_or_default();
    let listed = |outcome: &&Outcome| names.iter().any(|name| outcome.name.starts_with(name));
    let rows: Vec<String> = outcomes.iter().filter(listed).flat_map(rows).collect();
    if rows.is_empty() {
        return rows;
    }
    let head = [
        "| contest | contestant | per second | min – max | p50 | p99 | server's CPU |",
        "|---|---|---|---|---|---|---|",
    ];
    head.map(str::to_owned).into_iter().chain(rows).collect()
}

fn rows(outcome: &Outcome) -> Vec<String> {
    let row = |(place, contestant): (usize, &'static str)| {
        let rate = outcome.spread(contestant, per_second)?;
        let time = |of: fn(&Sample) -> Option<f64>| {
            outcome.spread(contestant, of).map_or("–".to_owned(), |it| shown(it.median))
        };
        let name = if place == 0 { outcome.name.as_str() } else { "" };
        let [median, min, max] = [rate.median, rate.min, rate.max].map(in_thousands);
        let [p50, p99, cpu] = [time(p50), time(p99), time(|sample| sample.cpu)];
        Some(format!("| {name} | {contestant} | {median} | {min} – {max} | {p50} | {p99} | {cpu} |"))
    };
    outcome.rows.iter().map(|row| row.contestant).enumerate().filter_map(row).collect()
}

/// A whole number with commas.
fn in_thousands(number: f64) -> String {
    let digits = format!("{number:.0}");
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
    groups.join(",")
}

/// Microseconds in the most readable unit, to about three digits.
fn shown(micros: f64) -> String {
    let (number, unit) = if micros < 1_000.0 { (micros, "µs") } else { (micros / 1_000.0, "ms") };
    let digits = if number < 10.0 { 2 } else { 0 };
    format!("{number:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contest::Row;

    fn outcome(name: &str, per_second: f64) -> Outcome {
        let sample = Sample { per_second, p50: Some(1_234.0), p99: Some(25.3), cpu: None };
        Outcome { name: name.to_owned(), rows: vec![Row { contestant: "idem", samples: vec![sample] }] }
    }

    const PAGE: &str = "before\n<!-- contests: Redis | SQLite: -->\nold\nolder\n<!-- end -->\nafter\n";

    #[test]
    fn a_table_takes_the_place_of_the_old_one() {
        let page = renewed(PAGE, &[], &[outcome("Redis: x", 1_234_567.0), outcome("Postgres: y", 5.0)]).unwrap();
        let row = "| Redis: x | idem | 1,234,567 | 1,234,567 – 1,234,567 | 1.23 ms | 25 µs | – |";
        let head = "| contest | contestant | per second | min – max | p50 | p99 | server's CPU |\n|---|---|---|---|---|---|---|";
        assert_eq!(page, format!("before\n<!-- contests: Redis | SQLite: -->\n{head}\n{row}\n<!-- end -->\nafter\n"));
        assert_eq!(renewed(&page, &[], &[outcome("Redis: x", 1_234_567.0)]).unwrap(), page);
    }

    #[test]
    fn what_a_run_has_nothing_of_stays() {
        assert_eq!(renewed(PAGE, &[], &[outcome("Postgres: y", 5.0)]).unwrap(), PAGE);
    }

    #[test]
    fn a_table_without_an_end_is_an_error() {
        let page = PAGE.replace(END, "");
        assert!(renewed(&page, &[], &[outcome("Redis: x", 5.0)]).is_err());
    }
}
