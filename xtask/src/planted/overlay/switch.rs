//! Which bug is on. This file is in patched copies of the tree only.

#![allow(missing_docs, unreachable_pub, dead_code)]

#[cfg(not(debug_assertions))]
compile_error!("a tree with planted bugs is for tests: build it with debug assertions");

use std::collections::HashSet;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Replacements in SQL and Lua: bug, right text, wrong text.
static TEXTS: &[(&str, &str, &str)] = &[TEXTS_OF_THE_PATCHES];

/// Whether it is this bug that was asked for.
pub fn is_on(name: &str) -> bool {
    static WANTED: OnceLock<Option<String>> = OnceLock::new();
    WANTED.get_or_init(|| std::env::var("IDEM_PLANTED_BUG").ok()).as_deref() == Some(name)
}

/// `text` with what the bug that is on replaces in it.
pub fn rewritten(text: &'static str) -> &'static str {
    let on = TEXTS.iter().filter(|(name, ..)| is_on(name));
    on.fold(text, |text, (_, right, wrong)| text.replace(right, wrong).leak())
}

/// Whether it was asked about this text before.
pub fn is_repeated(text: &str) -> bool {
    static SEEN: Mutex<Option<HashSet<String>>> = Mutex::new(None);
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    !seen.get_or_insert_default().insert(text.to_owned())
}
