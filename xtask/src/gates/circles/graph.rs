//! The imports between files of a crate, and the cycles among them.

use std::collections::{BTreeMap, BTreeSet};

use super::source::{Import, Path, Source};

/// A file, by its index in the list of the crate's files.
type File = usize;

/// The longest chain of re-exports to follow. Source that compiles has short ones; a cycle of re-exports would never end.
const MOST_REEXPORTS: usize = 16;

/// The modules of a crate, and the names that they import.
#[derive(Debug)]
struct Modules<'a> {
    files: BTreeMap<Path, File>,
    names: BTreeMap<(Path, &'a str), &'a Path>,
}

/// The imports between the files of a crate.
#[derive(Debug, Default)]
pub(crate) struct Graph {
    /// For each file the files that it imports, with the line of the first import.
    edges: BTreeMap<File, BTreeMap<File, usize>>,
}

impl Graph {
    /// Builds the graph of files with their module paths; the crate's root has an empty path.
    pub(crate) fn new(files: &[(Path, Source)]) -> Self {
        let modules = Modules::new(files);
        let mut graph = Self::default();
        for (file, (module, source)) in files.iter().enumerate() {
            for import in &source.imports {
                let from = joined(module, &import.module);
                let Some(to) = modules.file_of(&from, &import.path, MOST_REEXPORTS) else { continue };
                let is_used = import.name.as_ref().is_some_and(|name| source.used.contains(name));
                if to != file && (is_used || !modules.is_reexport_of_own(import, &from, to)) {
                    graph.edges.entry(file).or_default().entry(to).or_insert(import.line);
                }
            }
        }
        graph
    }

    /// The cycles: groups of files in which each reaches each.
    pub(crate) fn circles(&self) -> Vec<Vec<File>> {
        let reached: BTreeMap<File, BTreeSet<File>> =
            self.edges.keys().map(|file| (*file, self.reach(*file))).collect();
        let leads = |from: File, to: File| reached.get(&from).is_some_and(|files| files.contains(&to));
        let circle_of =
            |file: File| reached.keys().copied().filter(|other| leads(file, *other) && leads(*other, file)).collect();
        let circles: BTreeSet<Vec<File>> = reached.keys().map(|file| circle_of(*file)).collect();
        circles.into_iter().filter(|circle| !circle.is_empty()).collect()
    }

    /// The imports between these files: from, line, to.
    pub(crate) fn imports_among<'a>(
        &'a self,
        files: &'a [File],
    ) -> impl Iterator<Item = (File, usize, File)> + use<'a> {
        let edges = files.iter().filter_map(|from| Some((*from, self.edges.get(from)?)));
        let all = edges.flat_map(|(from, to)| to.iter().map(move |(to, line)| (from, *line, *to)));
        all.filter(|(_, _, to)| files.contains(to))
    }

    /// All files that this one reaches.
    fn reach(&self, file: File) -> BTreeSet<File> {
        let mut reached = BTreeSet::new();
        let mut open = vec![file];
        while let Some(file) = open.pop() {
            let next = self.edges.get(&file).into_iter().flat_map(BTreeMap::keys);
            open.extend(next.copied().filter(|next| reached.insert(*next)));
        }
        reached
    }
}

impl<'a> Modules<'a> {
    fn new(files: &'a [(Path, Source)]) -> Self {
        let mut modules = Self { files: BTreeMap::new(), names: BTreeMap::new() };
        for (file, (module, source)) in files.iter().enumerate() {
            modules.files.insert(module.clone(), file);
            modules.files.extend(source.modules.iter().map(|inner| (joined(module, inner), file)));
            for import in &source.imports {
                if let Some(name) = &import.name {
                    modules.names.insert((joined(module, &import.module), name), &import.path);
                }
            }
        }
        modules
    }

    /// The file with the item that this path means in this module, if it is in the crate.
    fn file_of(&self, module: &Path, path: &[String], reexports: usize) -> Option<File> {
        let (first, _) = path.split_first()?;
        let mut module = module.clone();
        let is_relative = !matches!(first.as_str(), "crate" | "self" | "super");
        // Other names are local, from the language, or from another crate.
        if is_relative && !self.files.contains_key(&joined(&module, std::slice::from_ref(first))) {
            return None;
        }
        for (at, name) in path.iter().enumerate() {
            match name.as_str() {
                "crate" => module.clear(),
                "self" => {}
                "super" => {
                    module.pop()?;
                }
                name => {
                    let inner = joined(&module, &[name.to_owned()]);
                    if self.files.contains_key(&inner) {
                        module = inner;
                    } else if let Some(target) = self.names.get(&(module.clone(), name)) {
                        let path = [target.as_slice(), &path[at + 1..]].concat();
                        return self.file_of(&module, &path, reexports.checked_sub(1)?);
                    } else {
                        break;
                    }
                }
            }
        }
        self.files.get(&module).copied()
    }

