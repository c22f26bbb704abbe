//! The canonicaliser against an independent reader of JSON, and against a decoder of the canonical form.

use proptest::prelude::*;
use proptest::sample::Index;

use sha2::{Digest, Sha256};

use super::{MAX_INLINE, canonical};
use crate::fingerprint::tests::config;

/// A document reduced to what counts: numbers as written, members in the order of their names.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Json {
    Literal(&'static str),
    Number(String),
    String(String),
    Array(Vec<Json>),
    Object(Vec<(String, Json)>),
}

fn strings() -> impl Strategy<Value = String> {
    prop_oneof!["[ab]{0,2}", any::<String>(), "[\"\\\\/\u{8}\u{c}\n\r\t\u{0}\u{7f}\u{e9}\u{1f600}]{0,4}"]
}

fn documents() -> impl Strategy<Value = Json> {
    let leaf = prop_oneof![
        prop::sample::select(vec!["true", "false", "null"]).prop_map(Json::Literal),
        "-?(0|[1-9][0-9]{0,20})(\\.[0-9]{1,3})?([eE][+-]?[0-9]{1,2})?".prop_map(Json::Number),
        strings().prop_map(Json::String),
    ];
    leaf.prop_recursive(5, 40, 6, |item| {
        let members = prop::collection::btree_map(strings(), item.clone(), 0..6);
        prop_oneof![
            prop::collection::vec(item, 0..6).prop_map(Json::Array),
            members.prop_map(|members| Json::Object(members.into_iter().collect())),
        ]
    })
}

/// Choices of how to write a document, derived from a seed.
struct Style(u64);

impl Style {
    fn choose(&mut self, from: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % from
    }

    fn space(&mut self) -> &'static str {
        ["", "", "", " ", "\n", "\t\r\n  "][self.choose(6) as usize]
    }

    fn string(&mut self, text: &str, out: &mut String) {
        out.push('"');
        for character in text.chars() {
            let must_escape = matches!(character, '"' | '\\' | '\0'..='\x1F');
            let short = "\"\"\\\\//\x08b\x0Cf\nn\rr\tt";
            let short = short.chars().zip(short.chars().skip(1)).step_by(2).find(|(denoted, _)| *denoted == character);
            match (short, self.choose(3)) {
                (Some((_, letter)), 0) => out.extend(['\\', letter]),
                (_, choice) if must_escape || choice == 1 => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        let unit = format!("\\u{unit:04x}");
                        out.push_str(&if self.choose(2) == 0 { unit } else { unit.to_uppercase().replace('U', "u") });
                    }
                }
                _ => out.push(character),
            }
        }
        out.push('"');
    }

    fn write(&mut self, value: &Json, out: &mut String) {
        out.push_str(self.space());
        match value {
            Json::Literal(text) => out.push_str(text),
            Json::Number(text) => out.push_str(text),
            Json::String(text) => self.string(text, out),
            Json::Array(elements) => {
                out.push('[');
                for (at, element) in elements.iter().enumerate() {
                    out.push_str(if at > 0 { "," } else { "" });
                    self.write(element, out);
                }
                out.push_str(self.space());
                out.push(']');
            }
            Json::Object(members) => {
                let mut left: Vec<_> = members.iter().collect();
                out.push('{');
                while !left.is_empty() {
                    out.push_str(if left.len() < members.len() { "," } else { "" });
                    out.push_str(self.space());
                    let (name, value) = left.swap_remove(self.choose(left.len() as u64) as usize);
                    self.string(name, out);
                    out.push_str(self.space());
                    out.push(':');
                    self.write(value, out);
                }
                out.push_str(self.space());
                out.push('}');
            }
        }
        out.push_str(self.space());
    }
}

fn written(value: &Json, seed: u64) -> String {
    let mut text = String::new();
    Style(seed).write(value, &mut text);
    text
}

/// The canonical form, written from a tree. A form longer than `inline` stands as its digest.
fn form_of(value: &Json, inline: usize) -> Vec<u8> {
    let string = |text: &str| [b"\"", text.as_bytes(), b"\xFF"].concat();
    let form = match value {
        Json::Literal(text) => return text.as_bytes()[..1].to_vec(),
        Json::Number(text) => return format!("#{text},").into_bytes(),
        Json::String(text) => return string(text),
        Json::Array(elements) => {
            let elements: Vec<u8> = elements.iter().flat_map(|element| form_of(element, inline)).collect();
            [b"[", elements.as_slice(), b"]"].concat()
        }
        Json::Object(members) => {
            let member = |(name, value): &(String, Json)| [string(name), form_of(value, inline)].concat();
            [b"{", members.iter().flat_map(member).collect::<Vec<u8>>().as_slice(), b"}"].concat()
        }
    };
    if form.len() > inline { [b"=".as_slice(), &Sha256::digest(form)].concat() } else { form }
}

