//! The SQLite store keeps the contract.

use crate::support::Database;

/// Every verb is written to the disk, and decided by the machine itself: there is no translation to try with more.
const CASES: u32 = 500;

idem_testkit::conformance!(Database::subject);
idem_testkit::state_machine!(the_store_follows_the_model, Database::subject, CASES);
