//! Statements as text, so that several of them travel in one message.
//!
//! sqlx binds parameters only to single prepared statements. Here all data are hexadecimal literals, which mean the same under
//! each `sql_mode` and each character set of the session.

use std::fmt::Write as _;

/// Statements that are being written.
#[derive(Debug, Default)]
pub(crate) struct Sql(String);

impl Sql {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub(crate) fn push(&mut self, text: &str) -> &mut Self {
        self.0.push_str(text);
        self
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        self.0.reserve(bytes.len() * 2 + 3);
        self.0.push_str("x'");
        for byte in bytes {
            self.0.push(char::from(DIGITS[usize::from(byte >> 4)]));
            self.0.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
        self.0.push('\'');
        self
    }

    pub(crate) fn text(&mut self, text: &str) -> &mut Self {
        self.push("_utf8mb4 ").bytes(text.as_bytes())
    }

    pub(crate) fn number(&mut self, number: impl Into<i64>) -> &mut Self {
        // Writing to a string does not fail.
        let _ = write!(self.0, "{}", number.into());
        self
    }

    /// Writes `value` by `write`, or NULL.
    pub(crate) fn optional<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Self, T)) -> &mut Self {
        match value {
            Some(value) => write(self, value),
            None => {
                self.push("NULL");
            }
        }
        self
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn text_so_far(&self) -> &str {
        &self.0
    }

    pub(crate) fn into_text(self) -> String {
        self.0
    }
}

/// The time of the server in microseconds since 1970. As a statement by itself it reads the clock after all statements before it,
/// so after their waits for locks.
pub(crate) const NOW: &str = "TIMESTAMPDIFF(MICROSECOND,'1970-01-01',UTC_TIMESTAMP(6))";

/// Sets the clock of a session going that a handler or a caller has stopped by `SET timestamp`. Each server allows that, also one
/// with `secure_timestamp`.
pub(crate) const REAL_TIME: &str = "SET timestamp=DEFAULT;";

/// Begins a transaction of the store. At READ COMMITTED a look for an absent row locks no gap, so that inserts of other keys
/// go on.
pub(crate) const BEGIN: &str = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED;START TRANSACTION READ WRITE;";

/// The name of a database in backquotes.
pub(crate) fn quoted(name: &str) -> String {
    format!("`{}`", name.replace('`', "``"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_are_literals_that_contain_no_quotes() {
        let mut sql = Sql::default();
        sql.text("ä'`\\").push(",").bytes(&[]).push(",").number(i64::MIN).push(",").optional(None, |_, (): ()| {});
        assert_eq!(sql.into_text(), "_utf8mb4 x'c3a427605c',x'',-9223372036854775808,NULL");
        assert_eq!(quoted("a`b"), "`a``b`");
    }
}
