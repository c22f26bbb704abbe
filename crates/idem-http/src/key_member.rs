//! A key in a member of the JSON request body.

use bytes::Bytes;
use idem_core::{IdempotencyKey, JsonPointer};
use serde_json::Value;

use crate::problem::{Problem, ProblemKind};

/// Reads the key from a body in chunks.
///
/// # Errors
/// The problem of a body that is no JSON, or that has no key there.
pub(crate) fn key_of_body(member: &JsonPointer, chunks: &[Bytes]) -> Result<IdempotencyKey, Problem> {
    let missing = |why: &str| {
        let detail = format!("The idempotency key is the member {} of the JSON body, and {why}.", path(member));
        Problem::new(ProblemKind::KeyMissing).detail(detail)
    };
    let body: Value = match chunks {
        [chunk] => serde_json::from_slice(chunk),
        chunks => serde_json::from_slice(&chunks.concat()),
    }
    .map_err(|_| missing("the body is no JSON"))?;
    let key = match find(&body, member) {
        Some(Value::String(key)) => key.clone(),
        Some(Value::Number(number)) if number.is_i64() || number.is_u64() => number.to_string(),
        Some(_) => return Err(missing("it is neither a string nor a whole number")),
        None => return Err(missing("it is not there")),
    };
    IdempotencyKey::new(key).map_err(|error| {
        let detail = format!("The member {} of the JSON body is refused: {error}.", path(member));
        Problem::new(ProblemKind::KeyInvalid).detail(detail)
    })
}

fn find<'a>(body: &'a Value, member: &JsonPointer) -> Option<&'a Value> {
    member.tokens().iter().try_fold(body, |value, token| match value {
        Value::Object(members) => members.get(token),
        // As RFC 6901 section 4 has it: no sign and no leading zero.
        Value::Array(elements) => {
            elements.get(token.parse::<usize>().ok().filter(|index| index.to_string() == *token)?)
        }
        _ => None,
    })
}

fn path(member: &JsonPointer) -> String {
    let escaped = member.tokens().iter().map(|token| token.replace('~', "~0").replace('/', "~1"));
    escaped.map(|token| format!("/{token}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(member: &str, chunks: &[&'static str]) -> Result<String, (ProblemKind, String)> {
        let chunks: Vec<Bytes> = chunks.iter().map(|chunk| Bytes::from_static(chunk.as_bytes())).collect();
        let key = key_of_body(&member.parse().unwrap(), &chunks);
        key.map(|key| key.as_str().to_owned()).map_err(|problem| (problem.kind(), problem.detail_text().to_owned()))
    }

    #[test]
    fn strings_and_whole_numbers_are_keys_wherever_they_stand() {
        assert_eq!(key("/id", &[r#"{"id":"evt_1"}"#]).unwrap(), "evt_1");
        assert_eq!(key("/id", &[r#"{"i"#, r#"d":"evt_"#, r#"1"}"#]).unwrap(), "evt_1");
        assert_eq!(
            key("/data/1/id", &[r#"{"data":[{},{"id":18446744073709551615}]}"#]).unwrap(),
            "18446744073709551615"
        );
        assert_eq!(key("/a~1b", &[r#"{"a/b":-7}"#]).unwrap(), "-7");
        assert_eq!(key("/id", &[r#"{"id":"first","id":"last"}"#]).unwrap(), "last");
    }

    #[test]
    fn everything_else_is_refused_with_its_reason() {
        for (body, kind, reason) in [
            ("", ProblemKind::KeyMissing, "the body is no JSON"),
            ("id=1", ProblemKind::KeyMissing, "the body is no JSON"),
            ("[]", ProblemKind::KeyMissing, "it is not there"),
            ("{}", ProblemKind::KeyMissing, "it is not there"),
            (r#"{"id":null}"#, ProblemKind::KeyMissing, "neither a string nor a whole number"),
            (r#"{"id":1.5}"#, ProblemKind::KeyMissing, "neither a string nor a whole number"),
            (r#"{"id":""}"#, ProblemKind::KeyInvalid, "the idempotency key is empty"),
            (r#"{"id":"a b"}"#, ProblemKind::KeyInvalid, "is refused"),
        ] {
            let (found, detail) = key("/id", &[body]).unwrap_err();
            assert_eq!(found, kind, "{body}");
            assert!(detail.contains("the member /id of") || detail.contains("The member /id of"), "{detail}");
            assert!(detail.contains(reason), "{detail}");
        }
        assert!(key("/00", &["[1]"]).is_err());
        assert!(key("/+0", &["[1]"]).is_err());
    }
}
