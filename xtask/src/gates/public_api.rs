//! Compares the public items of every published crate with the lists in `api/`.
//!
//! A change of the public interface therefore shows in its diff. The lists leave out some properties, such as whether a type is
//! `Send`; the gate `semver` compares those with the last release.

use std::error::Error;
use std::fs;
use std::path::PathBuf;

use super::published::{Package, published};
use crate::command::{cargo, output_of, require_cargo_tool, run, workspace};

const BLESS: &str = "cargo xtask gate public-api --bless";

pub(crate) fn check() -> Result<(), Box<dyn Error>> {
    let mut changes = Vec::new();
    for (path, items) in lists()? {
        let listed = fs::read_to_string(workspace().join(&path)).unwrap_or_default();
        if listed != items {
            changes.push(format!("{}:\n{}", path.display(), difference(&listed, &items).join("\n")));
        }
    }
    if changes.is_empty() {
        return Ok(());
    }
    Err(format!("public items changed; if they should, run `{BLESS}`\n{}", changes.join("\n")).into())
}

/// Rewrites the lists.
pub(crate) fn bless() -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(workspace().join("api"))?;
    for (path, items) in lists()? {
        fs::write(workspace().join(&path), items)?;
        println!("wrote {}", path.display());
    }
    Ok(())
}

/// The list of each crate, and its file.
fn lists() -> Result<Vec<(PathBuf, String)>, Box<dyn Error>> {
    require_cargo_tool("public-api")?;
    let mut packages = published()?;
    packages.retain(Package::has_library);
    let folder = describe(&packages)?;
    let list = |package: &Package| {
        // Without blanket implementations and auto traits, which differ between toolchains.
        let mut command = cargo(&["public-api", "-ss", "--rustdoc-json"]);
        let items = output_of(command.arg(folder.join(format!("{}.json", package.library()))))?;
        Ok((PathBuf::from("api").join(format!("{}.txt", package.name)), items))
    };
    packages.iter().map(list).collect()
}

/// Makes rustdoc describe these packages in JSON, and returns the folder with the descriptions.
///
/// The JSON output is unstable; `RUSTC_BOOTSTRAP` makes a stable toolchain accept it. Build scripts see the variable too, so
/// the artifacts go to a folder that no other command shares.
fn describe(packages: &[Package]) -> Result<PathBuf, Box<dyn Error>> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from);
    let target = target.join("public-api");
    let mut rustdoc = cargo(&["doc", "--lib", "--no-deps", "--all-features"]);
    rustdoc.args(packages.iter().flat_map(|package| ["-p", &package.name]));
    rustdoc.env("CARGO_TARGET_DIR", &target).env("RUSTC_BOOTSTRAP", "1");
    run(rustdoc.env("RUSTDOCFLAGS", "-Z unstable-options --output-format json --cap-lints allow"))?;
    Ok(target.join("doc"))
}

/// The lines that only one list has: a minus for the old list, a plus for the new one.
fn difference(old: &str, new: &str) -> Vec<String> {
    let only = |lines: &str, other: &str, sign: char| -> Vec<String> {
        let other: std::collections::HashSet<&str> = other.lines().collect();
        lines.lines().filter(|line| !other.contains(line)).map(|line| format!("{sign}{line}")).collect()
    };
    [only(old, new, '-'), only(new, old, '+')].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_one_list_alone_are_the_difference() {
        assert_eq!(difference("a\nb\nc\n", "a\nd\nc\n"), ["-b", "+d"]);
        assert_eq!(difference("a\n", "a\n"), [""; 0]);
    }
}
