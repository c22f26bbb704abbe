//! Checks that every published manifest has the fields that a registry and docs.rs show.

use std::error::Error;

use serde_json::Value;

use crate::gates::published::{Package, published};

/// A keyword that no crate may have: no library can keep that promise.
const FORBIDDEN: &str = "exactly-once";

pub(crate) fn check() -> Result<(), Box<dyn Error>> {
    let faults: Vec<String> = published()?.iter().flat_map(faults).collect();
    if faults.is_empty() { Ok(()) } else { Err(format!("manifests:\n{}", faults.join("\n")).into()) }
}

/// The missing fields of a manifest, one per line.
fn faults(package: &Package) -> Vec<String> {
    let manifest = &package.manifest;
    let documentation = format!("https://docs.rs/{}", package.name);
    let rules = [
        (has_text(&manifest["description"]), "has no `description`".to_owned()),
        (has_text(&manifest["license"]), "has no `license`".to_owned()),
        (has_text(&manifest["readme"]), "has no `readme`".to_owned()),
        (has_text(&manifest["rust_version"]), "has no `rust-version`".to_owned()),
        (manifest["documentation"] == *documentation, format!("needs `documentation = \"{documentation}\"`")),
        ((1..=5).contains(&words(&manifest["categories"]).len()), "needs one to five `categories`".to_owned()),
        ((1..=5).contains(&words(&manifest["keywords"]).len()), "needs one to five `keywords`".to_owned()),
        (!words(&manifest["keywords"]).contains(&FORBIDDEN), format!("must not have the keyword \"{FORBIDDEN}\"")),
        (
            manifest["metadata"]["docs"]["rs"]["all-features"] == true,
            "needs `all-features = true` in `[package.metadata.docs.rs]`".to_owned(),
        ),
    ];
    let broken = rules.into_iter().filter(|(holds, _)| !holds);
    broken.map(|(_, fault)| format!("{}: {fault}", package.name)).collect()
}

fn has_text(value: &Value) -> bool {
    value.as_str().is_some_and(|text| !text.is_empty())
}

fn words(value: &Value) -> Vec<&str> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn manifest() -> Value {
        json!({
            "description": "A store.",
            "license": "MIT",
            "readme": "README.md",
            "rust_version": "1.89",
            "documentation": "https://docs.rs/idem-core",
            "categories": ["database"],
            "keywords": ["idempotency", "retry"],
            "metadata": { "docs": { "rs": { "all-features": true } } },
        })
    }

    fn faults_of(manifest: Value) -> Vec<String> {
        faults(&Package { name: "idem-core".to_owned(), manifest })
    }

    #[test]
    fn a_whole_manifest_has_no_fault() {
        assert_eq!(faults_of(manifest()), [""; 0]);
    }

    #[test]
    fn every_field_that_is_missing_is_a_fault() {
        let Value::Object(whole) = manifest() else { unreachable!() };
        for field in whole.keys() {
            let mut partial = whole.clone();
            partial.remove(field);
            assert!(!faults_of(Value::Object(partial)).is_empty(), "{field}");
        }
    }

    #[test]
    fn a_registry_takes_no_more_than_five_keywords() {
        let mut many = manifest();
        many["keywords"] = json!(["retry", "a", "b", "c", "d", "e"]);
        assert_eq!(faults_of(many), ["idem-core: needs one to five `keywords`"]);
    }

    #[test]
    fn no_keyword_promises_what_cannot_be_kept() {
        let mut promising = manifest();
        promising["keywords"] = json!(["retry", "exactly-once"]);
        assert_eq!(faults_of(promising), ["idem-core: must not have the keyword \"exactly-once\""]);
    }
}
