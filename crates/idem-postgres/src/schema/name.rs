//! The schema's name and identity, and the advisory locks that are derived from them.

use std::fmt;
use std::ops::Deref;

use idem_core::{RecordId, StoreError, StoreErrorKind};
use sha2::{Digest, Sha256};

use crate::sql::Sql;

/// The longest identifier that Postgres keeps whole, in bytes.
const LONGEST_NAME: usize = 63;

/// A schema name that is safe to put into SQL.
#[derive(Debug, Clone)]
pub(crate) struct Schema {
    name: String,
    quoted: String,
}

impl Schema {
    pub(crate) fn new(name: &str) -> Result<Self, StoreError> {
        // Function bodies and `format` strings in the migrations would need another quoting for these characters.
        if name.is_empty() || name.len() > LONGEST_NAME || name.contains(['\0', '$', '\'', '%', '\\']) {
            let message = format!("{name:?} cannot be the schema: it takes 1 to {LONGEST_NAME} bytes without $ ' % \\");
            return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
        }
        let quoted = format!("\"{}\"", name.replace('"', "\"\""));
        Ok(Self { name: name.to_owned(), quoted })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The name as a quoted SQL identifier.
    pub(crate) fn quoted(&self) -> &str {
        &self.quoted
    }

    /// Rewrites `sql` for this schema. In the files in `migrations/`, `"idem"` in double quotes always means the schema.
    pub(crate) fn localise(&self, sql: &str) -> String {
        sql.replace("\"idem\"", &self.quoted)
    }

    /// Asks the catalog whether a table exists. Resolving the name could use a cache, which may lack a table that another
    /// replica created a moment ago.
    pub(crate) fn look_for_table(&self, table: &str) -> Sql {
        let mut sql = Sql::default();
        sql.push("SELECT EXISTS (SELECT FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ");
        sql.push("ON pg_namespace.oid OPERATOR(pg_catalog.=) relnamespace WHERE nspname OPERATOR(pg_catalog.=) ");
        sql.text(&self.name).push(" AND relname OPERATOR(pg_catalog.=) ").text(table).push(")");
        sql
    }

    /// This schema, with the identity that was read in it, and the name of its database.
    pub(crate) fn identified(self, identity: [u8; 16], database: String) -> IdentifiedSchema {
        IdentifiedSchema { schema: self, identity, database }
    }
}

/// A schema with its random identity, which distinguishes its records from all others.
#[derive(Clone)]
pub(crate) struct IdentifiedSchema {
    schema: Schema,
    identity: [u8; 16],
    database: String,
}

impl IdentifiedSchema {
    /// Where the records are: the identity, which a copied database shares, and the database.
    pub(crate) fn place(&self) -> Vec<u8> {
        [&self.identity, self.database.as_bytes()].concat()
    }

    /// An expression for [`place`](Self::place) on another connection.
    pub(crate) const PLACE: &str = "(SELECT pg_catalog.uuid_send(own.identity) OPERATOR(pg_catalog.||) \
        pg_catalog.convert_to(pg_catalog.current_database()::pg_catalog.text, 'UTF8') FROM \"idem\".idem_identity AS own)";

    /// Distinguishes these records from those of every other store, also in a copy of the database.
    pub(crate) fn identity(&self) -> [u8; 16] {
        let digest = Sha256::digest(self.place());
        std::array::from_fn(|place| digest[place])
    }

    /// The key of the advisory lock that stands for a record: 64 bits of a digest. If two operations share a key by
    /// chance, one only turns the other away while it runs.
    ///
    /// Every role that may connect to the database can take any advisory lock. The random identity keeps a role that cannot
    /// read the schema from computing a key, even if the role knows the record and sees other locks.
    pub(crate) fn lock(&self, id: &RecordId) -> i64 {
        let digest =
            Sha256::new().chain_update(self.identity).chain_update(id.as_bytes()).chain_update(&self.schema.name);
        digest.finalize().iter().take(8).fold(0, |number, byte| number << 8 | i64::from(*byte))
    }
}

/// Without the identity.
impl fmt::Debug for IdentifiedSchema {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.schema.fmt(formatter)
    }
}

impl Deref for IdentifiedSchema {
    type Target = Schema;

    fn deref(&self) -> &Schema {
        &self.schema
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_and_impossible_ones_refused() {
        assert_eq!(Schema::new("a\"; DROP").unwrap().quoted(), "\"a\"\"; DROP\"");
        assert_eq!(Schema::new("x").unwrap().localise("SELECT \"idem\".idem_lookup_v1"), "SELECT \"x\".idem_lookup_v1");
        for name in ["", "a\0b", "a$$b", "o'brien", "100%", "a\\b", &"x".repeat(64)] {
            assert_eq!(Schema::new(name).unwrap_err().kind(), StoreErrorKind::Misconfigured);
        }
    }

    #[test]
    fn locks_differ_by_record_by_schema_and_by_identity_and_never_change() {
        let schema = |name, identity| Schema::new(name).unwrap().identified([identity; 16], String::new());
        let (one, id) = (schema("idem", 1), RecordId::from_bytes([7; 32]));
        for other in [schema("other", 1), schema("idem", 2)] {
            assert_ne!(one.lock(&id), other.lock(&id));
        }
        assert_ne!(one.lock(&id), one.lock(&RecordId::from_bytes([8; 32])));
        // Processes of different versions must agree on it.
        assert_eq!(one.lock(&id), -2_873_957_985_813_439_526);
    }

    #[test]
    fn the_lock_of_a_known_record_says_nothing_about_that_of_another() {
        let lock = |identity, id| {
            let schema = Schema::new("idem").unwrap().identified([identity; 16], String::new());
            schema.lock(&RecordId::from_bytes([id; 32]))
        };
        assert_ne!(lock(1, 7) ^ lock(1, 8), lock(2, 7) ^ lock(2, 8));
    }
}
