//! A key in a member of the JSON request body.
//!
//! The parser follows the path of the member and skips everything else. A tree of the body would take many times the memory
//! of its bytes, and the skipped parts may be JSON that only the handler understands.

use std::fmt;
use std::io::Read;

use bytes::Bytes;
use idem_core::{IdempotencyKey, JsonPointer};
use serde::Deserializer;
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::problem::{Problem, ProblemKind};

/// Reads the key from a body in chunks.
///
/// # Errors
/// [`ProblemKind::KeyMissing`] if the body is no JSON, or its member is absent or can be no key. [`ProblemKind::KeyInvalid`]
/// if the member is malformed.
pub(crate) fn key_of_body(member: &JsonPointer, chunks: &[Bytes]) -> Result<IdempotencyKey, Problem> {
    let missing = |why: &str| {
        let detail = format!("The idempotency key is the member {} of the JSON body, and {why}.", path(member));
        Problem::new(ProblemKind::KeyMissing).detail(detail)
    };
    let mut body = serde_json::Deserializer::from_reader(Chunks { chunks, read: 0 });
    let found = Path(member.tokens()).deserialize(&mut body).and_then(|found| body.end().map(|()| found));
    let key = match found.map_err(|_| missing("the body is no JSON"))? {
        Found::Key(key) => key,
        Found::Other => return Err(missing("it is neither a string nor a whole number of 64 bits")),
        Found::Nothing => return Err(missing("it is not there")),
    };
    IdempotencyKey::new(key).map_err(|error| {
        let detail = format!("The member {} of the JSON body is refused: {error}.", path(member));
        Problem::new(ProblemKind::KeyInvalid).detail(detail)
    })
}

fn path(member: &JsonPointer) -> String {
    let escaped = member.tokens().iter().map(|token| token.replace('~', "~0").replace('/', "~1"));
    escaped.map(|token| format!("/{token}")).collect()
}

/// Reads chunks one after the other.
struct Chunks<'a> {
    chunks: &'a [Bytes],
    /// How many bytes of the first chunk have been read.
    read: usize,
}

impl Read for Chunks<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        while let [chunk, rest @ ..] = self.chunks {
            let left = &chunk[self.read..];
            if !left.is_empty() {
                let length = left.len().min(buffer.len());
                buffer[..length].copy_from_slice(&left[..length]);
                self.read += length;
                return Ok(length);
            }
            (self.chunks, self.read) = (rest, 0);
        }
        Ok(0)
    }
}

enum Found {
    Nothing,
    /// Something that is no key.
    Other,
    Key(String),
}

/// What is left of the path to the member.
struct Path<'a>(&'a [String]);

