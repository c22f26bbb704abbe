//! What a request body takes of memory while it is open and when it has ended, by kind, against an allocator that counts.

use bytes::Bytes;
use idem_fuzz_oracles::{Choices, taken};
use idem_http::{HttpPolicy, Inspection, RequestBuffer};

const LENGTH: usize = 1 << 20;

/// What an open body may take besides its bytes: short chunks that are being joined, and the list of the others.
const OPEN_BYTES: usize = 256 << 10;

/// What a fingerprint may take at its end for each byte of the body, growing vectors that are copied included.
const AT_THE_END: usize = 5;

/// What it may take at its end whatever the body: the members of open objects, and the vector of them before it grew.
const MEMBERS_BYTES: usize = 3 << 19;

type Kind = (&'static str, &'static str, fn(usize) -> String);

/// Names, content types, and what is repeated after a beginning.
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

fn open(content_type: &str) -> RequestBuffer {
    let policy = HttpPolicy::new();
    let headers: [(&str, &[u8]); 2] = [("idempotency-key", b"k"), ("content-type", content_type.as_bytes())];
    let Inspection::Protect(request) = policy.inspect("POST", None, "/", None, &headers[..]) else {
        panic!("a request with a key is not protected")
    };
    request.buffer(&policy, Some("acme")).1
}

/// One test, as another would be counted with it.
#[test]
fn a_body_takes_its_length_while_it_is_open_and_a_multiple_for_a_moment_at_its_end() {
    for kind in KINDS {
        let (name, content_type, _) = kind;
        let body = body(kind);
        let mut choices = Choices::of(name.as_bytes());
        // Byte by byte, in chunks that are copied, that are just not, of any length, and as one.
        for longest in [1, 100, 4_095, 4_096, 20_000, LENGTH] {
            let pushed = || {
                let (mut buffer, mut rest) = (open(content_type), body.as_slice());
                while !rest.is_empty() {
                    let length = if longest == 20_000 { 1 + choices.below(longest) } else { longest };
                    let (chunk, after) = rest.split_at(length.min(rest.len()));
                    buffer.push(Bytes::copy_from_slice(chunk)).unwrap();
                    rest = after;
                }
                buffer
            };
            let (buffer, held) = taken(pushed);
            let shown = format!("{name} in chunks of {longest}");
            assert!(held.after <= body.len() + OPEN_BYTES, "{shown}: {} bytes take {}", body.len(), held.after);
            let (whole, ended) = taken(move || buffer.finish());
            let allowed = AT_THE_END * body.len() + MEMBERS_BYTES;
            assert!(ended.peak <= allowed, "{shown}: the end takes {} more", ended.peak);
            assert_eq!(whole.chunks.concat(), body, "{shown}");
            if longest == 1 {
                println!("{name}: {} bytes take {} and then {} more", body.len(), held.after, ended.peak);
            }
        }
    }
}
