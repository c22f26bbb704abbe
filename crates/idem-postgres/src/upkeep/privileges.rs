//! Finds what the store's role may not do, and the schemas in which other roles may create objects.

use std::fmt;

use idem_core::{MissingPrivilege, StoreError};
use sqlx::Row as _;

use crate::error::store_error;
use crate::schema::migrate::VERBS;
use crate::sql::Sql;
use crate::upkeep::pool::Upkeep;

/// A schema that the store's role uses, its own or one on its search path, and in which other roles may create objects.
///
/// A function, operator, type or table in such a schema can take the place of a built-in one in statements that do not
/// qualify its name. The store's statements do; those of handlers and of other code of the application may not.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenSchema {
    /// Its name.
    pub name: String,
    /// The roles that hold the privilege `CREATE` on it: not its owner, not superusers, not the store's role. `PUBLIC` stands
    /// for all roles.
    pub roles: Vec<String>,
}

impl fmt::Display for OpenSchema {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quoted = |name: &str| format!("\"{}\"", name.replace('"', "\"\""));
        let roles = self.roles.iter().map(|role| if role == PUBLIC { role.clone() } else { quoted(role) });
        write!(
            formatter,
            "other roles may create objects in the schema {0}, which can take the place of built-in ones in the application's \
             SQL; REVOKE CREATE ON SCHEMA {0} FROM {1}",
            quoted(&self.name),
            roles.collect::<Vec<_>>().join(", "),
        )
    }
}

impl Upkeep {
    /// Checks the schemas on the initial search path of handlers' sessions, and the store's own.
    pub(crate) async fn open_schemas(&self) -> Result<Vec<OpenSchema>, StoreError> {
        let what = "ask which roles may create objects";
        let mut sql = Sql::default();
        sql.push(OPEN_SCHEMAS).text(self.records.schema.name()).push(ORDER);
        let rows = self.run(what, sql, self.client_timeout).await?;
        let mut open: Vec<OpenSchema> = Vec::new();
        for row in rows {
            let failed = |error| store_error(what, error);
            let (name, role): (String, String) = (row.try_get(0).map_err(failed)?, row.try_get(1).map_err(failed)?);
            match open.last_mut() {
                Some(last) if last.name == name => last.roles.push(role),
                _ => open.push(OpenSchema { name, roles: vec![role] }),
            }
        }
        Ok(open)
    }
}

/// The functions that the store's sessions call: not that for other drivers, and not those for partitions, which are for the owner of the
/// tables.
fn functions() -> impl Iterator<Item = &'static str> {
    let texts = VERBS.split("CREATE FUNCTION \"idem\".").skip(1);
    texts.filter_map(|text| text.split('(').next()).filter(|name| *name != "idem_settle_run_v1")
}

/// The tables of the store, and what it does with them. Of notes it changes two columns, and a privilege on these is enough.
const TABLES: [(&str, &[&str]); 4] = [
    ("idem_records", &["SELECT", "INSERT", "UPDATE", "DELETE"]),
    ("idem_identity", &["SELECT"]),
    ("idem_migrations", &["SELECT"]),
    ("idem_repairs", &["SELECT", "INSERT"]),
];

impl Upkeep {
    /// The privileges on tables and functions of the store that the session's role lacks.
    pub(crate) async fn missing_privileges(&self) -> Result<Vec<MissingPrivilege>, StoreError> {
        let what = "ask for the privileges of the role";
        let schema = &self.records.schema;
        let mut sql = Sql::default();
        sql.push("SELECT 'EXECUTE', proname::pg_catalog.text FROM pg_catalog.pg_proc ");
        sql.push("JOIN pg_catalog.pg_namespace AS place ON place.oid OPERATOR(pg_catalog.=) pronamespace ");
        sql.push("WHERE NOT pg_catalog.has_function_privilege(pg_proc.oid, 'EXECUTE') ");
        sql.push("AND place.nspname OPERATOR(pg_catalog.=) ").text(schema.name());
        // Functions of the application in this schema may begin with `idem_` too.
        let names: Vec<_> = functions().map(|name| format!("'{name}'")).collect();
        sql.push(" AND proname::pg_catalog.text OPERATOR(pg_catalog.=) ANY (ARRAY[").push(&names.join(",")).push("])");
        for (table, privileges) in TABLES {
            let place = format!("{}.{table}", schema.quoted());
            for privilege in privileges {
                sql.push(" UNION ALL SELECT '").push(privilege).push("', '").push(table).push("' ");
                sql.push("WHERE NOT pg_catalog.has_table_privilege(").text(&place);
                sql.push(", '").push(privilege).push("')");
            }
        }
        let repairs = format!("{}.idem_repairs", schema.quoted());
        sql.push(" UNION ALL SELECT 'UPDATE', 'idem_repairs' WHERE NOT (");
        sql.push("pg_catalog.has_column_privilege(").text(&repairs).push(", 'outcome', 'UPDATE') AND ");
        sql.push("pg_catalog.has_column_privilege(").text(&repairs).push(", 'reason', 'UPDATE'))");
        let rows = self.run(what, sql, self.client_timeout).await?;
        let failed = |error| store_error(what, error);
        let missing = rows.iter().map(|row| {
            let (privilege, object): (String, String) =
                (row.try_get(0).map_err(failed)?, row.try_get(1).map_err(failed)?);
            Ok(MissingPrivilege::new(privilege, object))
        });
        missing.collect()
    }
}

/// The name of all roles together; no role can have it.
const PUBLIC: &str = "PUBLIC";

/// Send it outside of a transaction that sets another search path: the session's path counts. `pg_database_owner` has no
/// member but the database's owner.
const OPEN_SCHEMAS: &str = "SELECT nspname::pg_catalog.text, coalesce(role.rolname::pg_catalog.text, 'PUBLIC') \
     FROM pg_catalog.pg_namespace CROSS JOIN pg_catalog.aclexplode(coalesce(nspacl, \
         pg_catalog.acldefault('n'::pg_catalog.\"char\", nspowner))) AS granted \
     LEFT JOIN pg_catalog.pg_roles AS role ON role.oid OPERATOR(pg_catalog.=) granted.grantee \
     WHERE granted.privilege_type OPERATOR(pg_catalog.=) 'CREATE' \
         AND granted.grantee OPERATOR(pg_catalog.<>) nspowner AND role.rolsuper IS NOT TRUE \
         AND (role.rolname OPERATOR(pg_catalog.=) current_user) IS NOT TRUE \
         AND (role.rolname OPERATOR(pg_catalog.=) 'pg_database_owner') IS NOT TRUE \
         AND (nspname OPERATOR(pg_catalog.=) ANY (pg_catalog.current_schemas(FALSE)) OR nspname OPERATOR(pg_catalog.=) ";

const ORDER: &str = ") ORDER BY 1, 2";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_function_is_asked_for_but_that_for_other_drivers() {
        let functions: Vec<_> = functions().collect();
        assert_eq!(functions.len() + 1, VERBS.matches("FUNCTION \"idem\".").count(), "{functions:?}");
        assert!(functions.contains(&"idem_acquire_v1") && !functions.contains(&"idem_settle_run_v1"));
    }
}
