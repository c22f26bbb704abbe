//! The Markdown files of the repository. The code blocks of the README and of the pages in `docs` are compiled and run as tests of
//! documentation.
#![allow(clippy::missing_panics_doc, clippy::unwrap_used, reason = "a test fails by a panic")]

use std::path::{Path, PathBuf};

#[doc = include_str!("../../../README.md")]
mod readme {}

#[doc = include_str!("../../../docs/adoption.md")]
mod adoption {}

#[doc = include_str!("../../../docs/migrating.md")]
mod migrating {}

/// The folder of the workspace.
#[must_use]
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// All Markdown files with their texts, without build artifacts.
#[must_use]
pub fn markdown_files() -> Vec<(PathBuf, String)> {
    let (mut folders, mut files) = (vec![workspace()], Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() && !name.starts_with('.') && name != "target" {
                folders.push(path);
            } else if name.ends_with(".md") {
                let text = std::fs::read_to_string(&path).unwrap();
                files.push((path, text));
            }
        }
    }
    files
}
