//! Builds SQL text. Literals are numbers and hexadecimal digits, so no value can be mistaken for SQL.
//!
//! Most statements of the store are plain text, so that one message carries a whole transaction. Through a transaction-pooling
//! proxy it carries isolation and timeouts too, and leaves no state in the session.

use std::fmt::{Display, Write as _};
use std::time::Duration;

use idem_core::{OwnerToken, StoreError};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, Row as _};

use crate::error::{out_of_step, store_error};

/// The search path of the store's statements. Other roles cannot create objects on it.
pub(crate) const SAFE_PATH: &str = "pg_catalog, pg_temp";

/// Begins a transaction of the store, whatever the session's defaults are. It does not override `default_transaction_read_only`.
pub(crate) const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED NOT DEFERRABLE;";

/// Builds the text of a statement.
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
        self.untyped_bytes(bytes).push("::pg_catalog.bytea")
    }

    /// A literal for a place whose type is known.
    pub(crate) fn untyped_bytes(&mut self, bytes: &[u8]) -> &mut Self {
        // An escape string does not depend on standard_conforming_strings.
        self.push("E'\\\\x").hex(bytes).push("'")
    }

    /// A text value that depends on no setting.
    pub(crate) fn text(&mut self, text: &str) -> &mut Self {
        self.push("pg_catalog.convert_from(").bytes(text.as_bytes()).push(",'UTF8')")
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

/// Microseconds for SQL. A duration that does not fit becomes the largest number.
pub(crate) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// Wraps the statements of a migration, so that unqualified types, functions and operators are those of `pg_catalog`.
pub(crate) fn in_safe_path(statements: &str) -> String {
    format!(
        "SELECT pg_catalog.set_config('idem.search_path', pg_catalog.current_setting('search_path'), TRUE);
SELECT pg_catalog.set_config('search_path', '{SAFE_PATH}', TRUE);
DO $$
BEGIN
    IF pg_catalog.current_setting('search_path') OPERATOR(pg_catalog.<>) '{SAFE_PATH}' THEN
        RAISE 'apply this migration in one transaction';
    END IF;
END
$$;
{statements}
SELECT pg_catalog.set_config('search_path', pg_catalog.current_setting('idem.search_path'), TRUE);
"
    )
}

/// Milliseconds for a setting.
pub(crate) fn milliseconds(duration: Duration) -> i64 {
    // Zero would mean no limit, and the server refuses more than an i32.
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX).clamp(1, i64::from(i32::MAX))
}

/// An expression that sets all `settings` until the transaction ends. One statement for each would cost the server several times
/// as much.
pub(crate) fn set_for_transaction(settings: impl IntoIterator<Item = (&'static str, impl Display)>) -> String {
    let calls = settings.into_iter().map(|(name, value)| format!("pg_catalog.set_config('{name}','{value}',TRUE)"));
    format!("({})", calls.collect::<Vec<_>>().join(" OPERATOR(pg_catalog.||) "))
}

/// Runs a statement and returns its rows.
pub(crate) async fn rows(
    connection: &mut PgConnection,
    what: &'static str,
    sql: impl Into<String>,
) -> Result<Vec<PgRow>, StoreError> {
    sqlx::raw_sql(AssertSqlSafe(sql.into())).fetch_all(connection).await.map_err(|error| store_error(what, error))
}

pub(crate) fn random_number() -> i64 {
    OwnerToken::random().as_bytes().iter().fold(0, |number, &byte| number << 8 | i64::from(byte))
}

/// A random number that a message asks for, to know that the answer is its own.
///
/// On a connection that is out of step, each answer is the one to an earlier message. There are two causes:
/// - A handler drops a `COPY`. Neither the driver nor the server then drops the answer to it.
/// - A client dies at the wrong moment. PgBouncer 1.18 gives the next one on its server the end of an answer that it did not ask for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Echo(i64);

impl Echo {
    pub(crate) fn random() -> Self {
        Self(random_number())
    }

    pub(crate) fn number(self) -> i64 {
        self.0
    }

    /// The number as an expression. It must be the last column of a row.
    pub(crate) fn sql(self) -> String {
        format!("'{}'::pg_catalog.int8", self.0)
    }

    /// Checks an answer.
    ///
    /// # Errors
    /// [`sqlx::Error::Protocol`] if the answer is another one. The connection is of no use then.
    pub(crate) fn expect_in(self, rows: &[PgRow]) -> Result<(), sqlx::Error> {
        let last = |row: &PgRow| row.try_get::<i64, _>(row.len().checked_sub(1)?).ok();
        if rows.iter().any(|row| last(row) == Some(self.0)) { Ok(()) } else { Err(out_of_step()) }
    }
}

/// Sends statements, and checks that the answer is theirs.
///
/// # Errors
/// [`sqlx::Error::Protocol`] if the answer is another one; see [`Echo`].
pub(crate) async fn own_rows(connection: &mut PgConnection, statements: String) -> Result<Vec<PgRow>, sqlx::Error> {
    let echo = Echo::random();
    let asked = AssertSqlSafe(format!("{statements};SELECT {}", echo.sql()));
    let mut rows = sqlx::raw_sql(asked).fetch_all(connection).await?;
    echo.expect_in(rows.last().map_or(&[], std::slice::from_ref))?;
    rows.pop();
    Ok(rows)
}

pub(crate) fn is_true(rows: &[PgRow]) -> bool {
    rows.first().and_then(|row| row.try_get(0).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_hold_nothing_but_digits() {
        let mut sql = Sql::default();
        sql.bytes(b"';--\\").push(" ").byte_strings([Some(&b"\"}"[..]), None].into_iter()).push(" ");
        sql.numbers([Some(-1), None].into_iter()).push(" ").optional_bytes(None);
        assert_eq!(sql.into_text(), r#"E'\\x273b2d2d5c'::pg_catalog.bytea E'{"\\\\x227d",NULL}' '{-1,NULL}' NULL"#);
    }
}
