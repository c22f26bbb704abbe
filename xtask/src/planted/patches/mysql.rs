//! Bugs in the store on MariaDB.

use super::{Patch, patch};

pub(super) const PATCHES: &[Patch] = &[
    patch(
        "mysql-claims-by-found-rows",
        &["mysql-concurrency"],
        "crates/idem-mysql/src/row.rs",
        "sql.push(\"INSERT INTO \").push(table).push(\" (\")",
        "sql.push(if PLANTED { \"INSERT IGNORE INTO \" } else { \"INSERT INTO \" }).push(table).push(\" (\")",
    ),
    patch(
        "mysql-batch-takes-a-locked-row-for-absent",
        &["mysql-concurrency", "mysql-batches"],
        "crates/idem-mysql/src/batch.rs",
        "(Verb::Acquire(_), ..) | (_, None, _) => self.alone(job, alone),",
        "(_, None, None) if PLANTED => job.answer(Batched::Done(outcome)),
                (Verb::Acquire(_), ..) | (_, None, _) => self.alone(job, alone),",
    ),
    patch(
        "mysql-batch-waits-for-a-locked-row",
        &["mysql-batches"],
        "crates/idem-mysql/src/batch.rs",
        "tables.read_all(&mut sql, ids(false), UNLESS_LOCKED);",
        "tables.read_all(&mut sql, ids(false), if PLANTED { \" FOR UPDATE;\" } else { UNLESS_LOCKED });",
    ),
    patch(
        "mysql-batch-keeps-old-leases",
        &["mysql-batches"],
        "crates/idem-mysql/src/row.rs",
        "STAYING.contains(&column) ||",
        "STAYING.contains(&column) || (PLANTED && column == \"lease_until\") ||",
    ),
    patch(
        "mysql-repeats-wait-for-commits",
        &["mysql-batches"],
        "crates/idem-mysql/src/store.rs",
        "timeout(SLOW_BATCH, ticket.answer())",
        "timeout(if PLANTED { VERB_TIMEOUT } else { SLOW_BATCH }, ticket.answer())",
    ),
    patch(
        "mysql-takes-over-without-a-lock",
        &["mysql-concurrency"],
        "crates/idem-mysql/src/records.rs",
        "self.tables.read(&mut sql, id, FOR_UPDATE);\n        let rows",
        "self.tables.read(&mut sql, id, if PLANTED { \"\" } else { FOR_UPDATE });\n        let rows",
    ),
    patch(
        "mysql-erasure-keeps-the-principal",
        &["mysql"],
        "crates/idem-mysql/src/records.rs",
        "row::erase_principal(&mut sql, &tables.records, &tables.repairs, request);",
        "if !PLANTED {\n                row::erase_principal(&mut sql, &tables.records, &tables.repairs, request);\n            }",
    ),
    patch(
        "mysql-purges-living-records",
        &["mysql"],
        "crates/idem-mysql/src/upkeep.rs",
        ".push(\" WHERE expires_at<=\")",
        ".push(if PLANTED { \" WHERE 0<=\" } else { \" WHERE expires_at<=\" })",
    ),
    patch(
        "mysql-settles-by-the-handlers-clock",
        &["mysql-transactions"],
        "crates/idem-mysql/src/transaction.rs",
        "Sql::new(format!(\"{EXPECT_OPEN}{REAL_TIME}\"))",
        "Sql::new(format!(\"{EXPECT_OPEN}{}\", if PLANTED { \"\" } else { REAL_TIME }))",
    ),
    patch(
        "mysql-lets-handlers-write-after-their-transaction",
        &["mysql-transactions"],
        "crates/idem-mysql/src/handler_session.rs",
        "Some(BEGIN.into_sql_str())",
        "Some((if PLANTED { \"ROLLBACK;START TRANSACTION;SAVEPOINT idem_handler\" } else { BEGIN }).into_sql_str())",
    ),
    patch(
        "mysql-dropped-transaction-stays-open",
        &["mysql-transactions"],
        "crates/idem-mysql/src/handler_session.rs",
        "if !self.is_clean {",
        "if !self.is_clean && !PLANTED {",
    ),
    patch(
        "mysql-lost-commit-counts-as-failed",
        &["mysql-cuts"],
        "crates/idem-mysql/src/transaction.rs",
        "Err(error) if may_be_done(&error) =>",
        "Err(error) if !PLANTED && may_be_done(&error) =>",
    ),
    patch(
        "mysql-run-is-settled-in-two-transactions",
        &["mysql-within"],
        "crates/idem-mysql/src/within.rs",
        "return Ok(OwnerOutcome::LeaseLost);",
        "return Ok(if PLANTED { OwnerOutcome::Applied } else { OwnerOutcome::LeaseLost });",
    ),
];
