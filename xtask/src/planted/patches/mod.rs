//! Bugs as patches: exact replacements in a copy of the tree, so that the product has no switch for them.
//!
//! Each edit of a patch must match exactly once and must change something. All patches are applied together, so that one build
//! contains every bug. In Rust a replacement asks for its switch by the word [`SWITCH`]. In SQL and Lua the copy keeps the right
//! text, and the program replaces it when it starts.

mod engine;
mod fingerprint;
mod http;
mod jobs;
mod machine;
mod messages;
mod mysql;
mod operators;
mod postgres;
mod postgres_schema;
mod postgres_unanswered;
mod scaffold;
mod stores;

use std::collections::BTreeSet;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::bugs::Bug;
use crate::command::workspace;

/// Stands in a replacement for "this bug is on".
const SWITCH: &str = "PLANTED";

/// Stands in the overlay for the replacements in SQL and Lua.
const TEXTS: &str = "TEXTS_OF_THE_PATCHES";

/// One bug as replacements of source text.
pub(super) struct Patch {
    pub(super) bug: Bug,
    edit: Edit,
    more: &'static [Edit],
}

/// One replacement.
struct Edit {
    /// Relative to the workspace.
    file: &'static str,
    right: &'static str,
    wrong: &'static str,
}

/// A patch of `file`. In Rust `wrong` holds both versions, and chooses by [`SWITCH`].
const fn patch(
    name: &'static str,
    suites: &'static [&'static str],
    file: &'static str,
    right: &'static str,
    wrong: &'static str,
) -> Patch {
    Patch { bug: Bug { name, suites }, edit: edit(file, right, wrong), more: &[] }
}

const fn edit(file: &'static str, right: &'static str, wrong: &'static str) -> Edit {
    Edit { file, right, wrong }
}

/// All patches that are bugs.
pub(super) fn patches() -> impl Iterator<Item = &'static Patch> {
    [
        machine::PATCHES,
        engine::PATCHES,
        fingerprint::PATCHES,
        http::PATCHES,
        jobs::PATCHES,
        messages::PATCHES,
        mysql::PATCHES,
        operators::PATCHES,
        postgres::PATCHES,
        postgres_schema::PATCHES,
        postgres_unanswered::PATCHES,
        stores::PATCHES,
    ]
    .into_iter()
    .flatten()
}

/// All edits with the name of their switch.
fn edits() -> impl Iterator<Item = (&'static str, &'static Edit)> {
    let of_patch = |patch: &'static Patch| patch.edits().map(|edit| (patch.bug.name, edit));
    patches().chain([&scaffold::NEXT_FORMAT]).flat_map(of_patch)
}

impl Patch {
    /// The same bug in other files.
    const fn also(self, more: &'static [Edit]) -> Self {
        Self { bug: self.bug, edit: self.edit, more }
    }

    fn edits(&self) -> impl Iterator<Item = &Edit> {
        std::iter::once(&self.edit).chain(self.more)
    }
}

impl Edit {
    fn is_rust(&self) -> bool {
        self.file.ends_with(".rs")
    }

    /// That it matches exactly once, and changes something.
    fn check(&self, name: &str, text: &str) -> Result<(), String> {
        let Self { file, right, wrong } = self;
        match text.matches(right).count() {
            _ if right == wrong => Err(format!("{name}: its replacement in {file} changes nothing")),
            1 => Ok(()),
            count => Err(format!("{name}: its text occurs {count} times in {file}; it must occur once: {right:?}")),
        }
    }

    /// `text` with this edit of the bug `name`.
    fn apply(&self, name: &str, text: &str) -> Result<String, String> {
        self.check(name, text)?;
        if !self.is_rust() {
            return Ok(text.to_owned());
        }
        if !self.wrong.contains(SWITCH) {
            return Err(format!("{name}: the replacement in {} has no {SWITCH}, so it would always be on", self.file));
        }
        let root = if self.file.starts_with("crates/idem-core/src/") { "crate" } else { "idem_core" };
        let switch = format!("{root}::planted::is_on(\"{name}\")");
        Ok(text.replacen(self.right, &self.wrong.replace(SWITCH, &switch), 1))
    }
}

/// The content of a file in the copy.
fn patched(file: &Path, content: Vec<u8>) -> Result<Vec<u8>, Box<dyn Error>> {
    let is_here = |edit: &Edit| file == Path::new(edit.file);
    if !edits().any(|(_, edit)| is_here(edit)) && !scaffold::EDITS.iter().any(is_here) {
        return Ok(content);
    }
    let mut text = String::from_utf8(content)?;
    for edit in scaffold::EDITS.iter().filter(|edit| is_here(edit)) {
        edit.check("scaffold", &text)?;
        text = text.replacen(edit.right, edit.wrong, 1);
    }
    for (name, edit) in edits().filter(|(_, edit)| is_here(edit)) {
        text = edit.apply(name, &text)?;
    }
    Ok(text.into_bytes())
}

