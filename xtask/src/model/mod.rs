//! An exhaustive search of what crashes, lost answers and late messages can do under each contract.
//!
//! The machine is the shipped one: every step that touches the record calls `idem_core::machine::transition`. The model adds
//! several workers with the same operation, a store with a coarse clock, and a network that loses and delays.
//!
//! Each contract's promises are checked in every reachable situation. Promises that are known not to hold must be seen broken,
//! so that an ineffective check is noticed.

mod advisory;
mod engine;
mod leased;
mod promises;
mod stored;
mod world;

use std::fmt::{self, Display};
use std::hash::Hash;
use std::num::NonZeroUsize;
use std::time::Instant;

use idem_core::Takeover;
use stateright::{Checker, CheckerBuilder, Model, Property};

use advisory::Advisory;
use engine::{Engine, HONEST_UNKNOWN, LASTING_SUCCESS, ONE_EFFECT, Rules};
use leased::{Contract, Leased, Promised};
use world::{Limits, Requests};

/// How `cargo xtask model` runs.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Number of threads that search.
    #[arg(long, default_value = "2")]
    threads: NonZeroUsize,
}

/// A contract breaks its promise, or a check is ineffective.
#[derive(Debug)]
pub(crate) struct Broken {
    promises: usize,
}

/// Three requests are enough for a first run, its takeover, and a client that comes after both. The retention outlasts the
/// search: nothing is promised to a client that retries later.
const LIMITS: Limits = Limits { workers: 3, last_step: 4, lease: 2, retention: 100, retry_after: 1, max_attempts: 2 };

/// Records expire and are purged within the search. Then only the laws hold.
const SHORT_RETENTION: Limits = Limits { workers: 2, last_step: 7, retention: 1, ..LIMITS };

/// Searches every contract and prints the results. Fails if a promise is broken or a known fault is not found.
pub(crate) fn run(options: &Options) -> Result<(), Broken> {
    let threads = options.threads.get();
    let start = Instant::now();
    let mut promises = 0;
    let leased = |contract| Leased::new(contract, LIMITS, Promised::All);
    promises += hold("Transactional, a lock that dies with its transaction", Advisory::new(LIMITS), threads);
    promises += hold("Transactional, a lease in the store", leased(Contract::Transactional), threads);
    promises += hold("AtMostOnce", leased(Contract::AtMostOnce), threads);
    promises += hold("AtLeastOnce", leased(Contract::AtLeastOnce), threads);
    for contract in [Contract::Transactional, Contract::AtMostOnce, Contract::AtLeastOnce] {
        let model = Leased::new(contract, SHORT_RETENTION, Promised::Laws);
        promises += hold(&format!("{contract:?}, records that expire, the laws alone"), model, threads);
    }

    for (name, rules) in rules_kept() {
        promises += hold(name, Engine::new(rules, LIMITS), threads);
    }
    for (name, rules, promise) in rules_broken() {
        promises += fail(name, Engine::new(rules, LIMITS), &[promise]);
    }

    let mut confused = Leased::new(Contract::AtMostOnce, LIMITS, Promised::AtMostOneEffect);
    confused.requests = Requests::new(LIMITS, Takeover::Rerun);
    promises += fail("AtMostOnce whose takeovers run again", confused, &[]);
    let confused = Leased::new(Contract::AtLeastOnce, LIMITS, Promised::AtMostOneEffect);
    promises += fail("AtLeastOnce instead of AtMostOnce", confused, &[]);
    println!("{promises} properties broken, {:.1} s in all", start.elapsed().as_secs_f64());
    if promises == 0 { Ok(()) } else { Err(Broken { promises }) }
}

/// Searches a whole model, and returns the number of broken properties.
fn hold<M>(name: &str, model: M, threads: usize) -> usize
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + fmt::Debug + Hash + PartialEq + Send + Sync,
    M::Action: Clone + fmt::Debug + Display + PartialEq + Send + Sync,
{
    let start = Instant::now();
    let checker = CheckerBuilder::threads(model.checker(), threads).spawn_bfs().join();
    println!("{name}: {} situations in {:.1} s", checker.unique_state_count(), start.elapsed().as_secs_f64());
    let mut broken = 0;
    for property in checker.model().properties() {
        let path = checker.discovery(property.name);
        let holds = path.is_some() != property.expectation.discovery_is_failure();
        let kind = if property.expectation.discovery_is_failure() { "always" } else { "sometimes" };
        println!("  {} {kind}: {}", if holds { "ok" } else { "BROKEN" }, property.name);
        if !holds {
            broken += 1;
            path.into_iter().for_each(|path| print_steps(&path.into_actions()));
        }
    }
    broken
}

