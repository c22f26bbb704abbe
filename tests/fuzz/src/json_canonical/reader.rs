//! A JSON reader (RFC 8259) that shares no code with the canonicaliser. It reads the whole text by recursion, and builds
//! strings from UTF-16, which rejects lone surrogates.

use std::collections::BTreeMap;

use super::value::Json;

/// The greatest depth of a document.
const DEEPEST: usize = 128;

type Read<'a, T> = Option<(T, &'a str)>;

/// Reads a document; `None` if the text is not JSON or an object repeats a name.
pub(super) fn read(text: &[u8]) -> Option<Json> {
    let text = std::str::from_utf8(text).ok()?;
    let (value, rest) = value(unspaced(text), 0)?;
    unspaced(rest).is_empty().then_some(value)
}

fn unspaced(text: &str) -> &str {
    text.trim_start_matches([' ', '\t', '\n', '\r'])
}

fn value(text: &str, depth: usize) -> Read<'_, Json> {
    match text.as_bytes().first()? {
        b'"' => string(text).map(|(string, rest)| (Json::String(string), rest)),
        b'[' | b'{' if depth == DEEPEST => None,
        b'[' => array(&text[1..], depth + 1),
        b'{' => object(&text[1..], depth + 1),
        b'-' | b'0'..=b'9' => number(text),
        _ => {
            let literal = ["true", "false", "null"].into_iter().find(|literal| text.starts_with(literal))?;
            Some((Json::Literal(literal), &text[literal.len()..]))
        }
    }
}

fn array(text: &str, depth: usize) -> Read<'_, Json> {
    let mut elements = Vec::new();
    if let Some(rest) = unspaced(text).strip_prefix(']') {
        return Some((Json::Array(elements), rest));
    }
    let mut text = text;
    loop {
        let (element, rest) = value(unspaced(text), depth)?;
        elements.push(element);
        match unspaced(rest).split_at_checked(1)? {
            (",", rest) => text = rest,
            ("]", rest) => return Some((Json::Array(elements), rest)),
            _ => return None,
        }
    }
}

fn object(text: &str, depth: usize) -> Read<'_, Json> {
    let mut members = BTreeMap::new();
    if let Some(rest) = unspaced(text).strip_prefix('}') {
        return Some((Json::Object(members), rest));
    }
    let mut text = text;
    loop {
        let (name, rest) = string(unspaced(text))?;
        let (member, rest) = value(unspaced(unspaced(rest).strip_prefix(':')?), depth)?;
        if members.insert(name, member).is_some() {
            return None;
        }
        match unspaced(rest).split_at_checked(1)? {
            (",", rest) => text = rest,
            ("}", rest) => return Some((Json::Object(members), rest)),
            _ => return None,
        }
    }
}

fn string(text: &str) -> Read<'_, String> {
    let mut units: Vec<u16> = Vec::new();
    let mut characters = text.strip_prefix('"')?.chars();
    loop {
        match characters.next()? {
            '"' => return Some((String::from_utf16(&units).ok()?, characters.as_str())),
            '\\' => units.push(escaped(&mut characters)?),
            '\0'..='\x1F' => return None,
            character => units.extend_from_slice(character.encode_utf16(&mut [0; 2])),
        }
    }
}

fn escaped(characters: &mut std::str::Chars<'_>) -> Option<u16> {
    let character = match characters.next()? {
        character @ ('"' | '\\' | '/') => character,
        'b' => '\x08',
        'f' => '\x0C',
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        'u' => {
            let digits: String = characters.by_ref().take(4).collect();
            let are_four = digits.len() == 4 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
            return are_four.then(|| u16::from_str_radix(&digits, 16).ok()).flatten();
        }
        _ => return None,
    };
    u16::try_from(u32::from(character)).ok()
}

fn number(text: &str) -> Read<'_, Json> {
    let rest = text.strip_prefix('-').unwrap_or(text);
    let mut rest = match rest.strip_prefix('0') {
        Some(rest) => rest,
        None => digits(rest)?,
    };
    if let Some(fraction) = rest.strip_prefix('.') {
        rest = digits(fraction)?;
    }
    if let Some(exponent) = rest.strip_prefix(['e', 'E']) {
        rest = digits(exponent.strip_prefix(['+', '-']).unwrap_or(exponent))?;
    }
    Some((Json::Number(text[..text.len() - rest.len()].to_owned()), rest))
}

/// Skips one digit or more.
fn digits(text: &str) -> Option<&str> {
    let rest = text.trim_start_matches(|character: char| character.is_ascii_digit());
    (rest.len() < text.len()).then_some(rest)
}
