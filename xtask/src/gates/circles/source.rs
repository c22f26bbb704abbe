//! Extracts a Rust file's modules, `use` declarations, and paths in its code.

use std::collections::BTreeSet;

use proc_macro2::LexError;

use super::tokens::{Kind, Lexeme, Token, lexemes};

/// The names of a path, as in `crate::store::Row`.
pub(crate) type Path = Vec<String>;

/// The extracts of one file.
#[derive(Debug, Default)]
pub(crate) struct Source {
    /// Inline modules, relative to the file's module.
    pub(crate) modules: Vec<Path>,
    /// Modules in files that only tests include.
    pub(crate) test_modules: Vec<Path>,
    pub(crate) imports: Vec<Import>,
    /// Names in code that may be imported: not after a dot, `::` or `fn`.
    pub(crate) used: BTreeSet<String>,
}

/// A path in the file.
#[derive(Debug)]
pub(crate) struct Import {
    /// The inline module that contains it.
    pub(crate) module: Path,
    pub(crate) path: Path,
    pub(crate) line: usize,
    /// The name that a `use` declaration gives to the item. Paths in code have none.
    pub(crate) name: Option<String>,
    /// Whether other modules can import the name from here.
    pub(crate) is_public: bool,
}

/// Reads a file without the items behind `#[cfg(test)]`.
///
/// # Errors
/// If it does not consist of Rust's tokens.
pub(crate) fn read(source: &str) -> Result<Source, LexError> {
    let lexemes: Vec<Lexeme> = lexemes(source)?;
    let tokens: Vec<Token<'_>> = lexemes.iter().map(Token::of).collect();
    let mut reader = Reader { tokens: &tokens, at: 0, open: Vec::new(), is_public: false, source: Source::default() };
    while reader.at < tokens.len() {
        reader.item();
    }
    Ok(reader.source)
}

struct Reader<'a> {
    tokens: &'a [Token<'a>],
    at: usize,
    /// The owner of each open brace: a module by its name, or anything else.
    open: Vec<Option<&'a str>>,
    /// Whether `pub` or `pub(…)` has just been read.
    is_public: bool,
    source: Source,
}

impl<'a> Reader<'a> {
    /// Reads one declaration, path or token.
    fn item(&mut self) {
        let is_public = std::mem::take(&mut self.is_public);
        if self.is_test_attribute() {
            self.skip_test_item();
            return;
        }
        match (self.kind(0), self.kind(1)) {
            (Some(Kind::Word("pub")), _) => self.visibility(),
            (Some(Kind::Word("mod")), Some(Kind::Word(name))) => self.module(name),
            // `use<'a>` in a type captures lifetimes.
            (Some(Kind::Word("use")), Some(Kind::Word(_) | Kind::Separator | Kind::Sign('{'))) => {
                self.at += 1;
                self.tree(&Path::new(), is_public);
            }
            (Some(Kind::Word(_)), Some(Kind::Separator)) if !self.continues_a_path() => self.path(),
            (Some(Kind::Sign('{')), _) => self.enter(None),
            (Some(Kind::Sign('}')), _) => {
                self.open.pop();
                self.at += 1;
            }
            (Some(Kind::Word(name)), _) => {
                self.mention(name);
                self.at += 1;
            }
            _ => self.at += 1,
        }
    }

    /// Records a name in code that may be imported.
    fn mention(&mut self, name: &str) {
        let before = self.at.checked_sub(1).and_then(|before| self.tokens.get(before));
        if !self.continues_a_path() && !before.is_some_and(|token| token.is_word("fn")) {
            self.source.used.insert(name.to_owned());
        }
    }

