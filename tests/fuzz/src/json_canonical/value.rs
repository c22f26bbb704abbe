//! A document without insignificant details: numbers in their notation, members without order.

use std::collections::BTreeMap;

use crate::choices::Choices;

/// Two documents are equal if they mean the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Json {
    Literal(&'static str),
    Number(String),
    String(String),
    Array(Vec<Json>),
    Object(BTreeMap<String, Json>),
}

/// The names and indices that lead to a part of a document.
pub(super) type Path = Vec<String>;

/// The JSON pointer of a path (RFC 6901 section 3).
pub(super) fn pointer(path: &Path) -> String {
    path.iter().map(|token| format!("/{}", token.replace('~', "~0").replace('/', "~1"))).collect()
}

impl Json {
    /// The items of this value, each with its name or index.
    fn items(&self) -> Vec<(String, &Json)> {
        match self {
            Self::Array(elements) => elements.iter().enumerate().map(|(at, item)| (at.to_string(), item)).collect(),
            Self::Object(members) => members.iter().map(|(name, item)| (name.clone(), item)).collect(),
            _ => Vec::new(),
        }
    }

    /// The path to a random part; `None` if there are no parts.
    pub(super) fn some_path(&self, choices: &mut Choices) -> Option<Path> {
        let items = self.items();
        let (name, item) = choices.one_of(&items)?;
        let mut path = vec![name.clone()];
        if choices.below(3) > 0 {
            path.extend(item.some_path(choices).unwrap_or_default());
        }
        Some(path)
    }

    /// The document without the parts at these paths.
    pub(super) fn without(&self, paths: &[Path]) -> Self {
        let kept = |name: &str| !paths.iter().any(|path| path.len() == 1 && path[0] == name);
        let inside = |name: &str| -> Vec<Path> {
            let deeper = paths.iter().filter(|path| path.len() > 1 && path[0] == name);
            deeper.map(|path| path[1..].to_vec()).collect()
        };
        let items = self.items().into_iter().filter(|(name, _)| kept(name));
        let items = items.map(|(name, item)| (item.without(&inside(&name)), name));
        match self {
            Self::Array(_) => Self::Array(items.map(|(item, _)| item).collect()),
            Self::Object(_) => Self::Object(items.map(|(item, name)| (name, item)).collect()),
            value => value.clone(),
        }
    }
}
