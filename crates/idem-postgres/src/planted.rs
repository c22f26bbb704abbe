//! The [planted bugs](idem_core::planted) of the SQL.

use idem_core::planted;

/// A migration, with the bug that is on.
pub(crate) fn with_bugs(sql: &'static str) -> &'static str {
    planted!(sql;
        "lease-equal-to-retention":
            "wanted.takeover, \"idem\".idem_later_v1(at, wanted.lease), at, at," =>
            "wanted.takeover, \"idem\".idem_later_v1(at, wanted.retention), at, at,",
        "purge-takes-what-is-live":
            "WHERE known.purge_after <= at AND known.expires_at <= at" =>
            "WHERE known.purge_after <= at",
        "guard-without-its-lock":
            "AND \"idem\".idem_now_v1(skew) < known.expires_at\n    FOR SHARE;" =>
            "AND \"idem\".idem_now_v1(skew) < known.expires_at;",
        "commit-over-somebody-elses-record":
            "WHERE known.id = idem_put_v1.id AND known.xmin::TEXT::BIGINT = version;" =>
            "WHERE known.id = idem_put_v1.id;",
    )
}
