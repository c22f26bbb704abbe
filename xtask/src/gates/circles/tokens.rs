//! The words and signs of Rust source in one sequence, without comments and literals, from the tokens of proc-macro2.
//!
//! syn does not fit: it leaves the content of macros as tokens, and that content has many paths.

use proc_macro2::{Delimiter, LexError, Spacing, TokenStream, TokenTree};

/// The text of a token and its line number, from one.
pub(crate) type Lexeme = (String, usize);

/// The kind of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind<'a> {
    /// A name or a keyword.
    Word(&'a str),
    /// `::`.
    Separator,
    Sign(char),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Token<'a> {
    pub(crate) kind: Kind<'a>,
    /// The line number, from one.
    pub(crate) line: usize,
}

impl<'a> Token<'a> {
    pub(crate) fn of((text, line): &'a Lexeme) -> Self {
        let kind = match text.chars().next() {
            _ if text == "::" => Kind::Separator,
            Some(first) if first.is_alphanumeric() || first == '_' => Kind::Word(text),
            first => Kind::Sign(first.unwrap_or_default()),
        };
        Self { kind, line: *line }
    }

    pub(crate) fn is_word(&self, word: &str) -> bool {
        self.kind == Kind::Word(word)
    }

    pub(crate) fn is_sign(&self, sign: char) -> bool {
        self.kind == Kind::Sign(sign)
    }
}

/// Returns all tokens of the source.
///
/// # Errors
/// If the source does not consist of Rust's tokens.
pub(crate) fn lexemes(source: &str) -> Result<Vec<Lexeme>, LexError> {
    let mut lexemes = Vec::new();
    flatten(source.parse()?, &mut lexemes);
    Ok(lexemes)
}

fn flatten(stream: TokenStream, lexemes: &mut Vec<Lexeme>) {
    let mut is_separator_begun = false;
    for tree in stream {
        let line = tree.span().start().line;
        match tree {
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Parenthesis => ("(", ")"),
                    Delimiter::Brace => ("{", "}"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::None => ("", ""),
                };
                lexemes.push((open.to_owned(), line));
                flatten(group.stream(), lexemes);
                lexemes.push((close.to_owned(), group.span_close().start().line));
            }
            // `r#type` is the name `type`.
            TokenTree::Ident(name) => lexemes.push((name.to_string().trim_start_matches("r#").to_owned(), line)),
            TokenTree::Punct(sign) if sign.as_char() == ':' && is_separator_begun => {
                lexemes.push(("::".to_owned(), line));
                is_separator_begun = false;
            }
            TokenTree::Punct(sign) if sign.as_char() == ':' && sign.spacing() == Spacing::Joint => {
                is_separator_begun = true;
            }
            TokenTree::Punct(sign) => lexemes.push((sign.to_string(), line)),
            TokenTree::Literal(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(source: &str) -> Vec<String> {
        let lexemes = lexemes(source).unwrap();
        lexemes.iter().map(|lexeme| format!("{:?}", Token::of(lexeme).kind)).collect()
    }

    #[test]
    fn literals_and_comments_are_left_out() {
        let source = "one /* two */ \"three\" r#\"four\"# 'c' 5 // six\n seven";
        assert_eq!(kinds(source), ["Word(\"one\")", "Word(\"seven\")"]);
    }

    #[test]
    fn two_colons_are_one_sign() {
        let expected = ["Word(\"a\")", "Separator", "Word(\"type\")", "Sign(':')", "Word(\"c\")"];
        assert_eq!(kinds("a::r#type: c"), expected);
    }

    #[test]
    fn a_token_knows_its_line() {
        let lines: Vec<usize> = lexemes("/*\n*/ (\n\n word)").unwrap().iter().map(|(_, line)| *line).collect();
        assert_eq!(lines, [2, 4, 4]);
    }

    #[test]
    fn what_is_no_rust_is_an_error() {
        assert!(lexemes("fn f( {").is_err());
    }
}
