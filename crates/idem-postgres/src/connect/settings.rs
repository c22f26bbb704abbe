//! The settings of the store's own sessions and transactions.

use std::time::Duration;

use crate::sql::{SAFE_PATH, milliseconds, set_for_transaction};

/// Settings for the store's statements, whatever the session's are.
fn store_settings(statement_timeout: Duration, lock_timeout: Duration) -> [(&'static str, String); 5] {
    [
        ("search_path", SAFE_PATH.to_owned()),
        ("statement_timeout", milliseconds(statement_timeout).to_string()),
        ("lock_timeout", milliseconds(lock_timeout).to_string()),
        ("bytea_output", "hex".to_owned()),
        ("array_nulls", "on".to_owned()),
    ]
}

/// Sets them for the transaction.
pub(crate) fn local_settings(statement_timeout: Duration, lock_timeout: Duration) -> String {
    format!("SELECT WHERE {} IS NULL;", set_for_transaction(store_settings(statement_timeout, lock_timeout)))
}

/// Make the planner keep one plan for each statement, which finds records by their index. A plan that is made while the table
/// is nearly empty would read the whole table later. The functions of the schema set the same.
const PLANNER_SETTINGS: &str = "SET plan_cache_mode=force_generic_plan;SET enable_indexscan=on;SET enable_nestloop=on;\
     SET enable_seqscan=off;SET enable_bitmapscan=off;SET enable_hashjoin=off;SET enable_mergejoin=off;";

/// Sets them for a session of the store, whose transactions then begin as [`BEGIN`](crate::sql::BEGIN) says.
pub(crate) fn session_settings(statement_timeout: Duration, lock_timeout: Duration) -> String {
    let settings = store_settings(statement_timeout, lock_timeout).map(|(name, value)| format!("SET {name}={value}"));
    let transactions = "SET default_transaction_isolation='read committed';SET default_transaction_deferrable=off";
    format!("{};{transactions};{PLANNER_SETTINGS}", settings.join(";"))
}
