//! Bugs in fingerprints and in the byte budget.

use super::{Patch, patch};

const JSON: &str = "crates/idem-core/src/fingerprint/json/mod.rs";
const MULTIPART: &str = "crates/idem-core/src/fingerprint/multipart.rs";
const BUDGET: &str = "crates/idem-http/src/budget.rs";
const CONTENT: &str = "crates/idem-http/src/content.rs";

pub(super) const PATCHES: &[Patch] = &[
    patch(
        "open-json-bodies-are-canonicalised",
        &["bodies"],
        "crates/idem-core/src/fingerprint/body.rs",
        "matches!(self.form, Form::Json(_))",
        "!PLANTED && matches!(self.form, Form::Json(_))",
    ),
    patch(
        "members-without-a-limit",
        &["fingerprint"],
        JSON,
        "member.filter(|_| self.members.len() < MAX_MEMBERS)",
        "member.filter(|_| PLANTED || self.members.len() < MAX_MEMBERS)",
    ),
    patch(
        "digest-of-unsorted-members",
        &["fingerprint"],
        JSON,
        "if self.sorted {\n            hash",
        "if PLANTED || self.sorted {\n            hash",
    ),
    patch(
        "boundary-inside-a-line",
        &["fingerprint"],
        MULTIPART,
        "Some(_) => self.state = State::Doubt,",
        "Some(dashes) if PLANTED => {
                        self.take(&rest[..=dashes]);
                        at += dashes + 1;
                    }
                    Some(_) => self.state = State::Doubt,",
    ),
    patch(
        "raw-multipart-without-its-boundary",
        &["fingerprint"],
        "crates/idem-core/src/fingerprint/body.rs",
        "raw(Some(boundary))",
        "raw((!PLANTED).then_some(boundary))",
    ),
    patch(
        "parts-without-a-header",
        &["fingerprint"],
        MULTIPART,
        "&& bytes > EMPTY_LINE.len()",
        "&& (PLANTED || bytes > EMPTY_LINE.len())",
    ),
    patch(
        "boundary-that-ends-with-a-hyphen",
        &["http"],
        CONTENT,
        "&& !value.ends_with('-')",
        "&& (PLANTED || !value.ends_with('-'))",
    ),
    patch(
        "budget-without-shares",
        &["http", "bodies"],
        BUDGET,
        "if has_others && !self",
        "if !PLANTED && has_others && !self",
    ),
    patch("share-entries-stay", &["http"], BUDGET, "if holder.bodies == 0 {", "if !PLANTED && holder.bodies == 0 {"),
    patch(
        "any-charset-is-utf-8",
        &["http"],
        CONTENT,
        "!parameter.contains(\"charset\")",
        "PLANTED || !parameter.contains(\"charset\")",
    ),
    patch(
        "blanks-around-a-boundary",
        &["http"],
        CONTENT,
        "(name.eq_ignore_ascii_case(\"boundary\")",
        "((if PLANTED { name.trim_matches(BLANKS) } else { name }).eq_ignore_ascii_case(\"boundary\")",
    ),
    patch(
        "numbers-through-f64",
        &["fingerprint", "http", "sockets"],
        JSON,
        "                self.out.push(b',');\n                self.close_value();",
        "                if let Some(at) = self.out.iter().rposition(|byte| *byte == b'#').filter(|_| PLANTED) {
                    let lexeme = String::from_utf8_lossy(&self.out[at + 1..]);
                    if let Ok(number) = lexeme.parse::<f64>() {
                        self.out.truncate(at + 1);
                        self.out.extend(number.to_string().bytes());
                    }
                }
                self.out.push(b',');
                self.close_value();",
    ),
];
