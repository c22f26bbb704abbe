//! JSON pointers (RFC 6901) to members that a fingerprint ignores.

use std::str::FromStr;

/// A JSON pointer to one member or element, such as `/meta/sent_at` or `/items/0`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct JsonPointer {
    tokens: Vec<String>,
}

/// Why a string is not a usable JSON pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JsonPointerError {
    /// The empty pointer is the whole document; ignoring that would make all bodies equal.
    #[error("an empty JSON pointer means the whole body, which cannot be ignored; name a member, as in \"/sent_at\"")]
    WholeDocument,
    /// A pointer has to start with a slash.
    #[error("a JSON pointer starts with \"/\", as in \"/sent_at\"")]
    NoLeadingSlash,
    /// A tilde that is not followed by 0 or 1.
    #[error("\"~\" in a JSON pointer is written \"~0\", and \"/\" inside a name \"~1\"")]
    InvalidEscape,
}

impl JsonPointer {
    /// The reference tokens, unescaped; at least one.
    #[must_use]
    pub fn tokens(&self) -> &[String] {
        &self.tokens
    }
}

impl FromStr for JsonPointer {
    type Err = JsonPointerError;

    fn from_str(pointer: &str) -> Result<Self, JsonPointerError> {
        if pointer.is_empty() {
            return Err(JsonPointerError::WholeDocument);
        }
        let path = pointer.strip_prefix('/').ok_or(JsonPointerError::NoLeadingSlash)?;
        let tokens = path.split('/').map(unescape).collect::<Result<_, _>>()?;
        Ok(Self { tokens })
    }
}

/// `~1` is a slash and `~0` a tilde (RFC 6901 section 4).
fn unescape(token: &str) -> Result<String, JsonPointerError> {
    let mut parts = token.split('~');
    let mut name = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (character, rest) = match part.as_bytes().first() {
            Some(b'0') => ('~', &part[1..]),
            Some(b'1') => ('/', &part[1..]),
            _ => return Err(JsonPointerError::InvalidEscape),
        };
        name.push(character);
        name.push_str(rest);
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(pointer: &str) -> Result<Vec<String>, JsonPointerError> {
        pointer.parse().map(|pointer: JsonPointer| pointer.tokens)
    }

    #[test]
    fn the_examples_of_rfc_6901_section_5_are_read() {
        assert_eq!(tokens("/foo/0").unwrap(), ["foo", "0"]);
        assert_eq!(tokens("/").unwrap(), [""]);
        assert_eq!(tokens("/a~1b").unwrap(), ["a/b"]);
        assert_eq!(tokens("/m~0n").unwrap(), ["m~n"]);
        assert_eq!(tokens("/~01").unwrap(), ["~1"]);
        assert_eq!(tokens("/ /k\"l").unwrap(), [" ", "k\"l"]);
    }

    #[test]
    fn what_is_not_a_pointer_is_refused() {
        assert_eq!(tokens(""), Err(JsonPointerError::WholeDocument));
        assert_eq!(tokens("sent_at"), Err(JsonPointerError::NoLeadingSlash));
        assert_eq!(tokens("/a~2"), Err(JsonPointerError::InvalidEscape));
        assert_eq!(tokens("/a~"), Err(JsonPointerError::InvalidEscape));
    }
}
