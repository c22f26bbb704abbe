//! No case is missing in the list that every store runs.

use idem_testkit::{cases, transactional};

use std::collections::BTreeSet;

const SOURCES: &[&str] = &[
    include_str!("../../src/cases/concurrency.rs"),
    include_str!("../../src/cases/data.rs"),
    include_str!("../../src/cases/isolation.rs"),
    include_str!("../../src/cases/mismatches.rs"),
    include_str!("../../src/cases/owners.rs"),
    include_str!("../../src/cases/purging.rs"),
    include_str!("../../src/cases/rows.rs"),
    include_str!("../../src/cases/settling.rs"),
];

fn written(sources: &[&'static str]) -> BTreeSet<&'static str> {
    let prefix = "pub async fn ";
    let names = sources.iter().flat_map(|source| source.lines()).filter_map(|line| line.strip_prefix(prefix));
    names.filter_map(|rest| rest.split('(').next()).collect()
}

#[test]
fn every_public_case_is_in_its_list() {
    assert_eq!(written(SOURCES), cases::ALL.iter().map(|(name, _)| *name).collect());
    let transactional = include_str!("../../src/transactional.rs");
    assert_eq!(written(&[transactional]), transactional::ALL.iter().map(|(name, _)| *name).collect());
}
