//! Bugs in the SQL of idem-postgres and in what it trusts.

use super::{Patch, patch};

pub(super) const PATCHES: &[Patch] = &[
    patch(
        "function-in-its-callers-path",
        &["postgres-hostile-role", "postgres-roles"],
        "crates/idem-postgres/src/schema/migrate.rs",
        r#"in_safe_path(&format!("{noted}{sql}"))"#,
        r#"in_safe_path(&if PLANTED {
            format!("{noted}{}", sql.replace("SET search_path = pg_catalog, pg_temp", ""))
        } else {
            format!("{noted}{sql}")
        })"#,
    ),
    patch(
        "statement-in-its-sessions-path",
        &["postgres-hostile-role"],
        "crates/idem-postgres/src/sql.rs",
        r#"format!("pg_catalog.set_config('{name}','{value}',TRUE)")"#,
        r#"{
            let call = format!("pg_catalog.set_config('{name}','{value}',TRUE)");
            if PLANTED { call.replace("pg_catalog.", "") } else { call }
        }"#,
    ),
    patch(
        "migration-in-its-tools-path",
        &["postgres-hostile-role", "postgres-roles"],
        "crates/idem-postgres/src/sql.rs",
        "pub(crate) fn in_safe_path(statements: &str) -> String {\n",
        "pub(crate) fn in_safe_path(statements: &str) -> String {
    if PLANTED {
        return statements.to_owned();
    }
",
    ),
    patch(
        "lock-from-public-names",
        &["postgres-roles"],
        "crates/idem-postgres/src/schema/name.rs",
        ".chain_update(self.identity)",
        ".chain_update(if PLANTED { [0; 16] } else { self.identity })",
    ),
    patch(
        "start-waits-for-ever",
        &["postgres-roles"],
        "crates/idem-postgres/src/schema/migrate.rs",
        "sql.number(milliseconds(lock_timeout));",
        "sql.number(if PLANTED { 0 } else { milliseconds(lock_timeout) });",
    ),
    patch(
        "open-schema-not-reported",
        &["postgres-roles"],
        "crates/idem-postgres/src/upkeep/health.rs",
        "let open_schemas = self.open_schemas().await?;",
        "let open_schemas = if PLANTED { Vec::new() } else { self.open_schemas().await? };",
    ),
    patch(
        "settlement-in-a-temporary-table",
        &["sqlite-shadows"],
        "crates/idem-sqlite/src/row.rs",
        "    sql.push_str(after);\n",
        "    if PLANTED {
        sql = sql.replace(\"main.\", \"\");
    }
    sql.push_str(after);
",
    ),
    patch(
        "temporary-objects-for-the-next-handler",
        &["sqlite-shadows"],
        "crates/idem-sqlite/src/handler_connection.rs",
        "Ok(state == self.state && !self.connection.is_in_transaction())",
        "Ok((PLANTED || state == self.state) && !self.connection.is_in_transaction())",
    ),
];