/// The files that only a copy has.
fn overlay() -> impl Iterator<Item = (&'static str, String)> {
    let texts = edits().filter(|(_, edit)| !edit.is_rust());
    let texts: String =
        texts.map(|(name, edit)| format!("\n    ({name:?}, {:?}, {:?}),", edit.right, edit.wrong)).collect();
    scaffold::FILES.iter().map(move |(file, content)| (*file, content.replace(TEXTS, &texts)))
}

/// Copies the tree as it is, uncommitted changes included, with all patches applied. An unchanged file keeps its time, so that
/// a second build is quick.
pub(super) fn patched_copy(to: &Path) -> Result<(), Box<dyn Error>> {
    let from = workspace();
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(from)
        .output()?;
    if !listed.status.success() {
        return Err(format!("git ls-files: {}", String::from_utf8_lossy(&listed.stderr)).into());
    }
    let listed = String::from_utf8(listed.stdout)?;
    let files: BTreeSet<PathBuf> = listed.split('\0').filter(|file| !file.is_empty()).map(PathBuf::from).collect();
    for (name, edit) in edits() {
        if !files.contains(Path::new(edit.file)) {
            return Err(format!("{name}: there is no file {}", edit.file).into());
        }
    }
    for file in &files {
        let (source, copy) = (from.join(file), to.join(file));
        // Deleted, and not committed yet.
        let Ok(kind) = fs::symlink_metadata(&source) else {
            remove(&copy)?;
            continue;
        };
        fs::create_dir_all(copy.parent().unwrap_or(to))?;
        if kind.is_symlink() {
            let target = fs::read_link(&source)?;
            if fs::read_link(&copy).ok().as_ref() != Some(&target) {
                remove(&copy)?;
                std::os::unix::fs::symlink(target, &copy)?;
            }
            continue;
        }
        update(&copy, &patched(file, fs::read(&source)?)?)?;
        fs::set_permissions(&copy, kind.permissions())?;
    }
    for (file, content) in overlay() {
        update(&to.join(file), content.as_bytes())?;
    }
    let kept = |file: &Path| files.contains(file) || scaffold::FILES.iter().any(|(own, _)| file == Path::new(own));
    remove_others(to, Path::new(""), &kept)
}

/// Removes what an earlier copy had and the tree has no more.
fn remove_others(copy: &Path, folder: &Path, kept: &impl Fn(&Path) -> bool) -> Result<(), Box<dyn Error>> {
    for entry in fs::read_dir(copy.join(folder))? {
        let entry = entry?;
        let file = folder.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            remove_others(copy, &file, kept)?;
        } else if !kept(&file) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Writes a file unless it has this content: it keeps its time then.
fn update(file: &Path, content: &[u8]) -> Result<(), std::io::Error> {
    if fs::read(file).ok().as_deref() == Some(content) { Ok(()) } else { fs::write(file, content) }
}

fn remove(file: &Path) -> Result<(), std::io::Error> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_patch_applies_to_the_tree() {
        let files: BTreeSet<&str> =
            edits().map(|(_, edit)| edit).chain(scaffold::EDITS).map(|edit| edit.file).collect();
        for file in files {
            let content = fs::read(workspace().join(file)).unwrap();
            let is_rust = file.ends_with(".rs");
            assert_eq!(patched(Path::new(file), content.clone()).unwrap() != content, is_rust, "{file}");
        }
        for (file, _) in overlay() {
            assert!(!workspace().join(file).exists(), "{file} is in the product");
        }
    }

    #[test]
    fn a_replacement_in_sql_is_made_by_the_copy() {
        let texts = edits().filter(|(_, edit)| !edit.is_rust()).count();
        let switch = overlay().find(|(file, _)| file.ends_with("planted.rs")).unwrap().1;
        assert!(texts > 5 && !switch.contains(TEXTS));
        assert_eq!(switch.lines().filter(|line| line.starts_with("    (\"")).count(), texts);
    }

    #[test]
    fn an_edit_that_does_not_match_once_is_refused() {
        let file = "crates/idem-http/src/lib.rs";
        let fits = edit(file, "right", "if PLANTED { wrong } else { right }");
        assert_eq!(
            fits.apply("a-bug", "all right").unwrap(),
            "all if idem_core::planted::is_on(\"a-bug\") { wrong } else { right }"
        );
        let refused = |edit: Edit, text| edit.apply("a-bug", text).unwrap_err();
        assert!(refused(edit(file, "right", "PLANTED"), "gone").contains("0 times"));
        assert!(refused(edit(file, "right", "PLANTED"), "right, right").contains("2 times"));
        assert!(refused(edit(file, "right", "wrong"), "right").contains("always be on"));
        assert!(refused(edit("lua/settle.lua", "right", "right"), "right").contains("changes nothing"));
        assert!(refused(edit("lua/settle.lua", "right", "wrong"), "gone").contains("0 times"));
    }
}