    fn kind(&self, ahead: usize) -> Option<Kind<'a>> {
        self.tokens.get(self.at + ahead).map(|token| token.kind)
    }

    fn has_sign(&self, sign: char) -> bool {
        self.tokens.get(self.at).is_some_and(|token| token.is_sign(sign))
    }

    fn enter(&mut self, module: Option<&'a str>) {
        self.open.push(module);
        self.at += 1;
    }

    /// Reads `pub`, `pub(crate)` or `pub(in crate::store)`.
    fn visibility(&mut self) {
        self.at += 1;
        if self.has_sign('(') {
            self.skip_group('(', ')');
        }
        self.is_public = true;
    }

    fn module(&mut self, name: &'a str) {
        self.at += 2;
        if self.has_sign('{') {
            self.enter(Some(name));
            self.source.modules.push(self.inner_module());
        }
    }

    /// The current inline module.
    fn inner_module(&self) -> Path {
        self.open.iter().flatten().map(|name| (*name).to_owned()).collect()
    }

    /// Whether the next token continues a path or a method call, as in `.collect::<Vec<_>>()`.
    fn continues_a_path(&self) -> bool {
        let before = self.at.checked_sub(1).and_then(|before| self.tokens.get(before));
        before.is_some_and(|token| token.kind == Kind::Separator || token.is_sign('.'))
    }

    /// Reads a path in code, such as `crate::store::Row { … }`.
    fn path(&mut self) {
        let line = self.tokens[self.at].line;
        let mut path = Path::new();
        while let Some(Kind::Word(name)) = self.kind(0) {
            path.push(name.to_owned());
            self.at += 1;
            match (self.kind(0), self.kind(1)) {
                (Some(Kind::Separator), Some(Kind::Word(_))) => self.at += 1,
                _ => break,
            }
        }
        self.source.used.extend(path.first().cloned());
        self.import(path, line, None, false);
    }

    /// Reads the tree of a `use` declaration below a prefix: a name, a glob or a group.
    fn tree(&mut self, prefix: &Path, is_public: bool) {
        let mut path = prefix.clone();
        while let Some(token) = self.tokens.get(self.at) {
            self.at += 1;
            match token.kind {
                Kind::Word("self") if !path.is_empty() => {}
                Kind::Word("as") => {
                    let name = self.kind(0);
                    self.at += 1;
                    let name = if let Some(Kind::Word(name)) = name { name } else { "_" };
                    self.import(path, token.line, Some(name.to_owned()), is_public);
                    return;
                }
                Kind::Word(name) => path.push(name.to_owned()),
                Kind::Sign('{') => {
                    self.group(&path, is_public);
                    return;
                }
                Kind::Sign('*') => {
                    path.push("*".to_owned());
                    self.import(path, token.line, None, is_public);
                    return;
                }
                Kind::Separator => {}
                // The token that ends the tree belongs to the group or the declaration.
                Kind::Sign(_) => {
                    self.at -= 1;
                    break;
                }
            }
            let goes_on = matches!(self.kind(0), Some(Kind::Separator)) || token.kind == Kind::Separator;
            if !goes_on && self.kind(0) != Some(Kind::Word("as")) {
                break;
            }
        }
        let line = self.tokens.get(self.at.saturating_sub(1)).map_or(1, |token| token.line);
        let name = path.last().cloned();
        self.import(path, line, name, is_public);
    }

    /// Reads the trees of a group, including its closing brace.
    fn group(&mut self, prefix: &Path, is_public: bool) {
        while self.at < self.tokens.len() && !self.has_sign('}') {
            // Only a name, a glob or a group begins a tree; macro variables do not.
            if matches!(self.kind(0), Some(Kind::Sign(sign)) if sign != '*' && sign != '{') {
                self.at += 1;
            } else {
                self.tree(prefix, is_public);
            }
        }
        self.at += 1;
    }

    fn import(&mut self, path: Path, line: usize, name: Option<String>, is_public: bool) {
        self.source.imports.push(Import { module: self.inner_module(), path, line, name, is_public });
    }

    fn is_test_attribute(&self) -> bool {
        let rest = self.tokens.get(self.at..self.at + 7).unwrap_or_default();
        matches!(rest, [hash, open, cfg, left, test, right, close]
            if hash.is_sign('#') && open.is_sign('[') && cfg.is_word("cfg") && left.is_sign('(')
                && test.is_word("test") && right.is_sign(')') && close.is_sign(']'))
    }

    /// Skips the attribute and its item, which ends with a semicolon or a block.
    fn skip_test_item(&mut self) {
        self.at += 7;
        while let Some(token) = self.tokens.get(self.at) {
            match (token.kind, self.kind(1)) {
                (Kind::Word("mod"), Some(Kind::Word(name))) => {
                    let module = self.inner_module().into_iter().chain([name.to_owned()]).collect();
                    self.source.test_modules.push(module);
                    self.at += 2;
                }
                (Kind::Sign(';'), _) => {
                    self.at += 1;
                    return;
                }
                (Kind::Sign('{'), _) => {
                    self.skip_group('{', '}');
                    return;
                }
                (Kind::Sign('('), _) => self.skip_group('(', ')'),
                (Kind::Sign('['), _) => self.skip_group('[', ']'),
                _ => self.at += 1,
            }
        }
    }

    /// Skips from an opening sign to the sign that closes it.
    fn skip_group(&mut self, opening: char, closing: char) {
        let mut depth = 0;
        while let Some(token) = self.tokens.get(self.at) {
            self.at += 1;
            depth += i32::from(token.is_sign(opening)) - i32::from(token.is_sign(closing));
            if depth == 0 {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(source: &str) -> Vec<String> {
        read(source).unwrap().imports.into_iter().map(|import| import.path.join("::")).collect()
    }

    #[test]
    fn groups_are_unfolded() {
        let source = "use crate::{store::{self, Row, sql::{Text}}, error::*, Guard as _};\nuse super::Record;";
        assert_eq!(
            paths(source),
            [
                "crate::store",
                "crate::store::Row",
                "crate::store::sql::Text",
                "crate::error::*",
                "crate::Guard",
                "super::Record",
            ]
        );
    }

    #[test]
    fn a_variable_of_a_macro_is_no_name() {
        assert_eq!(paths("use crate::{$name, A,}; use $crate::B;"), ["crate::name", "crate::A", "crate::B"]);
    }

    #[test]
    fn an_import_has_the_name_that_it_gives() {
        let source = "use crate::store::{self, Row as Line, Text};";
        let names: Vec<_> = read(source).unwrap().imports.into_iter().filter_map(|import| import.name).collect();
        assert_eq!(names, ["store", "Line", "Text"]);
    }

    #[test]
    fn only_pub_makes_an_import_public() {
        let source = "pub use a::A; use b::B; pub(crate) use c::C; pub(in crate::x) use d::D; pub struct S; use e::E;";
        let public: Vec<_> = read(source).unwrap().imports.into_iter().map(|import| import.is_public).collect();
        assert_eq!(public, [true, false, true, true, false]);
    }

    #[test]
    fn paths_in_code_are_imports() {
        let source =
            "fn f() -> impl Iterator + use<'_> { let x = crate::sql::text(1); y.collect::<Vec<_>>(); row::get(x) }";
        assert_eq!(paths(source), ["crate::sql::text", "row::get"]);
    }

    #[test]
    fn methods_and_functions_are_no_names_of_imports() {
        let used = read("use a::Import; fn own(x: Kind) -> Row { x.method().field; Path::item(macro_name!(y)) }")
            .unwrap()
            .used;
        let is_used = |name: &str| used.contains(name);
        assert!(["Kind", "Row", "Path", "macro_name", "y"].into_iter().all(is_used));
        assert!(!["Import", "own", "method", "field", "item"].into_iter().any(is_used));
    }

    #[test]
    fn a_module_in_the_file_holds_its_imports() {
        let source = read("mod inner { fn f() {} mod deep { use super::A; } } use crate::B;").unwrap();
        assert_eq!(source.modules, [vec!["inner"], vec!["inner", "deep"]]);
        let modules: Vec<Path> = source.imports.into_iter().map(|import| import.module).collect();
        assert_eq!(modules, [vec!["inner", "deep"], vec![]]);
    }

    #[test]
    fn items_of_tests_are_left_out() {
        let source = "#[cfg(test)] mod tests;\n#[cfg(test)]\n#[allow(x)]\nmod more { use crate::A; }\n#[cfg(test)] use crate::B;\n\
                      #[cfg(test)] fn f(x: [u8; 3]) { crate::c() } use crate::D;";
        let source = read(source).unwrap();
        assert_eq!(source.test_modules, [["tests"], ["more"]]);
        assert_eq!(source.imports.len(), 1);
        assert_eq!(source.imports[0].path, ["crate", "D"]);
    }

    #[test]
    fn an_import_knows_its_line() {
        let lines: Vec<usize> =
            read("\nuse crate::a::{\n    B,\n    C,\n};").unwrap().imports.iter().map(|i| i.line).collect();
        assert_eq!(lines, [3, 4]);
    }
}
