//! Fuzzes the header fields of a request that decide its key, its waiting time, and the format of its body.
//!
//! An input is a block of header lines, `name: value`. A line without a colon is the value of a key.

mod expected;

use std::time::Duration;

use idem_core::{BodyFormat, FingerprintBuilder, IdempotencyKey};
use idem_http::{Decision, HeaderFields, KeyHeaderError, ProblemKind, parse_key_header};

use crate::request::{decision, fingerprint};

use expected::{Content, Key};

const KEY: &str = "idempotency-key";

type Field<'a> = (&'a str, &'a [u8]);

pub(crate) fn check(input: &[u8]) {
    let lines: Vec<(String, &[u8])> = input.split(|&byte| byte == b'\n').map(line).collect();
    let fields: Vec<Field<'_>> = lines.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    the_key_is_what_the_lines_say(&fields);
    the_wait_is_what_the_lines_say(&fields);
    the_fingerprint_is_what_the_lines_say(&fields);
}

fn line(line: &[u8]) -> (String, &[u8]) {
    let colon = line.iter().position(|&byte| byte == b':');
    let named = colon.and_then(|colon| Some((std::str::from_utf8(&line[..colon]).ok()?, &line[colon + 1..])));
    named.map_or((KEY.to_owned(), line), |(name, value)| (name.trim().to_ascii_lowercase(), value))
}

fn values<'a>(fields: &'a [Field<'a>], name: &'a str) -> Vec<&'a [u8]> {
    fields.values(name).collect()
}

fn parse(values: &[&[u8]]) -> Result<Option<IdempotencyKey>, KeyHeaderError> {
    parse_key_header(values.iter().copied())
}

fn the_key_is_what_the_lines_say(fields: &[Field<'_>]) {
    let values = values(fields, KEY);
    let undeclared: Vec<Field<'_>> = fields.iter().copied().filter(|(name, _)| *name != "content-length").collect();
    let decision = decision(None, &undeclared);
    match parse(&values) {
        Ok(None) => {
            assert!(values.is_empty(), "a key was overlooked");
            assert!(matches!(decision, Decision::Refuse(reply) if reply.problem == Some(ProblemKind::KeyMissing)));
        }
        Ok(Some(key)) => {
            let expected = expected::key(&values);
            assert!(expected == Key::Either || expected == Key::Is(key.as_str().into()), "{expected:?}");
            assert!(matches!(decision, Decision::Receive(_)));
            the_key_is_the_same_however_it_is_written(&key);
        }
        Err(error) => {
            assert!(!matches!(expected::key(&values), Key::Is(_)), "a key was refused: {error}");
            assert!(!error.to_string().is_empty());
            assert!(matches!(decision, Decision::Refuse(reply) if reply.problem == Some(ProblemKind::KeyInvalid)));
        }
    }
}

fn the_key_is_the_same_however_it_is_written(key: &IdempotencyKey) {
    let text = key.as_str();
    assert!((1..=255).contains(&text.len()) && text.bytes().all(|byte| (0x21..=0x7E).contains(&byte)), "{text:?}");
    let quoted = format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""));
    let spaced = format!("\t {quoted} \t");
    for written in [&quoted, &spaced] {
        assert_eq!(parse(&[written.as_bytes()]).as_ref(), Ok(&Some(key.clone())), "{written:?}");
    }
    match parse(&[text.as_bytes()]) {
        Ok(bare) => assert!(bare.as_ref() == Some(key) || text.starts_with('"'), "{text:?}"),
        Err(error) => assert!(text.contains(',') || text.starts_with('"'), "{text:?}: {error}"),
    }
    let twice = [quoted.as_bytes(), quoted.as_bytes()];
    assert_eq!(parse(&twice), Err(KeyHeaderError::Repeated));
}

fn the_wait_is_what_the_lines_say(fields: &[Field<'_>]) {
    let values = values(fields, "prefer");
    let wait = crate::prefer::wait(values.iter().copied());
    assert_eq!(wait, expected::wait(&values).map(Duration::from_secs));
}

/// The fields in the fingerprint besides `Content-Type`.
const COUNTED: [&str; 12] = [
    "content-encoding",
    "content-language",
    "content-location",
    "content-disposition",
    "content-range",
    "if-match",
    "if-none-match",
    "if-modified-since",
    "if-unmodified-since",
    "x-http-method-override",
    "x-http-method",
    "x-method-override",
];

/// Checks that the fingerprint covers method, path, query and the listed fields, then the body in the format of its content
/// type.
fn the_fingerprint_is_what_the_lines_say(fields: &[Field<'_>]) {
    const BODY: &[u8] = b"--b\r\n\r\n1\r\n--b--";
    let mut fields: Vec<Field<'_>> =
        fields.iter().copied().filter(|(name, _)| ![KEY, "content-length"].contains(name)).collect();
    fields.push((KEY, b"k"));
    let (types, encodings) = (values(&fields, "content-type"), values(&fields, "content-encoding"));
    let content = expected::content(&types, &encodings);
    let format = match &content {
        Content::Raw => BodyFormat::Raw,
        Content::Json => BodyFormat::json(),
        Content::Multipart { boundary, .. } => BodyFormat::multipart(boundary.as_bytes()),
    };
    let body = match &content {
        Content::Raw | Content::Json => b" {\"b\" : 1, \"a\":\t2}".to_vec(),
        Content::Multipart { boundary, .. } => {
            BODY.split(|byte| *byte == b'b').collect::<Vec<_>>().join(boundary.as_bytes())
        }
    };
    let mut builder = FingerprintBuilder::new(format);
    builder.field("method", b"POST");
    builder.field("path", b"/pay");
    builder.field("query", b"a=1");
    match &content {
        Content::Multipart { media_type, .. } => builder.field("content-type", media_type.as_bytes()),
        _ => types.iter().for_each(|value| builder.field("content-type", value)),
    }
    let others = COUNTED.iter().flat_map(|name| values(&fields, name).into_iter().map(move |value| (*name, value)));
    others.for_each(|(name, value)| builder.field(name, value));
    builder.body(&body);
    assert_eq!(fingerprint(Some("a=1"), &fields, &body), builder.finish(), "{content:?}");
}
