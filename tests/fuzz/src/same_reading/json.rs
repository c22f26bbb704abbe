//! Compares two JSON texts with the parser of axum and actix-web.

use arbitrary::{Result, Unstructured};

use super::{Reader, Sent, changed};
use crate::choices::Choices;
use crate::json_canonical::{made_up, writer};

pub(super) const READERS: &[Reader] = &[("serde_json", by_serde_json)];

/// Content types, each of which some handler accepts as JSON.
const TYPES: [&str; 6] = [
    "application/json",
    "application/json; charset=utf-8",
    "application/json; charset=utf-16",
    "application/json ;charset=UTF-8",
    "application/problem+json",
    "text/json",
];

const PIECES: &[&[u8]] = &[
    b"",
    b" ",
    b"\n",
    b"\t",
    b",",
    b":",
    b"\"",
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b"0",
    b"-0",
    b".0",
    b"e0",
    b"E+0",
    b"1e999",
    b"\\u0061",
    b"\\ud800",
    b"\\ud83d\\ude00",
    b"\\/",
    b"/",
    b"a",
    b"\"a\":1,",
    b"\"\\u0061\":1,",
    b"\xEF\xBB\xBF",
    b"\xC3",
    b"\xA9",
    b"\xFF",
    b"\0",
    b"=",
    b"#",
    b"null",
    b"true",
    b"9007199254740993",
    b"9007199254740992",
    b"\x0C",
    b"\xC2\xA0",
];

pub(super) fn two(input: &mut Unstructured<'_>) -> Result<(Sent, Sent)> {
    let (one_type, other_type) = (*input.choose(&TYPES)?, *input.choose(&TYPES)?);
    let other_type = if input.ratio(3, 4)? { one_type } else { other_type };
    // Long members enter the objects around them as digests.
    let padding = "p".repeat(*input.choose(&[0, 0, 0, 500, 600])?);
    let seed: [u8; 8] = input.arbitrary()?;
    let is_changed = input.ratio(1, 2)?;
    let mut tail = Unstructured::new(input.bytes(input.len() / 3)?);
    let value = made_up::document(input.bytes(input.len())?)?;
    let mut choices = Choices::of(&seed);
    let mut text = || format!("{{\"\":\"{padding}\",\"it\":{}}}", writer::write(&value, &mut choices)).into_bytes();
    let (one, mut other) = (text(), text());
    if is_changed {
        other = changed(other, PIECES, &mut tail)?;
    }
    Ok((
        Sent { content_type: one_type.to_owned(), body: one },
        Sent { content_type: other_type.to_owned(), body: other },
    ))
}

fn by_serde_json(sent: &Sent) -> String {
    match serde_json::from_slice::<serde_json::Value>(&sent.body) {
        Ok(value) => format!("{value:?}"),
        Err(_) => "an error".to_owned(),
    }
}
