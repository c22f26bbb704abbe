//! Compares the fingerprint of JSON with a JSON reader that builds trees.
//!
//! An input is one text, or two texts with `\n---\n` between them, which no JSON text contains. After a zero byte, it is a list
//! of choices that generate a document. All checks use fingerprints: a text that is not JSON has the fingerprint of its bytes.

mod change;
pub(crate) mod made_up;
mod reader;
mod value;
pub(crate) mod writer;

use std::sync::Arc;

use idem_core::{BodyFormat, Fingerprint, FingerprintBuilder, JsonPointer};

use crate::choices::Choices;
use crate::memory::{OF_THE_LIBRARY, in_proportion};
use value::{Json, Path};

const SEPARATOR: &[u8] = b"\n---\n";

/// Pointers to members that inputs are likely to have.
const LIKELY: [&str; 5] = ["/a", "/0", "/b/0", "/a/b", "/"];

pub(crate) fn check(input: &[u8]) {
    let mut choices = Choices::of(input);
    if let Some(rest) = input.strip_prefix(b"\0") {
        return if let Ok(value) = made_up::document(rest) {
            document(&value, &mut choices)
        };
    }
    let cut = input.windows(SEPARATOR.len()).position(|window| window == SEPARATOR);
    let (one, other) = cut.map_or((input, None), |at| (&input[..at], input.get(at + SEPARATOR.len()..)));
    text(one, &mut choices);
    if let Some(other) = other {
        text(other, &mut choices);
        texts_are_the_same_exactly_if_they_mean_the_same(one, other);
    }
}

/// Measures the memory of the fingerprint only: the trees of the oracle need more, the deeper a document is.
fn of(text: &[u8]) -> Fingerprint {
    in_proportion(text.len(), OF_THE_LIBRARY, || Fingerprint::of_json("pay", text))
}

fn is_raw(text: &[u8]) -> bool {
    of(text) == Fingerprint::of_bytes("pay", text)
}

fn ignoring(text: &[u8], pointers: &[JsonPointer], chunk: usize) -> Fingerprint {
    in_proportion(text.len(), OF_THE_LIBRARY, || {
        let mut builder = FingerprintBuilder::new(BodyFormat::Json { ignored: Arc::from(pointers) });
        builder.field("operation", b"pay");
        text.chunks(chunk).for_each(|chunk| builder.body(chunk));
        builder.finish()
    })
}

/// Checks that hold for any text.
fn text(text: &[u8], choices: &mut Choices) {
    assert_eq!(ignoring(text, &[], 1 + choices.below(40)), of(text), "it matters how the text is cut");
    match reader::read(text) {
        None => {
            assert!(is_raw(text), "{} is taken for JSON", text.escape_ascii());
            let pointers: Vec<JsonPointer> = LIKELY.iter().filter_map(|pointer| pointer.parse().ok()).collect();
            let ignoring = ignoring(text, &pointers, usize::MAX);
            assert_eq!(ignoring, of(text), "what is ignored makes JSON of {}", text.escape_ascii());
        }
        Some(value) => {
            assert!(!is_raw(text), "{} is not taken for JSON", text.escape_ascii());
            assert_eq!(of(text), of(writer::write(&value, choices).as_bytes()), "{}", text.escape_ascii());
            document(&value, choices);
        }
    }
}

/// Checks that hold for a document in any notation.
fn document(value: &Json, choices: &mut Choices) {
    let (one, other) = (writer::write(value, choices), writer::write(value, choices));
    assert_eq!(reader::read(one.as_bytes()).as_ref(), Some(value), "the oracle does not read what it writes: {one}");
    assert!(!is_raw(one.as_bytes()), "{one}");
    assert_eq!(of(one.as_bytes()), of(other.as_bytes()), "{one}\n{other}");
    let changed = change::one_thing(value, choices);
    let changed_text = writer::write(&changed, choices);
    assert_ne!(*value, changed, "the oracle changes nothing: {one}");
    assert_ne!(of(one.as_bytes()), of(changed_text.as_bytes()), "{one}\n{changed_text}");
    what_is_ignored_is_as_good_as_absent(value, &one, choices);
}

fn what_is_ignored_is_as_good_as_absent(value: &Json, text: &str, choices: &mut Choices) {
    let mut paths: Vec<Path> =
        LIKELY.iter().map(|pointer| pointer[1..].split('/').map(str::to_owned).collect()).collect();
    paths.extend((0..3).filter_map(|_| value.some_path(choices)));
    let pointers: Vec<JsonPointer> = paths.iter().filter_map(|path| value::pointer(path).parse().ok()).collect();
    assert_eq!(pointers.len(), paths.len(), "a pointer is refused: {paths:?}");
    let left = writer::write(&value.without(&paths), choices);
    let chunk = 1 + choices.below(40);
    assert_eq!(ignoring(text.as_bytes(), &pointers, chunk), of(left.as_bytes()), "{paths:?}\n{text}\n{left}");
}

fn texts_are_the_same_exactly_if_they_mean_the_same(one: &[u8], other: &[u8]) {
    let mean_the_same = match (reader::read(one), reader::read(other)) {
        (Some(one), Some(other)) => one == other,
        _ => one == other,
    };
    assert_eq!(of(one) == of(other), mean_the_same, "{}\n{}", one.escape_ascii(), other.escape_ascii());
}
