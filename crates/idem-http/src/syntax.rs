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
    fn quotes_are_taken_off_in_pairs() {
        assert_eq!(unquoted("\"a b\""), Some("a b"));
        assert_eq!(unquoted("\"\""), Some(""));
        for value in ["a", "\"", "\"a", "a\"", "\"a\"b\"", "\"a\\\\\"", ""] {
            assert_eq!(unquoted(value), None, "{value:?}");
        }
    }
}
