//! Lists the published packages from cargo's metadata.

use std::error::Error;

use serde_json::Value;

use crate::command::{cargo, output_of};

/// A published package.
#[derive(Debug)]
pub(crate) struct Package {
    pub(crate) name: String,
    /// Its part of `cargo metadata`.
    pub(crate) manifest: Value,
}

impl Package {
    /// Whether it has a library, and not only a program.
    pub(crate) fn has_library(&self) -> bool {
        let targets = self.manifest["targets"].as_array().into_iter().flatten();
        targets.filter_map(|target| target["kind"].as_array()).flatten().any(|kind| kind == "lib")
    }

    /// The name of its library in code.
    pub(crate) fn library(&self) -> String {
        self.name.replace('-', "_")
    }
}

/// All published packages, by name.
pub(crate) fn published() -> Result<Vec<Package>, Box<dyn Error>> {
    let metadata = output_of(&mut cargo(&["metadata", "--no-deps", "--format-version", "1"]))?;
    from_metadata(&serde_json::from_str(&metadata)?)
}

fn from_metadata(metadata: &Value) -> Result<Vec<Package>, Box<dyn Error>> {
    let packages = metadata["packages"].as_array().ok_or("cargo metadata lists no packages")?;
    // `publish = false` is an empty list of registries.
    let published = packages.iter().filter(|package| package["publish"].is_null());
    let mut named: Vec<Package> = published
        .map(|package| {
            let name = package["name"].as_str().ok_or("cargo metadata lists a package without a name")?;
            Ok(Package { name: name.to_owned(), manifest: package.clone() })
        })
        .collect::<Result<_, &str>>()?;
    named.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(named)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn packages_that_are_not_published_are_left_out() {
        let metadata = json!({ "packages": [
            { "name": "second", "publish": null },
            { "name": "private", "publish": [] },
            { "name": "first", "publish": null },
        ] });
        let names: Vec<String> = from_metadata(&metadata).unwrap().into_iter().map(|package| package.name).collect();
        assert_eq!(names, ["first", "second"]);
    }
}