impl<'de> DeserializeSeed<'de> for Path<'_> {
    type Value = Found;

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<Found, D::Error> {
        value.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Path<'_> {
    type Value = Found;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Found, A::Error> {
        let mut found = if self.0.is_empty() { Found::Other } else { Found::Nothing };
        while let Some(name) = members.next_key::<String>()? {
            match self.0.split_first() {
                Some((token, rest)) if *token == name => found = members.next_value_seed(Path(rest))?,
                _ => drop(members.next_value::<IgnoredAny>()?),
            }
        }
        Ok(found)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Found, A::Error> {
        // As RFC 6901 section 4 has it: no sign and no leading zero.
        let index = |token: &String| token.parse::<usize>().ok().filter(|index| index.to_string() == *token);
        let wanted = self.0.split_first().and_then(|(token, rest)| Some((index(token)?, rest)));
        let mut found = if self.0.is_empty() { Found::Other } else { Found::Nothing };
        for at in 0.. {
            match wanted {
                Some((index, rest)) if index == at => match elements.next_element_seed(Path(rest))? {
                    Some(element) => found = element,
                    None => break,
                },
                _ if elements.next_element::<IgnoredAny>()?.is_none() => break,
                _ => {}
            }
        }
        Ok(found)
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<Found, E> {
        Ok(if self.0.is_empty() { Found::Key(key.to_owned()) } else { Found::Nothing })
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Found, E> {
        Ok(if self.0.is_empty() { Found::Key(number.to_string()) } else { Found::Nothing })
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Found, E> {
        Ok(if self.0.is_empty() { Found::Key(number.to_string()) } else { Found::Nothing })
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Found, E> {
        Ok(if self.0.is_empty() { Found::Other } else { Found::Nothing })
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Found, E> {
        self.visit_f64(0.0)
    }

    fn visit_unit<E: Error>(self) -> Result<Found, E> {
        self.visit_f64(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(member: &str, chunks: &[&str]) -> Result<String, (ProblemKind, String)> {
        let chunks: Vec<Bytes> = chunks.iter().map(|chunk| Bytes::copy_from_slice(chunk.as_bytes())).collect();
        let key = key_of_body(&member.parse().unwrap(), &chunks);
        key.map(|key| key.as_str().to_owned()).map_err(|problem| (problem.kind(), problem.detail_text().to_owned()))
    }

    #[test]
    fn strings_and_whole_numbers_are_keys_wherever_they_stand() {
        assert_eq!(key("/id", &[r#"{"id":"evt_1"}"#]).unwrap(), "evt_1");
        assert_eq!(key("/id", &["", r#"{"i"#, "", r#"d":"evt_"#, r#"1"}"#]).unwrap(), "evt_1");
        let element = r#"{"data":[{},{"id":18446744073709551615},{"id":3}]}"#;
        assert_eq!(key("/data/1/id", &[element]).unwrap(), "18446744073709551615");
        assert_eq!(key("/a~1b", &[r#"{"a/b":-7}"#]).unwrap(), "-7");
        assert_eq!(key("/id", &[r#"{"id":"first","id":"last"}"#]).unwrap(), "last");
    }

    /// Half an emoji, a number that no float holds, and nesting that no stack holds: a handler may skip them too.
    #[test]
    fn what_stands_beside_the_key_is_skipped() {
        let deep = format!(r#"{{"a":{}{},"id":"evt_1"}}"#, "[".repeat(100_000), "]".repeat(100_000));
        for body in [r#"{"text":"\ud83d","id":"evt_1"}"#, r#"{"n":1e400,"id":"evt_1","m":-1e999}"#, deep.as_str()] {
            assert_eq!(key("/id", &[body]).unwrap(), "evt_1");
        }
    }

    #[test]
    fn everything_else_is_refused_with_its_reason() {
        for (body, kind, reason) in [
            ("", ProblemKind::KeyMissing, "the body is no JSON"),
            ("id=1", ProblemKind::KeyMissing, "the body is no JSON"),
            (r#"{"id":"evt_1"} x"#, ProblemKind::KeyMissing, "the body is no JSON"),
            ("[]", ProblemKind::KeyMissing, "it is not there"),
            ("{}", ProblemKind::KeyMissing, "it is not there"),
            ("7", ProblemKind::KeyMissing, "it is not there"),
            (r#""id""#, ProblemKind::KeyMissing, "it is not there"),
            (r#"{"id":null}"#, ProblemKind::KeyMissing, "neither a string nor a whole number"),
            (r#"{"id":true}"#, ProblemKind::KeyMissing, "neither a string nor a whole number"),
            (r#"{"id":{"id":1}}"#, ProblemKind::KeyMissing, "neither a string nor a whole number"),
            (r#"{"id":["evt_1"]}"#, ProblemKind::KeyMissing, "neither a string nor a whole number"),
            (r#"{"id":1.5}"#, ProblemKind::KeyMissing, "neither a string nor a whole number"),
            (r#"{"id":18446744073709551616}"#, ProblemKind::KeyMissing, "neither a string nor a whole number"),
            (r#"{"id":""}"#, ProblemKind::KeyInvalid, "the idempotency key is empty"),
            (r#"{"id":"a b"}"#, ProblemKind::KeyInvalid, "is refused"),
        ] {
            let (found, detail) = key("/id", &[body]).unwrap_err();
            assert_eq!(found, kind, "{body}");
            assert!(detail.contains("he member /id of the JSON body"), "{detail}");
            assert!(detail.contains(reason), "{body}: {detail}");
        }
        for token in ["/00", "/+0", "/-", "/1"] {
            assert_eq!(key(token, &["[1]"]).unwrap_err().0, ProblemKind::KeyMissing, "{token}");
        }
        assert_eq!(key("/0", &["[1]"]).unwrap(), "1");
    }
}
