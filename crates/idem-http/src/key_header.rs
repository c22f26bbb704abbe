//! The syntax of the `Idempotency-Key` header field.

use idem_core::{IdempotencyKey, KeyError};
use sfv::{BareItem, Item, Parser};

use crate::syntax::trim;

/// Why a header field is not an idempotency key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyHeaderError {
    /// The request has the field more than once.
    #[error("the request has more than one idempotency key; send the header once")]
    Repeated,
    /// The value begins with a quote and is no structured-field String. Examples: an unclosed quote, a backslash before
    /// anything but a quote or a backslash, and text after the closing quote that is no parameter.
    #[error("the idempotency key is not a quoted string as RFC 9651 section 3.3.3 has it; send \"abc\" or abc")]
    MalformedString,
    /// A bare key with a comma: a proxy may have joined two header lines.
    #[error(
        "the idempotency key has a comma, as two header lines that a proxy joined would have; send the header once, and a key with a comma in quotes"
    )]
    BareComma,
    /// The value is not a valid key.
    #[error(transparent)]
    Key(#[from] KeyError),
}

/// Parses the key from the values of all header lines of that name; `None` if there is none.
///
/// The value has one of two forms, which give the same key:
///
/// - a structured-field Item that is a String (`"abc"`), as draft-ietf-httpapi-idempotency-key-header demands;
/// - bare (`abc`), as most clients send it.
///
/// Parameters of an Item (`"abc";p=1`) are ignored, as RFC 9651 section 3.1.2 permits. Spaces and tabs around the value are
/// not part of it (RFC 9110 section 5.5).
///
/// # Errors
/// [`KeyHeaderError`]; nothing is truncated, joined or repaired.
pub fn parse_key_header<'a>(
    mut values: impl Iterator<Item = &'a [u8]>,
) -> Result<Option<IdempotencyKey>, KeyHeaderError> {
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(KeyHeaderError::Repeated);
    }
    let value = trim(value);
    if value.starts_with(b"\"") {
        return match Parser::new(value).parse::<Item>() {
            Ok(Item { bare_item: BareItem::String(key), .. }) => Ok(Some(IdempotencyKey::new(key.as_str())?)),
            Ok(_) | Err(_) => Err(KeyHeaderError::MalformedString),
        };
    }
    if value.contains(&b',') {
        return Err(KeyHeaderError::BareComma);
    }
    Ok(Some(IdempotencyKey::new(value)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(values: &[&str]) -> Result<Option<String>, KeyHeaderError> {
        let key = parse_key_header(values.iter().map(|value| value.as_bytes()));
        key.map(|key| key.map(|key| key.as_str().to_owned()))
    }

    #[test]
    fn quoted_and_bare_are_the_same_key() {
        for value in ["abc", "\"abc\"", " abc\t", " \"abc\" "] {
            assert_eq!(parse(&[value]).unwrap().as_deref(), Some("abc"), "{value:?}");
        }
        assert_eq!(parse(&[]).unwrap(), None);
        assert_eq!(parse(&[r#""a\"b\\c""#]).unwrap().as_deref(), Some(r#"a"b\c"#));
        assert_eq!(parse(&[r#"a"b\c"#]).unwrap().as_deref(), Some(r#"a"b\c"#));
        assert_eq!(parse(&["\"a,b\""]).unwrap().as_deref(), Some("a,b"));
    }

    #[test]
    fn parameters_of_a_quoted_key_are_ignored() {
        for value in ["\"abc\";p=1", "\"abc\"; p; q=\"x;y\"; r=?0;s=:aGk=:;t=a/b", "\"abc\";p=1 "] {
            assert_eq!(parse(&[value]).unwrap().as_deref(), Some("abc"), "{value:?}");
        }
        assert_eq!(parse(&["abc;p=1"]).unwrap().as_deref(), Some("abc;p=1"), "a bare key has none");
    }

    #[test]
    fn whatever_else_is_refused() {
        use KeyHeaderError::{BareComma, Key, MalformedString, Repeated};
        assert_eq!(parse(&["a", "a"]), Err(Repeated));
        assert_eq!(parse(&["a,b"]), Err(BareComma));
        for malformed in [
            "\"abc",
            "\"",
            "\"a\\\"",
            "\"a\\b\"",
            "\"a\"b",
            "\"a\";P=1",
            "\"a\";p=",
            "\"a\" ;p=1",
            "\"a\", \"b\"",
            "\"\u{e9}\"",
        ] {
            assert_eq!(parse(&[malformed]), Err(MalformedString), "{malformed:?}");
        }
        for empty in ["", " \t ", "\"\""] {
            assert_eq!(parse(&[empty]), Err(Key(KeyError::Empty)), "{empty:?}");
        }
        assert_eq!(parse(&["a b"]), Err(Key(KeyError::InvalidByte { byte: b' ', offset: 1 })));
        assert_eq!(parse(&["\"a b\""]), Err(Key(KeyError::InvalidByte { byte: b' ', offset: 1 })));
        assert_eq!(parse(&["\u{e9}"]), Err(Key(KeyError::InvalidByte { byte: 0xC3, offset: 0 })));
        assert_eq!(parse(&[&"k".repeat(256)]), Err(Key(KeyError::TooLong { bytes: 256 })));
        assert_eq!(parse(&[&"k".repeat(255)]).unwrap().unwrap().len(), 255);
        let longest = format!("\"{}\"", "k".repeat(255));
        assert_eq!(parse(&[&longest]).unwrap().unwrap().len(), 255, "quotes do not count");
    }
}