/// The engine with all its rules.
fn rules_kept() -> [(&'static str, Rules); 4] {
    let probe = Rules::kept(Takeover::Probe);
    [
        ("The engine, AtMostOnce", Rules::kept(Takeover::Unknown)),
        ("The engine, AtLeastOnce", Rules::kept(Takeover::Rerun)),
        ("The engine, AtMostOnce with a probe", probe),
        (
            "The same with processes that stand still, and a probe that prevents later effects",
            Rules { stands_still: true, probe_prevents: true, ..probe },
        ),
    ]
}

/// Each rule switched off, or a fault beyond the rules, with the promise that this breaks.
fn rules_broken() -> [(&'static str, Rules, &'static str); 5] {
    let probe = Rules::kept(Takeover::Probe);
    [
        ("A lease that is not confirmed after a probe", Rules { confirms: false, ..probe }, ONE_EFFECT),
        (
            "A stop between check and effect, and a probe that only looks",
            Rules { stands_still: true, ..probe },
            ONE_EFFECT,
        ),
        (
            "A late acquire that is not given back",
            Rules { gives_back: false, ..Rules::kept(Takeover::Unknown) },
            HONEST_UNKNOWN,
        ),
        (
            "A store that takes neither the settlement nor renewals for a lease, behind a success that was told",
            Rules { renews_behind: false, ..Rules::kept(Takeover::Rerun) },
            LASTING_SUCCESS,
        ),
        (
            "A settlement that is given up behind its answer",
            Rules { insists: false, ..Rules::kept(Takeover::Rerun) },
            LASTING_SUCCESS,
        ),
    ]
}

/// Searches until these properties, or the model's only one, are broken. Returns how many never were.
fn fail<M>(name: &str, model: M, expected: &[&str]) -> usize
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + fmt::Debug + Hash + PartialEq + Send + Sync,
    M::Action: Clone + fmt::Debug + Display + PartialEq + Send + Sync,
{
    let start = Instant::now();
    // One thread visits situations by distance, so that it finds the shortest trace.
    let checker = model.checker().threads(1).spawn_bfs().join();
    let states = checker.unique_state_count();
    println!("{name}: {states} situations in {:.1} s", start.elapsed().as_secs_f64());
    let mut missing = 0;
    let is_expected = |property: &Property<M>| expected.is_empty() || expected.contains(&property.name);
    for property in checker.model().properties().into_iter().filter(is_expected) {
        match checker.discovery(property.name) {
            Some(path) => {
                println!("  ok, as expected it is not true that {}:", property.name);
                print_steps(&path.into_actions());
            }
            None => {
                println!("  BROKEN: the search does not find out that {} is not true", property.name);
                missing += 1;
            }
        }
    }
    missing
}

fn print_steps(steps: &[impl Display]) {
    for (number, step) in (1..).zip(steps) {
        println!("    {number}. {step}");
    }
}

impl Display for Broken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "the model breaks {} properties", self.promises)
    }
}

impl std::error::Error for Broken {}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small enough for a unit test, and large enough for every situation of the properties.
    const SMALL: Limits = Limits { workers: 2, last_step: 3, max_attempts: 1, ..LIMITS };

    #[test]
    fn a_small_search_finds_every_promise_kept() {
        assert_eq!(hold("a lock that dies with its transaction", Advisory::new(SMALL), 1), 0);
        for contract in [Contract::Transactional, Contract::AtMostOnce, Contract::AtLeastOnce] {
            assert_eq!(hold("small", Leased::new(contract, SMALL, Promised::All), 1), 0, "{contract:?}");
        }
    }

    #[test]
    fn a_small_search_finds_the_double_effect_of_a_takeover_that_runs_again() {
        let mut confused = Leased::new(Contract::AtMostOnce, SMALL, Promised::AtMostOneEffect);
        confused.requests = Requests::new(SMALL, Takeover::Rerun);
        assert_eq!(fail("confused", confused, &[]), 0);
        assert_eq!(fail("sound", Leased::new(Contract::AtMostOnce, SMALL, Promised::AtMostOneEffect), &[]), 1);
    }

    #[test]
    fn a_search_finds_the_rules_of_the_engine_sufficient_and_each_of_them_necessary() {
        for (name, rules) in rules_kept() {
            assert_eq!(hold(name, Engine::new(rules, LIMITS), 1), 0, "{name}");
        }
        for (name, rules, promise) in rules_broken() {
            assert_eq!(fail(name, Engine::new(rules, LIMITS), &[promise]), 0, "{name}");
        }
    }
}
