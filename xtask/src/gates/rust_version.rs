//! Checks that no published crate uses anything newer than its `rust-version`.
//!
//! Older toolchains are not run. Clippy knows when each item of the standard library became stable, and manifests say what
//! dependencies need. Neither checks the language's syntax.

use std::collections::{HashMap, HashSet};
use std::error::Error;

use serde_json::Value;

use crate::command::{cargo, output_of, run};
use crate::gates::published::published;

pub(crate) fn check() -> Result<(), Box<dyn Error>> {
    dependencies_are_as_old()?;
    let packages = published()?;
    let mut clippy = cargo(&["clippy", "--lib", "--all-features"]);
    clippy.args(packages.iter().flat_map(|package| ["-p", &package.name]));
    run(clippy.args(["--", "-A", "clippy::all", "-D", "clippy::incompatible_msrv"]))
}

/// Checks that no locked dependency needs a newer toolchain than the crate that needs it.
fn dependencies_are_as_old() -> Result<(), Box<dyn Error>> {
    // Packages for other platforms are left out.
    let mut metadata = cargo(&["metadata", "--format-version", "1", "--all-features", "--locked"]);
    metadata.args(["--filter-platform", "x86_64-unknown-linux-gnu"]);
    let graph = Graph::new(&serde_json::from_str(&output_of(&mut metadata)?)?)?;
    let faults: Vec<String> = published()?.iter().filter_map(|package| graph.fault_of(&package.name)).collect();
    if faults.is_empty() { Ok(()) } else { Err(faults.join("\n").into()) }
}

/// The dependency graph of packages, without their dev-dependencies.
#[derive(Debug)]
struct Graph {
    packages: HashMap<String, Needed>,
    dependencies: HashMap<String, Vec<String>>,
}

#[derive(Debug)]
struct Needed {
    name: String,
    rust_version: Option<Version>,
}

type Version = (u32, u32);

impl Graph {
    fn new(metadata: &Value) -> Result<Self, Box<dyn Error>> {
        let packages = list(&metadata["packages"])?.iter().map(|package| {
            let rust_version = package["rust_version"].as_str().map(version).transpose()?;
            Ok((text(&package["id"])?, Needed { name: text(&package["name"])?, rust_version }))
        });
        let nodes = list(&metadata["resolve"]["nodes"])?.iter();
        let dependencies = nodes.map(|node| Ok((text(&node["id"])?, dependencies_of(node)?)));
        Ok(Self {
            packages: packages.collect::<Result<_, Box<dyn Error>>>()?,
            dependencies: dependencies.collect::<Result<_, Box<dyn Error>>>()?,
        })
    }

    /// The fault of this package's `rust-version`, if there is one.
    fn fault_of(&self, name: &str) -> Option<String> {
        let (id, package) = self.packages.iter().find(|(_, package)| package.name == name)?;
        let Some(own) = package.rust_version else { return Some(format!("{name} has no rust-version")) };
        let needed = self.closure(id).into_iter().filter_map(|id| self.packages.get(id));
        let newest =
            needed.filter(|needed| needed.rust_version > Some(own)).max_by_key(|needed| needed.rust_version)?;
        let (major, minor) = newest.rust_version?;
        Some(format!("{name} has rust-version {}.{}, but {} needs {major}.{minor}", own.0, own.1, newest.name))
    }

    fn closure<'a>(&'a self, id: &'a str) -> HashSet<&'a str> {
        let mut seen = HashSet::new();
        let mut open = vec![id];
        while let Some(id) = open.pop() {
            if seen.insert(id) {
                open.extend(self.dependencies.get(id).into_iter().flatten().map(String::as_str));
            }
        }
        seen
    }
}

fn dependencies_of(node: &Value) -> Result<Vec<String>, Box<dyn Error>> {
    let is_built = |dependency: &&Value| {
        dependency["dep_kinds"].as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind["kind"] != "dev"))
    };
    list(&node["deps"])?.iter().filter(is_built).map(|dependency| text(&dependency["pkg"])).collect()
}

/// Parses a version. `1.89` and `1.89.0` are the same.
fn version(text: &str) -> Result<Version, Box<dyn Error>> {
    let mut numbers = text.split('.');
    let mut next = || numbers.next().unwrap_or("0").parse();
    Ok((next()?, next()?))
}

fn list(value: &Value) -> Result<&Vec<Value>, Box<dyn Error>> {
    value.as_array().ok_or_else(|| "cargo metadata lacks a list".into())
}

fn text(value: &Value) -> Result<String, Box<dyn Error>> {
    value.as_str().map(str::to_owned).ok_or_else(|| "cargo metadata lacks a text".into())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn graph(kind: &Value) -> Graph {
        let dependency = json!({ "pkg": "b", "dep_kinds": [{ "kind": kind }] });
        let metadata = json!({
            "packages": [
                { "id": "a", "name": "crate", "rust_version": "1.89" },
                { "id": "b", "name": "between", "rust_version": null },
                { "id": "c", "name": "driver", "rust_version": "1.94.0" },
            ],
            "resolve": { "nodes": [
                { "id": "a", "deps": [dependency] },
                { "id": "b", "deps": [{ "pkg": "c", "dep_kinds": [{ "kind": "build" }] }] },
                { "id": "c", "deps": [] },
            ] },
        });
        Graph::new(&metadata).unwrap()
    }

    #[test]
    fn a_dependency_of_a_dependency_must_not_be_newer() {
        let fault = graph(&Value::Null).fault_of("crate");
        assert_eq!(fault.as_deref(), Some("crate has rust-version 1.89, but driver needs 1.94"));
    }

    #[test]
    fn what_only_tests_need_may_be_newer() {
        assert_eq!(graph(&json!("dev")).fault_of("crate"), None);
    }

    #[test]
    fn a_patch_version_is_ignored() {
        assert_eq!(version("1.89.0").unwrap(), version("1.89").unwrap());
        assert!(version("1.89").unwrap() > version("1.9").unwrap());
    }
}
