//! No case is forgotten in the list that every store runs.

use idem_testkit::cases::ALL;

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

#[test]
fn every_public_case_is_in_the_list() {
    let prefix = "pub async fn ";
    let names = SOURCES.iter().flat_map(|source| source.lines()).filter_map(|line| line.strip_prefix(prefix));
    let mut written: Vec<&str> = names.filter_map(|rest| rest.split('(').next()).collect();
    let mut listed: Vec<&str> = ALL.iter().map(|(name, _)| *name).collect();
    written.sort_unstable();
    listed.sort_unstable();
    assert_eq!(written, listed);
}
