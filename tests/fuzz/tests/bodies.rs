//! Measures the memory of a request body while it is open and after its end, by kind, with a counting allocator.

use std::cell::Cell;
use std::num::NonZeroUsize;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

use bytes::Bytes;
use futures_util::{FutureExt, stream};
use idem_core::MemoryStore;
use idem_core::engine::{Idempotency, Settings};
use idem_fuzz_oracles::{Choices, taken};
use idem_http::{BodyError, Decision, IncomingRequest, Protection, RequestHead, SingleTenant};
use tokio::runtime::Builder;

const LENGTH: usize = 1 << 20;

/// The memory of an open body besides its bytes: short chunks that are being joined, and the list of the others.
const OPEN_BYTES: usize = 256 << 10;

/// The peak at the end for each byte of the body, including the copies of growing vectors.
const AT_THE_END: usize = 5;

/// The additional peak at the end for any body: the members of open objects, and their vector before it grew.
const MEMBERS_BYTES: usize = 3 << 19;

type Kind = (&'static str, &'static str, fn(usize) -> String);

/// Names, content types, and the repeated content.
const KINDS: [Kind; 9] = [
    ("raw", "text/plain", |_| "x".repeat(64)),
    ("text", "application/json", |_| "\\u00e9\\n\u{e9}abc".to_owned()),
    ("ordinary", "application/json", |at| format!(r#"{{"article": "A-{at:06}", "price": "12.50", "count": {at}}}, "#)),
    ("members", "application/json", |at| format!("\"{at:x}\":1,")),
    ("unsorted members", "application/json", |at| format!("\"{:x}\":1,", at.wrapping_mul(2_654_435_761) % (1 << 20))),
    ("the same members", "application/json", |_| "\"\":1,\"a\":1,".to_owned()),
    ("deep", "application/json", |_| format!("{}1{},", "{\"b\":".repeat(126), ",\"a\":1}".repeat(126))),
    ("numbers", "application/json", |_| "1,".to_owned()),
    ("parts", "multipart/form-data; boundary=b", |_| "\r\n--b\r\n".to_owned()),
];

fn body((name, content_type, item): Kind) -> Vec<u8> {
    let (begin, end) = match (name, content_type) {
        ("text", _) => ("\"", "\""),
        (_, "application/json") if name.contains("members") => ("{", "\"x\":1}"),
        (_, "application/json") => ("[", "1]"),
        (_, "text/plain") => ("", ""),
        _ => ("--b\r\n\r\n", "\r\n--b--"),
    };
    let mut text = begin.to_owned();
    let mut at = 0;
    while text.len() < LENGTH - 2_048 {
        text.push_str(&item(at));
        at += 1;
    }
    (text + end).into_bytes()
}

fn open(protection: &Protection<SingleTenant>, content_type: &str) -> Box<IncomingRequest> {
    let headers: [(&str, &[u8]); 2] = [("idempotency-key", b"k"), ("content-type", content_type.as_bytes())];
    let head = RequestHead {
        method: "POST",
        authority: None,
        path: "/",
        query: None,
        route: None,
        headers: &headers[..],
        is_protected: false,
    };
    match protection.decide(&(), &head) {
        Decision::Receive(incoming) => incoming,
        decision => panic!("a request with a key is not protected: {decision:?}"),
    }
}

/// Splits a body into chunks of `longest` bytes, or of random lengths if that is 20,000.
fn cut<'a>(mut body: &'a [u8], longest: usize, choices: &mut Choices) -> Vec<&'a [u8]> {
    let mut chunks = Vec::new();
    while !body.is_empty() {
        let length = if longest == 20_000 { 1 + choices.below(longest) } else { longest };
        let (chunk, rest) = body.split_at(length.min(body.len()));
        chunks.push(chunk);
        body = rest;
    }
    chunks
}

/// This file has one test, because a second one would be measured with it.
#[test]
fn a_body_takes_its_length_while_it_is_open_and_a_multiple_for_a_moment_at_its_end() {
    let store = Arc::new(MemoryStore::new(NonZeroUsize::MIN));
    let protection = Protection::new(Idempotency::at_least_once(store, Settings::new())).single_tenant();
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    let _entered = runtime.enter();
    for kind in KINDS {
        let (name, content_type, _) = kind;
        let body = body(kind);
        let mut choices = Choices::of(name.as_bytes());
        // Single bytes, chunks that are just copied and just not, random lengths, and one whole chunk.
        for longest in [1, 100, 4_095, 4_096, 20_000, LENGTH] {
            let mut chunks = cut(&body, longest, &mut choices).into_iter();
            let has_ended = Rc::new(Cell::new(false));
            let ended = Rc::clone(&has_ended);
            let arriving = stream::poll_fn(move |_| match chunks.next() {
                Some(chunk) => Poll::Ready(Some(Ok::<_, BodyError>(Bytes::copy_from_slice(chunk)))),
                None if ended.get() => Poll::Ready(None),
                None => Poll::Pending,
            });
            let pushed = || {
                let mut receiving = Box::pin(protection.receive(open(&protection, content_type), arriving));
                assert!(receiving.as_mut().now_or_never().is_none(), "the body has not ended");
                receiving
            };
            let (receiving, held) = taken(pushed);
            let shown = format!("{name} in chunks of {longest}");
            assert!(held.after <= body.len() + OPEN_BYTES, "{shown}: {} bytes take {}", body.len(), held.after);
            has_ended.set(true);
            let (received, at_end) = taken(move || receiving.now_or_never().unwrap().unwrap());
            let allowed = AT_THE_END * body.len() + MEMBERS_BYTES;
            assert!(at_end.peak <= allowed, "{shown}: the end takes {} more", at_end.peak);
            assert_eq!(received.chunks.concat(), body, "{shown}");
            if longest == 1 {
                println!("{name}: {} bytes take {} and then {} more", body.len(), held.after, at_end.peak);
            }
        }
    }
}
