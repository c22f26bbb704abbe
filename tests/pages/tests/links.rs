//! Links between pages lead somewhere.
#![expect(clippy::unwrap_used, reason = "a test says what it expects by failing")]

use std::collections::BTreeMap;
use std::path::Path;

use idem_pages::{markdown_files, workspace};

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

/// Whether a link leads to another site, or to an item of Rust, which rustdoc checks.
fn is_elsewhere(link: &str) -> bool {
    let is_item = link.contains("::") || link.starts_with("crate#") || link.ends_with("()");
    let is_type = !link.contains(['.', '/', '#']) && link.starts_with(char::is_uppercase);
    link.contains("://") || link.starts_with("mailto:") || is_item || is_type
}

/// Whether a link of a page leads to a file, and to a heading if it names one.
fn leads_somewhere(page: &Path, link: &str) -> bool {
    let (file, anchor) = link.split_once('#').map_or((link, None), |(file, anchor)| (file, Some(anchor)));
    let target = if file.is_empty() { page.to_owned() } else { page.parent().unwrap().join(file) };
    match anchor {
        Some(anchor) if target.extension().is_some_and(|extension| extension == "md") => {
            let text = std::fs::read_to_string(target).unwrap_or_default();
            anchors(&prose(&text)).iter().any(|known| known == anchor)
        }
        _ => target.exists(),
    }
}

#[test]
fn every_link_leads_to_a_file_and_a_heading() {
    let (mut checked, mut broken) = (0, Vec::new());
    for (page, text) in markdown_files() {
        for link in links(&prose(&text)).into_iter().filter(|link| !is_elsewhere(link)) {
            checked += 1;
            if !leads_somewhere(&page, &link) {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(checked > 50, "only {checked} links were found");
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn a_link_to_a_file_or_a_heading_that_is_not_there_is_found() {
    let page = workspace().join("README.md");
    for (link, expected) in [
        ("docs/adoption.md", true),
        ("docs/adoption.md#another-driver", true),
        ("#questions", true),
        ("docs/nothing.md", false),
        ("docs/nothing.md#another-driver", false),
        ("docs/adoption.md#no-such-heading", false),
        ("#no-such-heading", false),
    ] {
        assert_eq!(leads_somewhere(&page, link), expected, "{link}");
    }
}
