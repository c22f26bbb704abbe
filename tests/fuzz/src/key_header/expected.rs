//! What header lines say, read a second time by their specifications and by none of the code that is tried.

/// The one key in these lines (draft-ietf-httpapi-idempotency-key-header, RFC 8941 section 3.3.3).
pub(super) fn key(values: &[&[u8]]) -> Option<Vec<u8>> {
    let &[value] = values else { return None };
    let key = match without_blanks(value) {
        [b'"', quoted @ .., b'"'] => unescaped(quoted)?,
        [b'"', ..] => return None,
        bare if bare.contains(&b',') => return None,
        bare => bare.to_vec(),
    };
    let is_key = !key.is_empty() && key.len() <= 255 && key.iter().all(|byte| (b'!'..=b'~').contains(byte));
    is_key.then_some(key)
}

fn unescaped(mut quoted: &[u8]) -> Option<Vec<u8>> {
    let mut key = Vec::new();
    loop {
        quoted = match quoted {
            [] => return Some(key),
            [b'\\', escaped @ (b'"' | b'\\'), rest @ ..] => {
                key.push(*escaped);
                rest
            }
            [b'\\' | b'"', ..] => return None,
            [plain, rest @ ..] => {
                key.push(*plain);
                rest
            }
        }
    }
}

/// What RFC 9110 section 5.6.3 calls optional white space is no part of a value.
fn without_blanks(mut value: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = value {
        value = rest;
    }
    value
}

fn trimmed(text: &str) -> &str {
    text.trim_matches([' ', '\t'])
}

/// The seconds of the first `wait` preference (RFC 7240 sections 2 and 4.3); a line that is no text has none.
pub(super) fn wait(values: &[&[u8]]) -> Option<u64> {
    let lines = values.iter().filter_map(|value| std::str::from_utf8(value).ok());
    for preference in lines.flat_map(|line| parts(line, ',')) {
        let without_parameters = parts(&preference, ';').into_iter().next().unwrap_or_default();
        let Some((name, value)) = without_parameters.split_once('=') else { continue };
        if trimmed(name).eq_ignore_ascii_case("wait") {
            let value = trimmed(value);
            let digits = value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value);
            return digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten();
        }
    }
    None
}

/// What stands between separators, of which those in quoted strings are none (RFC 9110 section 5.6.4).
fn parts(text: &str, separator: char) -> Vec<String> {
    let (mut parts, mut is_quoted, mut characters) = (vec![String::new()], false, text.chars());
    while let Some(character) = characters.next() {
        if character == separator && !is_quoted {
            parts.push(String::new());
            continue;
        }
        let pair = if is_quoted && character == '\\' { characters.next() } else { None };
        is_quoted ^= character == '"';
        if let Some(part) = parts.last_mut() {
            part.push(character);
            part.extend(pair);
        }
    }
    parts
}

/// How a body is read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Content {
    Raw,
    Json,
    Multipart { media_type: String, boundary: String },
}

/// Only what is plainly one of the forms is read as one.
pub(super) fn content(types: &[&[u8]], encodings: &[&[u8]]) -> Content {
    let is_encoded = encodings.iter().any(|encoding| !encoding.eq_ignore_ascii_case(b"identity"));
    let (&[value], false) = (types, is_encoded) else { return Content::Raw };
    let Ok(text) = std::str::from_utf8(value) else { return Content::Raw };
    let (media_type, parameters) = text.find(';').map_or((text, ""), |at| (&text[..at], &text[at + 1..]));
    let media_type = trimmed(media_type).to_owned();
    let lower = media_type.to_ascii_lowercase();
    if lower == "application/json" || lower.ends_with("+json") {
        return Content::Json;
    }
    match boundary(parameters) {
        Some(boundary) if lower.starts_with("multipart/") => Content::Multipart { media_type, boundary },
        _ => Content::Raw,
    }
}

/// The boundary, if it is the only parameter (RFC 2046 section 5.1.1).
fn boundary(parameters: &str) -> Option<String> {
    let (name, value) = trimmed(parameters).split_once('=')?;
    let value = match value.as_bytes() {
        [b'"', .., b'"'] => &value[1..value.len() - 1],
        _ => value,
    };
    let is_plain = !value.is_empty() && value.chars().all(|character| !"\"\\;".contains(character));
    (is_plain && trimmed(name).eq_ignore_ascii_case("boundary")).then(|| value.to_owned())
}