    /// Whether a module re-exports an item of a module below it, which counts as an import only if its own code uses the name.
    fn is_reexport_of_own(&self, import: &Import, module: &Path, to: File) -> bool {
        let is_below = |below: &Path| below.len() > module.len() && below.starts_with(module);
        import.is_public && self.files.iter().any(|(path, file)| *file == to && is_below(path))
    }
}

fn joined(module: &[String], inner: &[String]) -> Path {
    [module, inner].concat()
}

#[cfg(test)]
mod tests {
    use super::super::source::read;
    use super::*;

    fn graph(files: &[(&str, &str)]) -> Graph {
        let path = |module: &str| module.split("::").filter(|name| !name.is_empty()).map(str::to_owned).collect();
        let files: Vec<(Path, Source)> =
            files.iter().map(|(module, source)| (path(module), read(source).unwrap())).collect();
        Graph::new(&files)
    }

    fn circles(files: &[(&str, &str)]) -> Vec<Vec<File>> {
        graph(files).circles()
    }

    #[test]
    fn files_that_import_each_other_are_a_circle() {
        assert_eq!(circles(&[("a", "use crate::b::B;"), ("b", "use crate::a::A;")]), [[0, 1]]);
        assert_eq!(circles(&[("a", "use crate::b::B;"), ("b", "use super::c::C;"), ("c", "crate::a::A")]), [[0, 1, 2]]);
    }

    #[test]
    fn a_line_of_imports_is_no_circle() {
        assert!(
            circles(&[("a", "use crate::b::B; use crate::c::C;"), ("b", "use crate::c::C;"), ("c", "")]).is_empty()
        );
    }

    #[test]
    fn two_circles_are_told_apart() {
        let files = [
            ("a", "use crate::b::B;"),
            ("b", "use crate::a::A; use crate::c::C;"),
            ("c", "use crate::d::D;"),
            ("d", "use crate::c::C;"),
        ];
        assert_eq!(circles(&files), [[0, 1], [2, 3]]);
    }

    #[test]
    fn a_child_that_imports_from_its_parent_is_a_circle_if_the_parent_uses_it() {
        let child = ("a::child", "use super::A;");
        assert_eq!(circles(&[("a", "mod child; use child::f;"), child]), [[0, 1]]);
        assert_eq!(circles(&[("a", "mod child; fn g() { child::f() }"), child]), [[0, 1]]);
        assert_eq!(circles(&[("a", "mod child; pub use child::f; fn g() { f() }"), child]), [[0, 1]]);
        assert!(circles(&[("a", "mod child; pub use child::f; fn g() {}"), child]).is_empty());
    }

    #[test]
    fn a_reexport_leads_to_the_file_that_has_the_item() {
        let root = ("", "mod a; mod b; pub use a::A; pub use b::B;");
        assert!(circles(&[root, ("a", ""), ("b", "use crate::A;")]).is_empty());
        assert_eq!(circles(&[root, ("a", "use crate::B;"), ("b", "use crate::A;")]), [[1, 2]]);
    }

    #[test]
    fn a_child_gets_what_its_parent_imports_from_where_it_is() {
        let files = [("a", "mod child; use crate::b::B; use child::f;"), ("a::child", "use super::B;"), ("b", "")];
        assert!(circles(&files).is_empty());
    }

    #[test]
    fn a_reexport_of_another_branch_is_an_import() {
        assert_eq!(circles(&[("a", "pub use crate::b::B;"), ("b", "use crate::a::A;")]), [[0, 1]]);
    }

    #[test]
    fn other_crates_are_no_files() {
        let root = ("", "pub use other::Thing;");
        assert!(
            circles(&[root, ("a", "use crate::Thing; use std::a::A; use b::B;"), ("b", "use crate::a::A;")]).is_empty()
        );
    }

    #[test]
    fn reexports_in_a_circle_have_an_end() {
        assert!(circles(&[("a", "pub use super::b::X;"), ("b", "pub use super::a::X;")]).is_empty());
    }

    #[test]
    fn a_module_in_the_file_is_the_file() {
        let files = [("a", "pub mod state { use super::super::b::B; }"), ("b", "use crate::a::state::S;")];
        assert_eq!(circles(&files), [[0, 1]]);
    }

    #[test]
    fn the_imports_of_a_circle_have_lines() {
        let graph = graph(&[("a", "\nuse crate::b::B;"), ("b", "use crate::a::A; use crate::c::C;"), ("c", "")]);
        let imports: Vec<_> = graph.imports_among(&[0, 1]).collect();
        assert_eq!(imports, [(0, 2, 1), (1, 1, 0)]);
    }
}
