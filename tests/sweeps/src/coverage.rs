//! Counts what a sweep covered, and prints the table.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::ended::{Site, Verb};
use crate::engine::Setting;
use crate::panics::Culprit;
use crate::sweep::Case;
use crate::world::Place;

/// A line of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Row {
    Engine(Setting),
    Panics(Culprit),
    Ended(Site, Verb),
    Store(Place, Case),
}

impl Row {
    /// The store, and the verb.
    pub(crate) fn names(self) -> [&'static str; 2] {
        match self {
            Self::Engine(setting) => ["engine", setting.name()],
            Self::Panics(culprit) => ["engine", culprit.name()],
            Self::Ended(site, verb) => [site.name(), verb.name()],
            Self::Store(place, case) => [place.name(), case.name()],
        }
    }
}

/// What was covered, and what did not hold.
#[derive(Debug, Default, Clone)]
pub(crate) struct Coverage {
    /// The deepest await at which a future was dropped.
    pub(crate) awaits: usize,
    pub(crate) drops: usize,
    /// The most bytes of an exchange, and the number of cuts, by direction.
    pub(crate) bytes: [usize; 2],
    pub(crate) cuts: [usize; 2],
    /// Delivered requests whose whole answers were lost.
    pub(crate) lost: usize,
    pub(crate) violations: Vec<String>,
}

impl Coverage {
    pub(crate) fn add(&mut self, other: Self) {
        self.awaits = self.awaits.max(other.awaits);
        self.drops += other.drops;
        for direction in 0..2 {
            self.bytes[direction] = self.bytes[direction].max(other.bytes[direction]);
            self.cuts[direction] += other.cuts[direction];
        }
        self.lost += other.lost;
        self.violations.extend(other.violations);
    }
}

/// One line for each verb of each store, and their sum.
pub(crate) fn table(swept: &BTreeMap<Row, Coverage>) -> String {
    let mut table = String::new();
    line(&mut table, ["", ""], ["", "", "request", "", "answer", "", "", ""]);
    line(&mut table, ["store", "verb"], ["awaits", "drops", "bytes", "cuts", "bytes", "cuts", "lost", "wrong"]);
    let mut sum = Coverage::default();
    for (row, coverage) in swept {
        line(&mut table, row.names(), numbers(coverage).each_ref().map(String::as_str));
        sum.add(coverage.clone());
    }
    let [_, drops, _, requests, _, answers, lost, wrong] = &numbers(&sum);
    line(&mut table, ["all", ""], ["", drops, "", requests, "", answers, lost, wrong]);
    table.push_str(
        "awaits: the deepest at which a future was dropped; drops: how many were, at each depth again and again, and unpolled.\n\
         bytes: the longest exchange; cuts: exchanges that ended after each number of bytes from 0 on, by RST, by FIN, and by\n\
         RST of all connections with the next one refused. lost: answers of requests that were delivered whole.\n",
    );
    table
}

fn numbers(coverage: &Coverage) -> [String; 8] {
    let Coverage { awaits, drops, bytes, cuts, lost, violations } = coverage;
    [*awaits, *drops, bytes[0], cuts[0], bytes[1], cuts[1], *lost, violations.len()].map(|number| number.to_string())
}

fn line(table: &mut String, names: [&str; 2], numbers: [&str; 8]) {
    let [store, verb] = names;
    let _ = write!(table, "{store:<20} {verb:<28}");
    for number in numbers {
        let _ = write!(table, " {number:>7}");
    }
    table.push('\n');
}
