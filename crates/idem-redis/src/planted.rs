//! The [planted bugs](idem_core::planted) of the scripts, and of how they are called.

use idem_core::planted;

/// A script, with the bug that is on.
pub(crate) fn with_bugs(source: &'static str) -> &'static str {
    planted!(source;
        "no-owner-check-in-settle":
            "if record.owner ~= ARGV[2] then" =>
            "if false then",
        "no-owner-check-in-renew":
            "or record.owner ~= ARGV[2] or record.state ~= IN_PROGRESS then\n  return 0\nend\ntouch(record)\nrecord.till" =>
            "or record.state ~= IN_PROGRESS then\n  return 0\nend\ntouch(record)\nrecord.till",
        "no-owner-check-in-checkpoint":
            "or record.owner ~= ARGV[2] or record.state ~= IN_PROGRESS then\n  return 0\nend\ntouch(record)\nsave" =>
            "or record.state ~= IN_PROGRESS then\n  return 0\nend\ntouch(record)\nsave",
        "renewal-revives-a-settled-record":
            "or record.state ~= IN_PROGRESS then\n  return 0\nend\ntouch(record)\nrecord.till" =>
            "then\n  return 0\nend\nrecord.state, record.how, record.crash = 1, 1, 1\nrecord.till",
        "lease-equal-to-retention":
            "local lease = NOW + tonumber(ARGV[5])" =>
            "local lease = NOW + retention",
        "key-ends-with-its-lease":
            "  return answer\nend\n\n-- The record ends without" =>
            "  expire(lease)\n  return answer\nend\n\n-- The record ends without",
        "attempt-does-not-grow":
            "record.attempt < LAST_ATTEMPT and record.attempt + 1" =>
            "record.attempt",
        "fingerprint-not-compared":
            "local same_request = record.algo == algo and record.digest == digest" =>
            "local same_request = true",
        "unreadable-record-counts-as-none":
            "error({ err = 'IDEMFORMAT ' .. format })" =>
            "return nil, true",
        "next-format":
            "format ~= FORMAT then" =>
            "format ~= 1 and format ~= 2 then",
        "next-format":
            "local FORMAT = 1" =>
            "local FORMAT = 2",
    )
}

/// Whether this script was sent to a server before: whoever takes a script for known then never sends it again.
#[cfg(idem_planted_bugs)]
pub(crate) fn was_sent(call: &crate::script::Call<'_>) -> bool {
    use std::collections::HashSet;
    use std::sync::{Mutex, PoisonError};

    static SENT: Mutex<Option<HashSet<String>>> = Mutex::new(None);
    let mut sent = SENT.lock().unwrap_or_else(PoisonError::into_inner);
    !sent.get_or_insert_default().insert(call.hash().to_owned())
}
