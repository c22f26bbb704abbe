//! The bugs, and the suites that must notice each of them.

use super::patches::patches;

/// One bug.
pub(super) struct Bug {
    /// The value of the environment variable that turns it on.
    pub(super) name: &'static str,
    /// The suites that must notice it, by name.
    pub(super) suites: &'static [&'static str],
}

/// All bugs.
pub(super) fn bugs() -> impl Iterator<Item = &'static Bug> {
    patches().map(|patch| &patch.bug)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::planted::suites::SUITES;

    #[test]
    fn every_suite_is_one_and_notices_something() {
        let named: BTreeSet<&str> = bugs().flat_map(|bug| bug.suites.iter().copied()).collect();
        assert_eq!(named, SUITES.iter().map(|suite| suite.name).collect());
        assert!(bugs().all(|bug| !bug.suites.is_empty()));
        let names: BTreeSet<&str> = bugs().map(|bug| bug.name).collect();
        assert_eq!(names.len(), bugs().count(), "two bugs have one name");
    }
}
