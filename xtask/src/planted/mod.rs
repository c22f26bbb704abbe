//! `cargo xtask planted-bugs`: checks that the responsible suites notice every known way to break a promise.
//!
//! One build of a [patched](patches) copy of the tree contains all bugs. An environment variable turns one of them on. The
//! suites must pass without any bug first; without that, their failures would prove nothing.

mod bugs;
mod build;
mod matrix;
mod patches;
mod suites;
mod trial;

use std::error::Error;
use std::time::Instant;

use bugs::{Bug, bugs};
use build::Executables;
pub(crate) use build::{compiles, example};
use matrix::Matrix;
use suites::{SUITES, Suite};
use trial::{Outcome, try_out};

use crate::servers::Servers;
use crate::test;

/// The bugs to try.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// A bug by its name; default all of them. May be repeated.
    #[arg(long, value_name = "NAME", value_parser = clap::builder::PossibleValuesParser::new(bugs().map(|bug| bug.name)))]
    bug: Vec<String>,
}

/// Tries the bugs on the suites and prints the results. Fails if a suite missed one of its bugs.
pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let began = Instant::now();
    let is_chosen = |bug: &&Bug| options.bug.is_empty() || options.bug.iter().any(|name| name == bug.name);
    let bugs: Vec<&Bug> = bugs().filter(is_chosen).collect();
    let is_needed = |suite: &&Suite| bugs.iter().any(|bug| bug.suites.contains(&suite.name));
    let suites: Vec<&Suite> = SUITES.iter().filter(is_needed).collect();
    if suites.iter().any(|suite| suite.package == "idem-mysql") {
        test::provide_mariadb()?;
    }
    let executables = Executables::build()?;
    let servers = Servers::start()?;

    println!("\nwithout a bug:");
    for suite in &suites {
        match try_out(suite, None, &executables, &servers)? {
            Outcome::Survived => {}
            outcome => return Err(format!("{} has to pass without a bug, and did not: {outcome}", suite.name).into()),
        }
    }
    let mut matrix = Matrix::new(&suites);
    for bug in bugs {
        println!("\n{}:", bug.name);
        let of_bug = suites.iter().filter(|suite| bug.suites.contains(&suite.name));
        let outcomes = of_bug.map(|suite| Ok((suite.name, try_out(suite, Some(bug), &executables, &servers)?)));
        matrix.add(bug, outcomes.collect::<Result<_, Box<dyn Error>>>()?);
    }
    println!("\n{matrix}");
    println!("in {} s, the build included", began.elapsed().as_secs());
    match matrix.survivors().join(", ") {
        survivors if survivors.is_empty() => Ok(()),
        survivors => Err(format!("not noticed: {survivors}").into()),
    }
}
