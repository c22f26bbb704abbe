//! What every patched copy has, whichever bug is on: the switch, and the way of SQL and Lua through it.

use super::{Edit, Patch, edit, patch};

/// Files that only a copy has.
pub(super) const FILES: &[(&str, &str)] = &[
    ("crates/idem-core/src/planted.rs", include_str!("../overlay/switch.rs")),
    ("crates/idem-core/src/engine/bugs.rs", include_str!("../overlay/engine.rs")),
];

/// Edits without a switch.
pub(super) const EDITS: &[Edit] = &[
    edit(
        "crates/idem-core/src/lib.rs",
        "mod record;\n",
        "/// Bugs to try the tests with.\n#[doc(hidden)]\npub mod planted;\nmod record;\n",
    ),
    edit("crates/idem-core/src/engine/mod.rs", "mod context;\n", "mod bugs;\nmod context;\n"),
    edit(
        "crates/idem-postgres/src/schema/migrate.rs",
        "        let noted = format!(\n",
        "        let sql = idem_core::planted::rewritten(sql);\n        let noted = format!(\n",
    ),
    edit(
        "crates/idem-redis/src/script.rs",
        "    fn new(source: &'static str) -> Self {\n",
        "    fn new(source: &'static str) -> Self {\n        let source = idem_core::planted::rewritten(source);\n",
    ),
    edit(
        "crates/idem-redis/src/script.rs",
        "impl Exchange<'_> {\n",
        "impl Exchange<'_> {
    pub(crate) fn is_of_script(&self, is_it: impl Fn(&str) -> bool) -> bool {
        matches!(self.question, Question::Script(script, _) if is_it(&script.hash))
    }\n\n",
    ),
];

/// No bug, but a version to come, which writes records in another format: for a rolling deploy in `cargo xtask faults`.
pub(super) const NEXT_FORMAT: Patch = patch(
    "next-format",
    &[],
    "crates/idem-core/src/codec/mod.rs",
    "            format: i64::from(RECORD_FORMAT),",
    "            format: i64::from(RECORD_FORMAT) + i64::from(PLANTED),",
)
.also(&[
    edit(
        "crates/idem-core/src/codec/mod.rs",
        "if flat.format != i64::from(RECORD_FORMAT) {",
        "if flat.format != i64::from(RECORD_FORMAT) && !(PLANTED && flat.format == i64::from(RECORD_FORMAT) + 1) {",
    ),
    edit(
        "crates/idem-postgres/src/batch/arguments.rs",
        "|_: &Acquire| i64::from(RECORD_FORMAT);",
        "|_: &Acquire| i64::from(RECORD_FORMAT) + i64::from(PLANTED);",
    ),
    edit(
        "crates/idem-redis/src/packed.rs",
        "if format != idem_core::RECORD_FORMAT {",
        "if format != idem_core::RECORD_FORMAT && !(PLANTED && format == idem_core::RECORD_FORMAT + 1) {",
    ),
]);