/// Reads the canonical form back; what follows the value is returned with it.
fn decoded(form: &[u8]) -> Option<(Json, &[u8])> {
    let (kind, rest) = form.split_first()?;
    let text_until = |end| {
        let length = rest.iter().position(|&byte| byte == end)?;
        Some((String::from_utf8(rest[..length].to_vec()).ok()?, &rest[length + 1..]))
    };
    Some(match kind {
        b't' => (Json::Literal("true"), rest),
        b'f' => (Json::Literal("false"), rest),
        b'n' => (Json::Literal("null"), rest),
        b'#' => text_until(b',').map(|(lexeme, rest)| (Json::Number(lexeme), rest))?,
        b'"' => text_until(0xFF).map(|(characters, rest)| (Json::String(characters), rest))?,
        b'[' => {
            let (mut elements, mut rest) = (Vec::new(), rest);
            while rest.first()? != &b']' {
                let (element, after) = decoded(rest)?;
                elements.push(element);
                rest = after;
            }
            (Json::Array(elements), &rest[1..])
        }
        b'{' => {
            let (mut members, mut rest) = (Vec::new(), rest);
            while rest.first()? != &b'}' {
                let (Json::String(name), after) = decoded(rest)? else { return None };
                let (value, after) = decoded(after)?;
                members.push((name, value));
                rest = after;
            }
            (Json::Object(members), &rest[1..])
        }
        _ => return None,
    })
}

/// How many members a text has; the text must be JSON.
fn members_written(text: &[u8]) -> usize {
    let (mut members, mut in_string, mut escaped) = (0, false, false);
    for &byte in text {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => in_string = !in_string,
            b':' if !in_string => members += 1,
            _ => {}
        }
    }
    members
}

fn members_read(value: &serde_json::Value) -> usize {
    match value {
        serde_json::Value::Array(elements) => elements.iter().map(members_read).sum(),
        serde_json::Value::Object(members) => members.values().map(|value| 1 + members_read(value)).sum(),
        _ => 0,
    }
}

/// Whether `text` should have a canonical form, going by `serde_json`; `None` where the two differ by intention.
fn should_be_accepted(text: &[u8]) -> Option<bool> {
    match serde_json::from_slice::<serde_json::Value>(text) {
        // `serde_json` keeps the last of duplicate names; here they are doubtful.
        Ok(value) => Some(members_read(&value) == members_written(text)),
        // `serde_json` reads numbers into `f64`; here they are kept as written.
        Err(error) if error.to_string().starts_with("number out of range") => None,
        Err(_) => Some(false),
    }
}

/// Texts of which some are JSON and most are nearly so.
fn nearly_json() -> impl Strategy<Value = Vec<u8>> {
    let pieces = r#"{ } [ ] : , " \ \u d83d \ude00 0 1 - . e E + true null f alse a "a" "\u0061":"#.split(' ');
    let others: [&[u8]; 7] = [b" ", b"\n", b"\xC3", b"\xA9", b"\xEF\xBB\xBF", b"\x7F", b"\0"];
    let pieces: Vec<&[u8]> = pieces.map(str::as_bytes).chain(others).collect();
    let pieces = prop::collection::vec(prop::sample::select(pieces), 0..10).prop_map(|pieces| pieces.concat());
    let edited = (documents(), any::<u64>(), any::<Index>(), prop::option::of(any::<u8>()), any::<bool>());
    let edited = edited.prop_map(|(value, seed, at, byte, replace)| {
        let mut text = written(&value, seed).into_bytes();
        let at = at.index(text.len());
        text.splice(at..at + usize::from(replace), byte);
        text
    });
    prop_oneof![pieces, edited]
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn one_document_has_one_form_however_it_is_written(value in documents(), one: u64, other: u64) {
        let (one, other) = (written(&value, one), written(&value, other));
        let read = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        prop_assert_eq!(read(&one), read(&other));
        prop_assert!(canonical(&one).is_some());
        prop_assert_eq!(canonical(&one), canonical(&other));
    }

    #[test]
    fn the_form_gives_the_document_back_but_for_long_parts_which_stand_as_digests(value in documents(), seed: u64) {
        prop_assert_eq!(canonical(written(&value, seed)).unwrap(), form_of(&value, MAX_INLINE));
        let form = form_of(&value, usize::MAX);
        let (read, rest) = decoded(&form).unwrap();
        prop_assert_eq!(read, value);
        prop_assert!(rest.is_empty());
    }

    #[test]
    fn different_documents_have_different_forms(one in documents(), other in documents(), seed: u64) {
        let same_form = canonical(written(&one, seed)) == canonical(written(&other, !seed));
        prop_assert_eq!(same_form, one == other);
    }

    #[test]
    fn what_is_accepted_is_what_serde_json_accepts(text in nearly_json()) {
        if let Some(expected) = should_be_accepted(&text) {
            prop_assert_eq!(canonical(&text).is_some(), expected, "{}", text.escape_ascii());
        }
    }

    #[test]
    fn no_bytes_cause_a_panic(text in any::<Vec<u8>>()) {
        prop_assert_eq!(canonical(&text).is_some(), should_be_accepted(&text).unwrap_or(true));
    }
}
