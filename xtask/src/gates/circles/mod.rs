//! No files of a published crate import each other in a circle.
//!
//! A file imports another one if a `use` declaration or a path in its code leads there, through re-exports to the file that
//! has the item. A module that only re-exports what a module below it has does not import it. Tests may import anything.

mod graph;
mod known;
mod source;
mod tokens;

use std::error::Error;
use std::fs;
use std::path::Path as FilePath;

use graph::Graph;
use known::KNOWN;
use source::{Path, Source, read};

use crate::command::workspace;
use crate::gates::published::published;

/// A circle that was found.
#[derive(Debug)]
struct Circle {
    /// Its files from the top of the workspace, in order.
    files: Vec<String>,
    /// Its imports, a line each.
    imports: Vec<String>,
}

/// Compares what is found with the list of known circles. One that is gone has to leave the list.
pub(crate) fn check() -> Result<(), Box<dyn Error>> {
    let mut found = Vec::new();
    for package in published()? {
        found.extend(circles(&format!("crates/{}/src", package.name))?);
    }
    let is_known = |circle: &&Circle| KNOWN.iter().any(|known| circle.files == *known);
    let (known, new): (Vec<&Circle>, Vec<&Circle>) = found.iter().partition(is_known);
    println!("{} circles of imports are known:", known.len());
    known.iter().for_each(|circle| println!("{}", shown(circle)));
    let is_found = |known: &&&[&str]| found.iter().any(|circle| circle.files == **known);
    let gone: Vec<String> = KNOWN.iter().filter(|known| !is_found(known)).map(|known| known.join("\n")).collect();
    if !new.is_empty() {
        let new: Vec<String> = new.into_iter().map(shown).collect();
        return Err(format!("files import each other in a circle:\n{}", new.join("\n")).into());
    }
    if !gone.is_empty() {
        return Err(format!("{} lists circles that are gone:\n{}", known::FILE, gone.join("\n\n")).into());
    }
    Ok(())
}

fn shown(circle: &Circle) -> String {
    format!("- {} files:\n  {}", circle.files.len(), circle.imports.join("\n  "))
}

/// The circles among the files of this folder.
fn circles(folder: &str) -> Result<Vec<Circle>, Box<dyn Error>> {
    let mut files = Vec::new();
    collect(&workspace().join(folder), folder, &mut files)?;
    files.sort_by(|(one, ..), (other, ..)| one.cmp(other));
    let mut modules: Vec<(String, (Path, Source))> = Vec::new();
    for (name, text) in files {
        let module = module_of(name.strip_prefix(folder).unwrap_or(&name));
        modules.push((name, (module, read(&text))));
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

/// The modules that are files of tests.
fn tests_of(module: &Path, source: &Source) -> Vec<Path> {
    source.test_modules.iter().map(|test| [module.as_slice(), test].concat()).collect()
}

/// Reads all Rust files below a folder, with their names from the top of the workspace.
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

/// The path of the module in `/store/mod.rs` or `/store.rs`.
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

    #[test]
    fn the_list_of_known_circles_is_in_order() {
        assert!(KNOWN.iter().all(|circle| circle.is_sorted()));
    }
}
