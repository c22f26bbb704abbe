//! Properties of all code in this workspace that reads outside input, as functions of arbitrary bytes.
//!
//! Each [`Target`] is such a function, and panics if a property does not hold. `cargo test` replays the committed corpora
//! through them. libFuzzer looks for new inputs in `fuzz/`, whose targets only call these functions.
//!
//! Targets use public APIs where they can. Private code that needs no connection is compiled in here from its file, so that no
//! published crate has an entry point for fuzzers.

mod bytes_of;
mod choices;
mod memory;
mod records;

mod fast_entry;
mod json_canonical;
mod key_header;
mod multipart_body;
mod record_codec;
mod redis_answer;
mod request;
mod same_reading;

#[path = "../../../crates/idem-redis/src/error.rs"]
#[allow(dead_code, reason = "what happens before there is an answer needs a connection")]
#[allow(unexpected_cfgs, reason = "features of that crate are none of this one")]
mod error;
#[path = "../../../crates/idem-redis/src/info.rs"]
mod info;
#[path = "../../../crates/idem-redis/src/keys.rs"]
mod keys;
#[path = "../../../crates/idem-redis/src/packed.rs"]
#[allow(dead_code, reason = "what is written needs no fuzzer")]
mod packed;
#[path = "../../../crates/idem-http/src/prefer.rs"]
mod prefer;
#[path = "../../../crates/idem-redis/src/reply.rs"]
mod reply;
#[path = "../../../crates/idem-redis/src/seen.rs"]
#[allow(dead_code, reason = "whether replicas are awaited needs a connection")]
mod seen;
#[path = "../../../crates/idem-http/src/syntax.rs"]
#[allow(dead_code, reason = "other modules use more of it")]
mod syntax;

pub use choices::Choices;
pub use memory::{Taken, taken};

/// A piece of code that reads outside input, and its properties.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Target {
    /// Its name, and that of its corpus in `fuzz/`.
    pub name: &'static str,
    check: fn(&[u8]),
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "fast_entry", check: |input| with_its_oracle(input, fast_entry::check) },
    Target { name: "json_canonical", check: json_canonical::check },
    Target { name: "key_header", check: |input| with_its_oracle(input, key_header::check) },
    Target { name: "multipart_body", check: |input| with_its_oracle(input, multipart_body::check) },
    Target { name: "record_codec", check: |input| with_its_oracle(input, record_codec::check) },
    Target { name: "redis_answer", check: |input| with_its_oracle(input, redis_answer::check) },
    Target { name: "same_reading", check: |input| with_its_oracle(input, same_reading::check) },
];

impl Target {
    /// The target of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        TARGETS.iter().copied().find(|target| target.name == name)
    }

    /// Tries one input. Its memory use must be proportional to its length.
    ///
    /// # Panics
    /// If a property does not hold.
    pub fn try_input(&self, input: &[u8]) {
        (self.check)(input);
    }
}

/// Runs a check whose oracle is so small that the memory of both is measured together.
fn with_its_oracle(input: &[u8], check: fn(&[u8])) {
    memory::in_proportion(input.len(), memory::OF_ORACLES, || check(input));
}

/// Tries one input on the target of this name.
///
/// # Panics
/// If a property does not hold, or if there is no such target.
pub fn try_input(target: &str, input: &[u8]) {
    match Target::named(target) {
        Some(target) => target.try_input(input),
        None => panic!("there is no target {target}"),
    }
}
