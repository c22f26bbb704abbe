//! The names that the store's SQL uses, read from its sources, so that the traps cover new names too.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

const OPERATOR_CHARACTERS: &str = "+-*/<>=~!@#%^&|?";

/// The source files of the crate.
pub fn source_files() -> Vec<PathBuf> {
    files_in(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"))
}

fn files_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files_in(&path) } else { vec![path] }).collect()
}

/// The sources of the crate, and the migrations as others apply them.
fn sources() -> String {
    let mut text = String::new();
    for file in source_files() {
        text += &std::fs::read_to_string(file).unwrap();
    }
    for migration in idem_postgres::migrations("idem").unwrap() {
        text += &migration.sql;
    }
    text += &idem_postgres::partitioning("idem", Duration::from_secs(3600)).unwrap();
    text
}

/// Every word, as SQL reads it.
pub fn words() -> BTreeSet<String> {
    let text = sources().to_lowercase();
    let words = text.split(|character: char| !character.is_ascii_alphanumeric() && character != '_');
    words.filter(|word| word.starts_with(|first: char| first.is_ascii_lowercase())).map(str::to_owned).collect()
}

/// Every run of operator characters, and the operators behind keywords.
pub fn operators() -> BTreeSet<String> {
    let text = sources();
    let runs = text.split(|character: char| !OPERATOR_CHARACTERS.contains(character));
    let runs = runs.filter(|run| !run.is_empty() && run.len() < 3).map(str::to_owned);
    runs.chain(["~~", "!~~", "<>", ">=", "<="].map(str::to_owned)).collect()
}
