//! The schema's name, and what follows from it.

use idem_core::{RecordId, StoreError, StoreErrorKind};
use sha2::{Digest, Sha256};

/// The longest identifier that Postgres keeps whole, in bytes.
const LONGEST_NAME: usize = 63;

/// A schema name that is safe to put into SQL.
#[derive(Debug, Clone)]
pub(crate) struct Schema {
    name: String,
    quoted: String,
    /// Makes the same record id in two schemas of a database two different locks.
    lock_space: u64,
}

impl Schema {
    pub(crate) fn new(name: &str) -> Result<Self, StoreError> {
        // These would have to be quoted otherwise inside a function's body, or in a pattern.
        if name.is_empty() || name.len() > LONGEST_NAME || name.contains(['\0', '$', '\'', '%', '\\']) {
            let message = format!("{name:?} cannot be the schema: it takes 1 to {LONGEST_NAME} bytes without $ ' % \\");
            return Err(StoreError::new(StoreErrorKind::Misconfigured, message));
        }
        let quoted = format!("\"{}\"", name.replace('"', "\"\""));
        Ok(Self { name: name.to_owned(), quoted, lock_space: first_64_bits(&Sha256::digest(name)) })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The name as SQL writes it.
    pub(crate) fn quoted(&self) -> &str {
        &self.quoted
    }

    /// `sql` for this schema. The files in `migrations/` are written for the schema `"idem"`, and every mention of it is
    /// quoted, which nothing else there is.
    pub(crate) fn localise(&self, sql: &str) -> String {
        sql.replace("\"idem\"", &self.quoted)
    }

    /// The advisory lock that stands for a record: 64 bits of its id, which is a digest. Two operations that met in it
    /// by chance would only turn each other away while they run.
    pub(crate) fn lock(&self, id: &RecordId) -> i64 {
        i64::from_be_bytes((first_64_bits(id.as_bytes()) ^ self.lock_space).to_be_bytes())
    }

    /// A lock for something that only one process at a time does to this schema.
    pub(crate) fn task_lock(&self, task: &str) -> i64 {
        i64::from_be_bytes((first_64_bits(&Sha256::digest(task)) ^ self.lock_space).to_be_bytes())
    }
}

fn first_64_bits(bytes: &[u8]) -> u64 {
    bytes.iter().take(8).fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_and_impossible_ones_refused() {
        assert_eq!(Schema::new("a\"; DROP").unwrap().quoted(), "\"a\"\"; DROP\"");
        assert_eq!(Schema::new("x").unwrap().localise("SELECT \"idem\".idem_look_v1"), "SELECT \"x\".idem_look_v1");
        for name in ["", "a\0b", "a$$b", "o'brien", "100%", "a\\b", &"x".repeat(64)] {
            assert_eq!(Schema::new(name).unwrap_err().kind(), StoreErrorKind::Misconfigured);
        }
    }

    #[test]
    fn locks_differ_by_record_and_by_schema_and_never_change() {
        let (one, other) = (Schema::new("idem").unwrap(), Schema::new("other").unwrap());
        let id = RecordId::from_bytes([7; 32]);
        assert_ne!(one.lock(&id), other.lock(&id));
        assert_ne!(one.lock(&id), one.lock(&RecordId::from_bytes([8; 32])));
        // Processes of different versions must agree on it.
        let space_of_idem = 0xb43a_ae10_2b19_1a96_u64;
        assert_eq!(one.lock(&id).to_be_bytes(), (0x0707_0707_0707_0707 ^ space_of_idem).to_be_bytes());
    }
}
