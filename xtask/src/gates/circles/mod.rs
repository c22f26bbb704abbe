//! Checks that no files of a published crate import each other in a cycle.
//!
//! A file imports another one if a `use` declaration or a path in its code leads there. Re-exports are followed to the file
//! with the item. A module that only re-exports an item of a module below it does not import that one. Tests may import
//! anything.

mod graph;
mod source;
mod tokens;

use std::error::Error;
use std::fs;
use std::path::Path as FilePath;

use graph::Graph;
use source::{Path, Source, read};

use crate::command::workspace;
use crate::gates::published::published;

/// A cycle.
#[derive(Debug)]
struct Circle {
    /// Its files, relative to the workspace, in order.
    files: Vec<String>,
    /// Its imports, one per line.
    imports: Vec<String>,
}

/// Fails if there is a cycle, and prints its imports.
pub(crate) fn check() -> Result<(), Box<dyn Error>> {
    let mut found = Vec::new();
    for package in published()? {
        found.extend(circles(&format!("crates/{}/src", package.name))?);
    }
    if found.is_empty() {
        return Ok(());
    }
    let found: Vec<String> = found.iter().map(shown).collect();
    Err(format!("files import each other in a circle:\n{}", found.join("\n")).into())
}

fn shown(circle: &Circle) -> String {
    format!("- {} files:\n  {}", circle.files.len(), circle.imports.join("\n  "))
}

/// The cycles among the files of this folder.
fn circles(folder: &str) -> Result<Vec<Circle>, Box<dyn Error>> {
    let mut files = Vec::new();
    collect(&workspace().join(folder), folder, &mut files)?;
    files.sort_by(|(one, ..), (other, ..)| one.cmp(other));
    let mut modules: Vec<(String, (Path, Source))> = Vec::new();
    for (name, text) in files {
        let module = module_of(name.strip_prefix(folder).unwrap_or(&name));
        let source = read(&text).map_err(|error| format!("{name}: {error}"))?;
        modules.push((name, (module, source)));
    }
    let tests: Vec<Path> = modules.iter().flat_map(|(_, (module, source))| tests_of(module, source)).collect();
    modules.retain(|(_, (module, _))| !tests.iter().any(|test| module.starts_with(test)));
    let (names, sources): (Vec<String>, Vec<(Path, Source)>) = modules.into_iter().unzip();
    let graph = Graph::new(&sources);
    let circle = |files: Vec<usize>| Circle {
        imports: graph
            .imports_among(&files)
            .map(|(from, line, to)| format!("{}:{line} imports {}", names[from], names[to]))
            .collect(),
        files: files.iter().map(|file| names[*file].clone()).collect(),
    };
    Ok(graph.circles().into_iter().map(circle).collect())
}

/// The modules in test files.
fn tests_of(module: &Path, source: &Source) -> Vec<Path> {
    source.test_modules.iter().map(|test| [module.as_slice(), test].concat()).collect()
}

/// Reads all Rust files below a folder, with their names relative to the workspace.
fn collect(folder: &FilePath, name: &str, files: &mut Vec<(String, String)>) -> Result<(), Box<dyn Error>> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = format!("{name}/{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            collect(&entry.path(), &name, files)?;
        } else if name.ends_with(".rs") {
            files.push((name, fs::read_to_string(entry.path())?));
        }
    }
    Ok(())
}

/// The module path of `/store/mod.rs` or `/store.rs`.
fn module_of(file: &str) -> Path {
    let names = file.trim_start_matches('/').trim_end_matches(".rs").split('/');
    let mut module: Path = names.map(str::to_owned).collect();
    if matches!(module.last().map(String::as_str), Some("mod" | "lib")) {
        module.pop();
    }
    module
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_is_named_by_its_file() {
        assert_eq!(module_of("/lib.rs"), [""; 0]);
        assert_eq!(module_of("/store.rs"), ["store"]);
        assert_eq!(module_of("/store/mod.rs"), ["store"]);
        assert_eq!(module_of("/store/sql/text.rs"), ["store", "sql", "text"]);
    }
}
