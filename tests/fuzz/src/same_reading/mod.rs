//! Checks that parsers of handlers agree with fingerprints: they must read two requests with the same fingerprint alike.
//!
//! An input is a list of choices that generate two similar requests, with JSON or with multipart.

mod json;
mod multipart;

use arbitrary::{Result, Unstructured};
use idem_core::Fingerprint;

use crate::request;

/// The varying parts of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sent {
    content_type: String,
    body: Vec<u8>,
}

pub(crate) fn check(input: &[u8]) {
    let mut input = Unstructured::new(input);
    // An input that ends too soon tests nothing.
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

/// A parser and its result for a request, including its error and what it returned before the error.
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

/// Makes small changes to a body that most parsers notice, and some fingerprints might not.
fn changed(mut body: Vec<u8>, pieces: &[&[u8]], input: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    for _ in 0..input.int_in_range(0..=2)? {
        let at = input.int_in_range(0..=body.len())?;
        let end = input.int_in_range(at..=body.len().min(at + 2))?;
        let piece = *input.choose(pieces)?;
        body.splice(at..end, piece.iter().copied());
    }
    Ok(body)
}
