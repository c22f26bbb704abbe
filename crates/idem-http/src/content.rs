//! How a request body is read for its fingerprint, by its content type.

use std::sync::Arc;

use idem_core::{BodyFormat, JsonPointer};

/// The format of a body, and the content type as the fingerprint sees it.
pub(crate) struct Content<'a> {
    pub(crate) format: BodyFormat,
    /// What replaces the content type in the fingerprint: for multipart it has no boundary, which clients make anew
    /// for every try.
    pub(crate) content_type: Option<&'a [u8]>,
}

/// Reads the content fields. Whatever is unusual makes the body raw: then it counts byte for byte.
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
    let media_type = media_type.trim_matches(BLANKS);
    let lower = media_type.to_ascii_lowercase();
    if lower == "application/json" || lower.ends_with("+json") {
        return Content { format: BodyFormat::Json { ignored: Arc::clone(ignored) }, content_type: None };
    }
    match lower.starts_with("multipart/").then(|| boundary(parameters)).flatten() {
        Some(boundary) => {
            Content { format: BodyFormat::multipart(boundary.as_bytes()), content_type: Some(media_type.as_bytes()) }
        }
        None => raw,
    }
}

/// Optional white space (RFC 9110 section 5.6.3); Unicode knows more, which no handler takes for a space.
const BLANKS: [char; 2] = [' ', '\t'];

/// The boundary, when it is the only parameter and plainly written.
fn boundary(parameters: &str) -> Option<&str> {
    let (name, value) = parameters.trim_matches(BLANKS).split_once('=')?;
    let value = value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value);
    let plain = !value.is_empty() && !value.contains(['"', '\\', ';']);
    (name.trim_matches(BLANKS).eq_ignore_ascii_case("boundary") && plain).then_some(value)
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
        for json in ["application/json", "Application/JSON; charset=utf-8", "application/merge-patch+json"] {
            assert_eq!(format_of(&[json], &[]), BodyFormat::json(), "{json}");
        }
        assert_eq!(format_of(&["application/json"], &["identity"]), BodyFormat::json());
    }

    #[test]
    fn the_boundary_of_multipart_is_found_and_left_out() {
        for value in ["multipart/form-data; boundary=b1", "multipart/form-data;Boundary=\"b1\""] {
            let content = content(&[value.as_bytes()], std::iter::empty::<&[u8]>(), &Arc::from([]));
            assert_eq!(content.format, BodyFormat::multipart(*b"b1"), "{value}");
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
        for (content_types, encodings) in unusual {
            assert_eq!(format_of(content_types, encodings), BodyFormat::Raw, "{content_types:?} {encodings:?}");
        }
    }
}
