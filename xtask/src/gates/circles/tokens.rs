//! The words and signs of Rust source, without comments and literals.

/// A part of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind<'a> {
    /// A name, a keyword or a number.
    Word(&'a str),
    /// `::`.
    Separator,
    Sign(char),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Token<'a> {
    pub(crate) kind: Kind<'a>,
    /// Counted from one.
    pub(crate) line: usize,
}

impl Token<'_> {
    pub(crate) fn is_word(&self, word: &str) -> bool {
        self.kind == Kind::Word(word)
    }

    pub(crate) fn is_sign(&self, sign: char) -> bool {
        self.kind == Kind::Sign(sign)
    }
}

/// All of them. Source that does not compile gives tokens as well, but not always the right ones.
pub(crate) fn tokens(source: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    let mut rest = source;
    let mut line = 1;
    while let Some(first) = rest.chars().next() {
        let (length, kind) = next(rest, first);
        tokens.extend(kind.map(|kind| Token { kind, line }));
        let (read, unread) = rest.split_at(length);
        line += read.matches('\n').count();
        rest = unread;
    }
    tokens
}

/// How long what comes first is, and the token that it is, if it is one.
fn next(rest: &str, first: char) -> (usize, Option<Kind<'_>>) {
    if let Some(length) = comment(rest).or_else(|| string(rest)).or_else(|| character(rest)) {
        return (length, None);
    }
    if first.is_whitespace() {
        return (first.len_utf8(), None);
    }
    if rest.starts_with("::") {
        return (2, Some(Kind::Separator));
    }
    if is_of_word(first) {
        // `r#type` is the name `type`.
        let start = if rest.starts_with("r#") { 2 } else { 0 };
        let length = rest[start..].find(|c| !is_of_word(c)).map_or(rest.len(), |length| start + length);
        return (length, Some(Kind::Word(&rest[start..length])));
    }
    (first.len_utf8(), Some(Kind::Sign(first)))
}

fn is_of_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn comment(rest: &str) -> Option<usize> {
    if rest.starts_with("//") {
        return Some(rest.find('\n').unwrap_or(rest.len()));
    }
    let mut length = rest.strip_prefix("/*").map(|_| 2)?;
    let mut depth = 1;
    while depth > 0 {
        let inner = rest.get(length..).filter(|inner| !inner.is_empty());
        let Some(inner) = inner else { return Some(rest.len()) };
        if inner.starts_with("/*") {
            depth += 1;
            length += 2;
        } else if inner.starts_with("*/") {
            depth -= 1;
            length += 2;
        } else {
            length += inner.chars().next().map_or(1, char::len_utf8);
        }
    }
    Some(length)
}

/// A string, plain, raw, of bytes or for C.
fn string(rest: &str) -> Option<usize> {
    let prefix = ["br", "cr", "r", "b", "c", ""].into_iter().find(|prefix| {
        let after = rest.strip_prefix(prefix).unwrap_or_default();
        let opening = if prefix.ends_with('r') { after.trim_start_matches('#') } else { after };
        opening.starts_with('"')
    })?;
    if !prefix.ends_with('r') {
        return Some(prefix.len() + quoted(&rest[prefix.len()..], '"'));
    }
    let hashes = rest[prefix.len()..].chars().take_while(|c| *c == '#').count();
    let start = prefix.len() + hashes + 1;
    let end = format!("\"{}", "#".repeat(hashes));
    Some(rest[start..].find(&end).map_or(rest.len(), |length| start + length + end.len()))
}

/// A character or a byte, but not a lifetime.
fn character(rest: &str) -> Option<usize> {
    let start = usize::from(rest.starts_with("b'"));
    let inner = rest[start..].strip_prefix('\'')?;
    let first = inner.chars().next()?;
    let is_character = first == '\\' || inner[first.len_utf8()..].starts_with('\'');
    is_character.then(|| start + quoted(&rest[start..], '\''))
}

/// How long a literal is that begins and ends with this quote.
fn quoted(rest: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        if !is_escaped && c == quote {
            return at + 1;
        }
        is_escaped = !is_escaped && c == '\\';
    }
    rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(source: &str) -> Vec<&str> {
        let words = tokens(source).into_iter().filter_map(|token| match token.kind {
            Kind::Word(word) => Some(word),
            _ => None,
        });
        words.collect()
    }

    #[test]
    fn comments_hold_no_words() {
        assert_eq!(words("one // two\nthree /* four /* five */ six */ seven"), ["one", "three", "seven"]);
        assert_eq!(words("one /* never ends"), ["one"]);
    }

    #[test]
    fn strings_hold_no_words() {
        assert_eq!(words(r#"one "two \" three" four b"five" c"six" seven"#), ["one", "four", "seven"]);
        assert_eq!(
            words("one r\"two\\\" three r#\"four \" five\"# six br##\"seven\"# eight\"## nine"),
            ["one", "three", "six", "nine"]
        );
    }

    #[test]
    fn a_character_is_no_word_and_a_lifetime_is_one() {
        assert_eq!(words(r"one 'x' '\'' b'y' '\u{1F600}' &'a two"), ["one", "a", "two"]);
    }

    #[test]
    fn a_raw_name_is_the_name() {
        assert_eq!(words("r#type r rest"), ["type", "r", "rest"]);
    }

    #[test]
    fn lines_are_counted_through_comments_and_strings() {
        let source = "/*\n*/ \"\n\n\" word";
        assert_eq!(tokens(source).last().map(|token| token.line), Some(4));
    }

    #[test]
    fn two_colons_are_one_sign() {
        let kinds: Vec<Kind<'_>> = tokens("a::b: c").into_iter().map(|token| token.kind).collect();
        let [a, b, c] = ["a", "b", "c"].map(Kind::Word);
        assert_eq!(kinds, [a, Kind::Separator, b, Kind::Sign(':'), c]);
    }
}
