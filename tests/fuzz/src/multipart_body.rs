//! Compares the fingerprint of a multipart body with a reader that has the whole body at once.
//!
//! An input is a boundary, a line feed, and a body.

use idem_core::{BodyFormat, Fingerprint, FingerprintBuilder};

use crate::choices::Choices;

/// A second boundary, with which a body is rewritten.
const OTHER: &[u8] = b"~~~ another boundary, which stands in no body ~~~";

pub(crate) fn check(input: &[u8]) {
    let line = input.iter().position(|&byte| byte == b'\n').unwrap_or(input.len());
    let (boundary, body) = (&input[..line], input.get(line + 1..).unwrap_or_default());
    let mut choices = Choices::of(input);
    let fingerprint = of(boundary, body, usize::MAX);
    assert_eq!(of(boundary, body, 1 + choices.below(80)), fingerprint, "it matters how the body is cut");
    let is_raw = fingerprint == raw(boundary, body);
    match parts(boundary, body) {
        None => assert!(is_raw, "a doubtful body is not raw"),
        Some(_) if is_raw => panic!("a plain body is raw"),
        // The second boundary would split the body elsewhere.
        Some(_) if body.windows(OTHER.len()).any(|window| window == OTHER) => {}
        Some(parts) => {
            the_boundary_does_not_matter(&parts, &fingerprint);
            every_part_matters(&parts, &fingerprint, &mut choices);
        }
    }
}

fn of(boundary: &[u8], body: &[u8], chunk: usize) -> Fingerprint {
    let mut builder = FingerprintBuilder::new(BodyFormat::multipart(boundary));
    builder.field("operation", b"pay");
    body.chunks(chunk).for_each(|chunk| builder.body(chunk));
    builder.finish()
}

/// The fingerprint of the bytes and the boundary.
fn raw(boundary: &[u8], body: &[u8]) -> Fingerprint {
    let mut builder = FingerprintBuilder::new(BodyFormat::Raw);
    builder.field("operation", b"pay");
    builder.field("boundary", boundary);
    builder.body(body);
    builder.finish()
}

/// The parts of a plain body, each with the line break before it; `None` if it is not plain (RFC 2046 section 5.1).
fn parts<'a>(boundary: &[u8], body: &'a [u8]) -> Option<Vec<&'a [u8]>> {
    if boundary.is_empty() || boundary.len() > 70 {
        return None;
    }
    let delimiter = [b"\r\n--", boundary].concat();
    let mut rest = body.strip_prefix(&delimiter[2..])?;
    let mut parts = Vec::new();
    loop {
        if let Some(epilogue) = rest.strip_prefix(b"--") {
            return (epilogue.is_empty() || epilogue == b"\r\n").then_some(parts);
        }
        if !rest.starts_with(b"\r\n") {
            return None;
        }
        let end = rest.windows(delimiter.len()).position(|window| window == delimiter)?;
        // Some parsers also end a part if the boundary is not at the start of a line.
        let dashes = &delimiter[2..];
        if rest[..end + 1 + dashes.len()].windows(dashes.len()).any(|window| window == dashes) {
            return None;
        }
        // If a part has no header or its end is missing, some parsers take the delimiter for content.
        if rest[..end].windows(4).position(|window| window == b"\r\n\r\n").is_none_or(|at| at == 0) {
            return None;
        }
        parts.push(&rest[..end]);
        rest = &rest[end + delimiter.len()..];
    }
}

fn written(parts: &[&[u8]]) -> Vec<u8> {
    let mut body = [b"--", OTHER].concat();
    for part in parts {
        body.extend([part, b"\r\n--".as_slice(), OTHER].concat());
    }
    body.extend(b"--\r\n");
    body
}

fn the_boundary_does_not_matter(parts: &[&[u8]], fingerprint: &Fingerprint) {
    let body = written(parts);
    assert_eq!(of(OTHER, &body, usize::MAX), *fingerprint, "the boundary matters");
}

fn every_part_matters(parts: &[&[u8]], fingerprint: &Fingerprint, choices: &mut Choices) {
    let mut more = parts.to_vec();
    more.insert(choices.below(parts.len() + 1), b"\r\nname: value\r\n\r\n");
    assert_ne!(of(OTHER, &written(&more), usize::MAX), *fingerprint, "a further part does not matter");
    let at = choices.below(parts.len());
    let Some(part) = parts.get(at) else { return };
    let longer = [part, b"x".as_slice()].concat();
    let mut others = parts.to_vec();
    others[at] = &longer;
    assert_ne!(of(OTHER, &written(&others), usize::MAX), *fingerprint, "what a part says does not matter");
    let mut fewer = parts.to_vec();
    fewer.remove(at);
    assert_ne!(of(OTHER, &written(&fewer), usize::MAX), *fingerprint, "a part that is missing does not matter");
}
