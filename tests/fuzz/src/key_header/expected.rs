//! Reads header lines by their specifications, independently of the tested code.

/// The result of reading the lines of the key header.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Key {
    Is(Vec<u8>),
    None,
    /// A parameter is base64 or percent-encoded text, which this oracle does not validate.
    Either,
}

/// The only key in these lines (draft-ietf-httpapi-idempotency-key-header, RFC 9651 section 4.2.3).
pub(super) fn key(values: &[&[u8]]) -> Key {
    let &[value] = values else { return Key::None };
    let key = match without_blanks(value) {
        [b'"', quoted @ ..] => {
            let Some(end) = closing_quote(quoted) else { return Key::None };
            let (quoted, parameters) = (&quoted[..end], &quoted[end + 1..]);
            // A String has visible characters and spaces only.
            let Some(key) = unescaped(quoted).filter(|key| key.iter().all(|byte| (b' '..=b'~').contains(byte))) else {
                return Key::None;
            };
            match are_parameters(parameters) {
                Some(true) => key,
                Some(false) => return Key::None,
                None => return Key::Either,
            }
        }
        bare if bare.contains(&b',') => return Key::None,
        bare => bare.to_vec(),
    };
    let is_key = !key.is_empty() && key.len() <= 255 && key.iter().all(|byte| (b'!'..=b'~').contains(byte));
    if is_key { Key::Is(key) } else { Key::None }
}

/// The position of the quote that closes the string.
fn closing_quote(text: &[u8]) -> Option<usize> {
    let mut at = 0;
    while *text.get(at)? != b'"' {
        at += if text[at] == b'\\' { 2 } else { 1 };
    }
    Some(at)
}

/// Whether this is a sequence of parameters and spaces; `None` if this oracle does not validate it.
fn are_parameters(mut text: &[u8]) -> Option<bool> {
    while let [b';', rest @ ..] = text {
        let rest = &rest[rest.iter().take_while(|&&byte| byte == b' ').count()..];
        if !matches!(rest.first(), Some(b'a'..=b'z' | b'*')) {
            return Some(false);
        }
        let is_in_name = |byte: &&u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' | b'.' | b'*');
        text = &rest[rest.iter().take_while(is_in_name).count()..];
        if let [b'=', value @ ..] = text {
            let Some(length) = bare_item(value)? else { return Some(false) };
            text = &value[length..];
        }
    }
    Some(text.iter().all(|&byte| byte == b' '))
}

/// The length of the bare item at the start of a text. The inner `None` means that there is none, the outer `None` that this
/// oracle does not validate it.
#[expect(clippy::option_option, reason = "there are three answers")]
fn bare_item(text: &[u8]) -> Option<Option<usize>> {
    Some(match text {
        [b':' | b'%', ..] => return None,
        [b'?', b'0' | b'1', ..] => Some(2),
        [b'@', number @ ..] => {
            number_length(number).filter(|length| !number[..*length].contains(&b'.')).map(|it| it + 1)
        }
        [b'-' | b'0'..=b'9', ..] => number_length(text),
        [b'"', quoted @ ..] => closing_quote(quoted).and_then(|end| {
            let inner = &quoted[..end];
            let is_string = unescaped(inner).is_some() && inner.iter().all(|byte| (b' '..=b'~').contains(byte));
            is_string.then_some(end + 2)
        }),
        [b'*' | b'a'..=b'z' | b'A'..=b'Z', ..] => {
            let is_in_token = |byte: &&u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~:/".contains(byte);
            Some(text.iter().take_while(is_in_token).count())
        }
        _ => None,
    })
}

/// The length of the number (RFC 9651 section 4.2.4).
fn number_length(text: &[u8]) -> Option<usize> {
    let digits = |text: &[u8]| text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let sign = usize::from(text.first() == Some(&b'-'));
    let whole = digits(&text[sign..]);
    if text.get(sign + whole) == Some(&b'.') {
        let fraction = digits(&text[sign + whole + 1..]);
        return ((1..=12).contains(&whole) && (1..=3).contains(&fraction)).then_some(sign + whole + 1 + fraction);
    }
    (1..=15).contains(&whole).then_some(sign + whole)
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

/// Removes optional white space (RFC 9110 section 5.6.3) around a value.
fn without_blanks(mut value: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = value {
        value = rest;
    }
    value
}

fn trimmed(text: &str) -> &str {
    text.trim_matches([' ', '\t'])
}

/// The seconds of the first `wait` preference (RFC 7240 sections 2 and 4.3). Lines that are not text are ignored.
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

/// Splits a text at separators outside quoted strings (RFC 9110 section 5.6.4).
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

/// The format as which a body is read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Content {
    Raw,
    Json,
    Multipart { media_type: String, boundary: String },
}

/// Recognizes only plain forms.
pub(super) fn content(types: &[&[u8]], encodings: &[&[u8]]) -> Content {
    let is_encoded = encodings.iter().any(|encoding| !encoding.eq_ignore_ascii_case(b"identity"));
    let (&[value], false) = (types, is_encoded) else { return Content::Raw };
    let Ok(text) = std::str::from_utf8(value) else { return Content::Raw };
    let (media_type, parameters) = text.find(';').map_or((text, ""), |at| (&text[..at], &text[at + 1..]));
    if media_type.contains([' ', '\t']) {
        return Content::Raw;
    }
    let (media_type, lower) = (media_type.to_owned(), media_type.to_ascii_lowercase());
    if lower == "application/json" || lower.ends_with("+json") {
        let charsets = parameters.split(';').map(trimmed).filter(|it| it.to_ascii_lowercase().contains("charset"));
        let is_utf_8 = |it: &str| {
            let value = it.split_at_checked(8).filter(|(name, _)| name.eq_ignore_ascii_case("charset="));
            value.is_some_and(|(_, value)| ["utf-8", "\"utf-8\""].iter().any(|it| it.eq_ignore_ascii_case(value)))
        };
        return if charsets.into_iter().all(is_utf_8) { Content::Json } else { Content::Raw };
    }
    match boundary(parameters) {
        Some(boundary) if lower.starts_with("multipart/") => Content::Multipart { media_type, boundary },
        _ => Content::Raw,
    }
}

/// The boundary, if it is the only parameter (RFC 2046 section 5.1.1).
fn boundary(parameters: &str) -> Option<String> {
    let (name, value) = parameters.trim_start_matches([' ', '\t']).split_once('=')?;
    let (value, is_quoted) = match value.as_bytes() {
        [b'"', quoted @ .., b'"'] => (quoted, true),
        bare => (bare, false),
    };
    let is_plain = |&byte: &u8| match byte {
        b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' | b'\'' | b'+' | b'-' | b'.' | b'_' => true,
        b'=' | b'(' | b')' | b'/' | b',' | b':' | b'?' => is_quoted,
        _ => false,
    };
    let is_boundary = name.eq_ignore_ascii_case("boundary")
        && value.last().is_some_and(|&last| last != b'-')
        && value.iter().all(is_plain);
    is_boundary.then(|| String::from_utf8_lossy(value).into_owned())
}
