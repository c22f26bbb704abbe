//! The SQLite store keeps the contract.

mod support;

use support::Database;

idem_testkit::conformance!(Database::subject);
idem_testkit::state_machine!(Database::subject);
