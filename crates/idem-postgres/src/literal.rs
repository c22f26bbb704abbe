//! SQL literals. Everything is written as numbers and hexadecimal digits, so nothing can be mistaken for SQL.
//!
//! Statements of the store go as plain text: one message then carries a whole transaction, and through a transaction-pooling
//! proxy, which gives the session to somebody else next, its isolation and its timeouts too, so that no state stays behind.

use std::fmt::Write as _;

/// A statement in the making.
#[derive(Default)]
pub(crate) struct Sql(String);

impl Sql {
    pub(crate) fn push(&mut self, text: &str) -> &mut Self {
        self.0.push_str(text);
        self
    }

    pub(crate) fn number(&mut self, number: impl Into<i64>) -> &mut Self {
        // Writing to a string cannot fail.
        let _ = write!(self.0, "{}", number.into());
        self
    }

    pub(crate) fn optional_number(&mut self, number: Option<i64>) -> &mut Self {
        match number {
            Some(number) => self.number(number),
            None => self.push("NULL"),
        }
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        // An escape string means the same whatever standard_conforming_strings says.
        self.push("E'\\\\x").hex(bytes).push("'::BYTEA")
    }

    pub(crate) fn optional_bytes(&mut self, bytes: Option<&[u8]>) -> &mut Self {
        match bytes {
            Some(bytes) => self.bytes(bytes),
            None => self.push("NULL"),
        }
    }

    pub(crate) fn numbers<'a>(&mut self, numbers: impl Iterator<Item = Option<i64>> + 'a) -> &mut Self {
        self.push("'{");
        for (place, number) in numbers.enumerate() {
            if place > 0 {
                self.push(",");
            }
            self.optional_number(number);
        }
        self.push("}'")
    }

    pub(crate) fn byte_strings<'a>(&mut self, strings: impl Iterator<Item = Option<&'a [u8]>>) -> &mut Self {
        self.push("E'{");
        for (place, string) in strings.enumerate() {
            if place > 0 {
                self.push(",");
            }
            match string {
                // Two backslashes for the string make one for the array, which makes one for the bytes.
                Some(string) => self.push("\"\\\\\\\\x").hex(string).push("\""),
                None => self.push("NULL"),
            };
        }
        self.push("}'")
    }

    fn hex(&mut self, bytes: &[u8]) -> &mut Self {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        self.0.reserve(2 * bytes.len());
        for byte in bytes {
            self.0.push(char::from(DIGITS[usize::from(byte >> 4)]));
            self.0.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
        self
    }

    pub(crate) fn into_text(self) -> String {
        self.0
    }
}

/// Text for the columns that operators read. Postgres cannot store NUL in text.
pub(crate) fn readable(text: &str) -> Vec<u8> {
    text.replace('\0', "\u{FFFD}").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_hold_nothing_but_digits() {
        let mut sql = Sql::default();
        sql.bytes(b"';--\\").push(" ").byte_strings([Some(&b"\"}"[..]), None].into_iter()).push(" ");
        sql.numbers([Some(-1), None].into_iter()).push(" ").optional_bytes(None);
        assert_eq!(sql.into_text(), r#"E'\\x273b2d2d5c'::BYTEA E'{"\\\\x227d",NULL}' '{-1,NULL}' NULL"#);
    }
}
