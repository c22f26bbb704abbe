//! Syntax that several header fields share.

/// Optional white space (RFC 9110 section 5.6.3). Other white space of Unicode does not count.
pub(crate) const BLANKS: [char; 2] = [' ', '\t'];

/// A value without the blanks around it (RFC 9110 section 5.5).
pub(crate) fn trim(mut value: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = value {
        value = rest;
    }
    value
}

/// Whether a text is a token (RFC 9110 section 5.6.2), such as the name of a field.
pub(crate) fn is_token(text: &str) -> bool {
    let is_in_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    !text.is_empty() && text.bytes().all(is_in_token)
}

/// Whether a text may be the value of a header field (RFC 9110 section 5.5).
pub(crate) fn is_field_value(text: &str) -> bool {
    text.bytes().all(|byte| byte == b'\t' || !byte.is_ascii_control())
}

/// The text of a quoted string (RFC 9110 section 5.6.4) without escapes. `None` if the quotes are no pair, or something is
/// escaped.
pub(crate) fn unquoted(value: &str) -> Option<&str> {
    let inner = value.strip_prefix('"')?.strip_suffix('"')?;
    (!inner.contains(['"', '\\'])).then_some(inner)
}

/// Splits a text at the separators outside of quoted strings.
pub(crate) fn split_outside_quotes(text: &str, separator: char) -> impl Iterator<Item = &str> {
    let (mut quoted, mut escaped) = (false, false);
    text.split(move |character| {
        quoted ^= character == '"' && !escaped;
        escaped = quoted && character == '\\' && !escaped;
        character == separator && !quoted
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blanks_are_spaces_and_tabs() {
        assert_eq!(trim(b" \t a b\t "), b"a b");
        assert_eq!(trim(b" \t"), b"");
        assert_eq!(trim("\u{a0}a".as_bytes()), "\u{a0}a".as_bytes());
    }

    #[test]
    fn names_and_values_of_fields_are_told_from_other_text() {
        for (text, expected) in [("X-Key_1", true), ("X Key", false), ("", false), ("X:", false), ("Ü", false)] {
            assert_eq!(is_token(text), expected, "{text:?}");
        }
        for (text, expected) in [("Bearer realm=\"a\"", true), ("a\tb", true), ("a\r\nb", false), ("\0", false)] {
            assert_eq!(is_field_value(text), expected, "{text:?}");
        }
    }

    #[test]
    fn quotes_are_taken_off_in_pairs() {
        assert_eq!(unquoted("\"a b\""), Some("a b"));
        assert_eq!(unquoted("\"\""), Some(""));
        for value in ["a", "\"", "\"a", "a\"", "\"a\"b\"", "\"a\\\\\"", ""] {
            assert_eq!(unquoted(value), None, "{value:?}");
        }
    }
}
