//! How a request body is read for its fingerprint, by its content type.

use std::sync::Arc;

use idem_core::{BodyFormat, JsonPointer};

use crate::syntax::{BLANKS, unquoted};

/// The format of a body, and the content type as the fingerprint sees it.
pub(crate) struct Content<'a> {
    pub(crate) format: BodyFormat,
    /// Replaces the content type in the fingerprint. For multipart it lacks the boundary, which clients generate anew for
    /// every attempt.
    pub(crate) content_type: Option<&'a [u8]>,
}

/// Reads the content fields. If they are unusual, the body is raw: its fingerprint covers it byte for byte.
pub(crate) fn content<'a>(
    content_types: &[&'a [u8]],
    mut encodings: impl Iterator<Item = impl AsRef<[u8]>>,
    ignored: &Arc<[JsonPointer]>,
) -> Content<'a> {
    let raw = Content { format: BodyFormat::Raw, content_type: None };
    let encoded = encodings.any(|encoding| !encoding.as_ref().eq_ignore_ascii_case(b"identity"));
    let (&[content_type], false) = (content_types, encoded) else { return raw };
    let Ok(text) = std::str::from_utf8(content_type) else { return raw };
    let (media_type, parameters) = text.split_once(';').unwrap_or((text, ""));
    // Parsers disagree on media types with blanks.
    if media_type.contains(BLANKS) {
        return raw;
    }
    let lower = media_type.to_ascii_lowercase();
    if (lower == "application/json" || lower.ends_with("+json")) && is_utf_8(parameters) {
        return Content { format: BodyFormat::Json { ignored: Arc::clone(ignored) }, content_type: None };
    }
    match lower.starts_with("multipart/").then(|| boundary(parameters)).flatten() {
        Some(boundary) => {
            Content { format: BodyFormat::multipart(boundary.as_bytes()), content_type: Some(media_type.as_bytes()) }
        }
        None => raw,
    }
}

/// Whether the parameters name no charset but UTF-8. A handler that obeys another charset reads other characters than the
/// fingerprint covers.
fn is_utf_8(parameters: &str) -> bool {
    let mut parameters = parameters.split(';').map(|parameter| parameter.trim_matches(BLANKS).to_ascii_lowercase());
    parameters.all(|parameter| {
        !parameter.contains("charset") || ["charset=utf-8", "charset=\"utf-8\""].contains(&parameter.as_str())
    })
}

/// The boundary, if it is the only parameter and all parsers read it alike. An unquoted one consists of letters, digits and
/// `'+-._`. A quoted one may also have the other characters of RFC 2046 section 5.1.1, except the space.
fn boundary(parameters: &str) -> Option<&str> {
    let (name, value) = parameters.trim_start_matches(BLANKS).split_once('=')?;
    let (value, others) = match unquoted(value) {
        Some(quoted) => (quoted, "'+-._=()/,:?"),
        None => (value, "'+-._"),
    };
    let is_plain = value.chars().all(|character| character.is_ascii_alphanumeric() || others.contains(character));
    // A final hyphen may belong to the closing delimiter.
    let is_plain = is_plain && !value.is_empty() && !value.ends_with('-');
    (name.eq_ignore_ascii_case("boundary") && is_plain).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn format_of(content_types: &[&str], encodings: &[&str]) -> BodyFormat {
        let content_types: Vec<&[u8]> = content_types.iter().map(|value| value.as_bytes()).collect();
        content(&content_types, encodings.iter(), &Arc::from([])).format
    }

    #[test]
    fn json_is_recognised_by_its_media_type() {
        for json in [
            "application/json",
            "Application/JSON; charset=utf-8",
            "application/json;Charset=\"UTF-8\"",
            "application/vnd.api+json; profile=\"https://example.com\"; version=1",
            "application/merge-patch+json",
        ] {
            assert_eq!(format_of(&[json], &[]), BodyFormat::json(), "{json}");
        }
        assert_eq!(format_of(&["application/json"], &["identity"]), BodyFormat::json());
    }

    #[test]
    fn the_boundary_of_multipart_is_found_and_left_out() {
        for (value, boundary) in [
            ("multipart/form-data; boundary=b1", "b1"),
            ("multipart/form-data;Boundary=\"b1\"", "b1"),
            ("multipart/form-data; boundary=----WebKitFormBoundaryAb1", "----WebKitFormBoundaryAb1"),
            ("multipart/form-data; boundary=\"===============12==\"", "===============12=="),
            ("multipart/form-data; boundary=\"=_Part:(1/2)?,'+\"", "=_Part:(1/2)?,'+"),
        ] {
            let content = content(&[value.as_bytes()], std::iter::empty::<&[u8]>(), &Arc::from([]));
            assert_eq!(content.format, BodyFormat::multipart(boundary.as_bytes()), "{value}");
            assert_eq!(content.content_type, Some(b"multipart/form-data".as_slice()));
        }
    }

    #[test]
    fn whatever_is_unusual_is_raw() {
        let unusual: [(&[&str], &[&str]); 10] = [
            (&[], &[]),
            (&["text/plain"], &[]),
            (&["application/json"], &["gzip"]),
            (&["application/json", "application/json"], &[]),
            (&["\u{a0}application/json"], &[]),
            (&["multipart/form-data;\u{a0}boundary=b"], &[]),
            (&["multipart/form-data"], &[]),
            (&["multipart/form-data; boundary="], &[]),
            (&["multipart/form-data; boundary=b; charset=x"], &[]),
            (&["multipart/form-data; boundary=\"a\\\"b\""], &[]),
        ];
        let parameters = [
            ("multipart/form-data", " boundary =b"),
            ("multipart/form-data", " boundary= b"),
            ("multipart/form-data", " boundary=b "),
            ("multipart/form-data", " boundary=\" b\""),
            ("multipart/form-data", " boundary=\"b"),
            ("multipart/form-data", " boundary=a=b"),
            ("multipart/form-data", " boundary=\"\""),
            ("multipart/form-data", " boundary=--"),
            ("multipart/form-data", " boundary=b-"),
            ("multipart/form-data ", " boundary=b"),
            ("application/json", " charset=utf-16"),
            ("application/json", " charset=\"UTF-16LE\""),
            ("application/json", " charset = utf-8"),
            ("application/json", " charset=utf-8; charset=utf-16"),
            ("application/json", " charset*=utf-16''x"),
            ("application/json", " CHARSET=latin1"),
            ("application/problem+json", " profile=\"x\";charset=utf-7"),
            ("application/json ", " charset=utf-8"),
        ];
        for (media_type, parameters) in parameters {
            let value = format!("{media_type};{parameters}");
            assert_eq!(format_of(&[&value], &[]), BodyFormat::Raw, "{value:?}");
        }
        for (content_types, encodings) in unusual {
            assert_eq!(format_of(content_types, encodings), BodyFormat::Raw, "{content_types:?} {encodings:?}");
        }
    }
}
