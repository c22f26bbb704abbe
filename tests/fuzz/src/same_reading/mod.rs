//! Whether the parsers that handlers use agree with fingerprints: requests with the same fingerprint are the same to each of
//! them.
//!
//! An input is choices by which two requests are made that are nearly the same, of JSON or of multipart.

mod json;
mod multipart;

use arbitrary::{Result, Unstructured};
use idem_core::Fingerprint;

use crate::request;

/// A request as far as it can differ here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sent {
    content_type: String,
    body: Vec<u8>,
}

pub(crate) fn check(input: &[u8]) {
    let mut input = Unstructured::new(input);
    // What is too short for a choice says nothing.
    let _ = tried(&mut input);
}

fn tried(input: &mut Unstructured<'_>) -> Result<()> {
    if input.ratio(1, 3)? {
        let (one, other) = json::two(input)?;
        agree(&one, &other, json::READERS);
    } else {
        let (one, other) = multipart::two(input)?;
        agree(&one, &other, multipart::READERS);
    }
    Ok(())
}

/// A parser, and what it makes of a request; an error and all that it has given out before are a part of that.
type Reader = (&'static str, fn(&Sent) -> String);

fn agree(one: &Sent, other: &Sent, readers: &[Reader]) {
    if one == other || fingerprint(one) != fingerprint(other) {
        return;
    }
    for (name, read) in readers {
        let (of_one, of_other) = (read(one), read(other));
        assert_eq!(of_one, of_other, "{name} tells them apart:\n{one:?}\n{other:?}");
    }
}

fn fingerprint(sent: &Sent) -> Fingerprint {
    let headers: [(&str, &[u8]); 2] = [("idempotency-key", b"k"), ("content-type", sent.content_type.as_bytes())];
    request::fingerprint(None, &headers, &sent.body)
}

/// Does some things to a body, of which most parsers take notice and some fingerprints might not.
fn changed(mut body: Vec<u8>, pieces: &[&[u8]], input: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    for _ in 0..input.int_in_range(0..=2)? {
        let at = input.int_in_range(0..=body.len())?;
        let end = input.int_in_range(at..=body.len().min(at + 2))?;
        let piece = *input.choose(pieces)?;
        body.splice(at..end, piece.iter().copied());
    }
    Ok(body)
}
