//! Bugs in what operators use, and in what protects stored answers.

use super::{Patch, patch};

pub(super) const PATCHES: &[Patch] = &[
    patch(
        "console-takes-forged-forms",
        &["console"],
        "crates/idem-console/src/pages/resolve.rs",
        "secret.is_form(&asked.token, actor, &id)",
        "PLANTED || secret.is_form(&asked.token, actor, &id)",
    ),
    patch(
        "encryption-binds-no-record",
        &["encryption"],
        "crates/idem-encryption/src/envelope.rs",
        "data.extend_from_slice(self.id.as_bytes());",
        "data.extend_from_slice(if PLANTED { &[0; 32] } else { self.id.as_bytes() });",
    ),
    patch(
        "audit-drops-without-counting",
        &["audit"],
        "crates/idem-audit/src/observer.rs",
        "self.counts.dropped.fetch_add(1, Ordering::Relaxed);\n            return;",
        "self.counts.dropped.fetch_add(u64::from(!PLANTED), Ordering::Relaxed);\n            return;",
    ),
    patch(
        "scan-skips-a-place-of-two-partitions",
        &["postgres-partitions"],
        "migrations/postgres/0002_verbs.sql",
        "AS is_selected\n        FROM \"idem\".idem_records AS known\n        WHERE known.ctid >= begin_at AND known.ctid < end_at \
         AND (known.ctid > begin_at OR known.tableoid > relation)",
        "AS is_selected\n        FROM \"idem\".idem_records AS known\n        WHERE known.ctid >= begin_at AND known.ctid < end_at \
         AND (known.ctid > begin_at)",
    ),
    patch(
        "hybrid-refused-erasure-keeps-its-tombstone",
        &["hybrid-erasing"],
        "crates/idem-hybrid/src/shared.rs",
        "Ok(_) | Err(_) => self.cache.take_back(id).await,",
        "Ok(_) | Err(_) if PLANTED => {}\n            Ok(_) | Err(_) => self.cache.take_back(id).await,",
    ),
    patch(
        "sqlite-erasure-overwrites-nothing",
        &["sqlite-erasing"],
        "crates/idem-sqlite/src/writer.rs",
        "sqlx::raw_sql(\"PRAGMA main.secure_delete = ON\")",
        "sqlx::raw_sql(if PLANTED { \"SELECT 1\" } else { \"PRAGMA main.secure_delete = ON\" })",
    ),
];
