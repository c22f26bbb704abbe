//! The syntax of the `Idempotency-Key` header field.

use idem_core::{IdempotencyKey, KeyError};

/// Why a header field is not an idempotency key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyHeaderError {
    /// The field stands in the request more than once.
    #[error("the request has more than one idempotency key; send the header once")]
    Repeated,
    /// A quote that does not close, a backslash that escapes something else than a quote or a backslash, or
    /// something after the closing quote.
    #[error("the idempotency key is not a quoted string as RFC 8941 section 3.3.3 has it; send \"abc\" or abc")]
    MalformedString,
    /// A bare key with a comma: a proxy may have joined two header lines.
    #[error("a bare idempotency key cannot have a comma, because joined header lines look so; send it quoted")]
    BareComma,
    /// What the header denotes is not a key.
    #[error(transparent)]
    Key(#[from] KeyError),
}

/// Reads the values of all header lines of that name; `None` when there is none.
///
/// The value is an RFC 8941 String (`"abc"`, as draft-ietf-httpapi-idempotency-key-header asks for) or bare (`abc`, as
/// most clients send); both are the same key. Spaces and tabs around the value are not part of it (RFC 9110 section
/// 5.5).
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
    match value.strip_prefix(b"\"") {
        Some(quoted) => Ok(Some(IdempotencyKey::new(unquote(quoted)?)?)),
        None if value.contains(&b',') => Err(KeyHeaderError::BareComma),
        None => Ok(Some(IdempotencyKey::new(value)?)),
    }
}

fn trim(value: &[u8]) -> &[u8] {
    let blank = |byte: &u8| *byte == b' ' || *byte == b'\t';
    let start = value.iter().position(|byte| !blank(byte)).unwrap_or(value.len());
    let end = value.iter().rposition(|byte| !blank(byte)).map_or(start, |last| last + 1);
    &value[start..end]
}

/// What stands between the quotes, after the opening one was taken.
fn unquote(quoted: &[u8]) -> Result<Vec<u8>, KeyHeaderError> {
    let mut key = Vec::with_capacity(quoted.len());
    let mut bytes = quoted.iter();
    while let Some(&byte) = bytes.next() {
        match byte {
            b'"' if bytes.as_slice().is_empty() => return Ok(key),
            b'"' => return Err(KeyHeaderError::MalformedString),
            b'\\' => match bytes.next() {
                Some(&escaped @ (b'"' | b'\\')) => key.push(escaped),
                _ => return Err(KeyHeaderError::MalformedString),
            },
            byte => key.push(byte),
        }
    }
    Err(KeyHeaderError::MalformedString)
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
    fn whatever_else_is_refused() {
        use KeyHeaderError::{BareComma, Key, MalformedString, Repeated};
        assert_eq!(parse(&["a", "a"]), Err(Repeated));
        assert_eq!(parse(&["a,b"]), Err(BareComma));
        for malformed in ["\"abc", "\"", "\"a\\\"", "\"a\\b\"", "\"a\"b", "\"a\";p=1", "\"a\", \"b\""] {
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
