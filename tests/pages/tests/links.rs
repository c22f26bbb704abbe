//! Links between pages lead somewhere.
#![expect(clippy::unwrap_used, reason = "a test says what it expects by failing")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The workspace.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && !name.starts_with('.') && name != "target" {
            pages(&path, found);
        } else if name.ends_with(".md") {
            found.push(path);
        }
    }
}

/// A page without its code blocks.
fn prose(text: &str) -> String {
    let mut is_code = false;
    let mut kept = String::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            kept.push_str(line);
            kept.push('\n');
        }
    }
    kept
}

/// The anchors of the headings, as GitHub makes them.
fn anchors(text: &str) -> Vec<String> {
    let mut seen = BTreeMap::<String, usize>::new();
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let anchors = headings.map(|line| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
        let anchor: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        let count = seen.entry(anchor.clone()).or_default();
        *count += 1;
        if *count == 1 { anchor } else { format!("{anchor}-{}", *count - 1) }
    });
    anchors.collect()
}

/// The targets of Markdown links.
fn links(text: &str) -> Vec<String> {
    let parts = text.split("](").skip(1);
    parts.filter_map(|part| Some(part.split_once(')')?.0.trim_matches(['<', '>']).to_owned())).collect()
}

#[test]
fn every_link_leads_to_a_file_and_a_heading() {
    let mut found = Vec::new();
    pages(&root(), &mut found);
    let (mut checked, mut broken) = (0, Vec::new());
    for page in &found {
        let text = prose(&std::fs::read_to_string(page).unwrap());
        for link in links(&text) {
            // Links of documentation lead to items, which rustdoc checks.
            let is_item = link.contains("::") || link == "crate" || link.starts_with("crate#") || link.ends_with("()");
            if link.contains("://")
                || is_item
                || link.starts_with("mailto:")
                || link.chars().next().is_some_and(char::is_uppercase) && !link.contains('.')
            {
                continue;
            }
            checked += 1;
            let (file, anchor) =
                link.split_once('#').map_or((link.as_str(), None), |(file, anchor)| (file, Some(anchor)));
            let target = if file.is_empty() { page.clone() } else { page.parent().unwrap().join(file) };
            let is_there = target.exists()
                && anchor.is_none_or(|anchor| {
                    target.extension().is_none_or(|extension| extension != "md")
                        || anchors(&prose(&std::fs::read_to_string(&target).unwrap()))
                            .iter()
                            .any(|known| known == anchor)
                });
            if !is_there {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(checked > 50, "only {checked} links were found");
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}
