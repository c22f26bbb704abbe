//! Changes the meaning of a document slightly.

use super::value::Json;
use crate::choices::Choices;

/// The document with one significant change somewhere in it.
pub(super) fn one_thing(value: &Json, choices: &mut Choices) -> Json {
    let goes_down = choices.below(4) > 0;
    match value {
        Json::Literal(lexeme) => Json::Literal(if *lexeme == "null" { "false" } else { "null" }),
        Json::Number(lexeme) => Json::Number(other_lexeme(lexeme, choices)),
        Json::String(string) => Json::String(other_string(string, choices)),
        Json::Array(elements) => {
            let (mut elements, at) = (elements.clone(), choices.below(elements.len()));
            match elements.get(at) {
                Some(element) if goes_down => elements[at] = one_thing(element, choices),
                Some(_) if choices.below(2) == 0 => drop(elements.remove(at)),
                _ => elements.insert(at, Json::Literal("null")),
            }
            Json::Array(elements)
        }
        Json::Object(members) => {
            let mut members = members.clone();
            let name = members.keys().nth(choices.below(members.len())).cloned();
            match name.and_then(|name| members.remove_entry(&name)) {
                Some((name, member)) if goes_down => drop(members.insert(name, one_thing(&member, choices))),
                Some((name, member)) if choices.below(2) == 0 => {
                    let mut longer = format!("{name}x");
                    while members.contains_key(&longer) {
                        longer.push('x');
                    }
                    members.insert(longer, member);
                }
                Some(_) => {}
                None => drop(members.insert(String::new(), Json::Literal("null"))),
            }
            Json::Object(members)
        }
    }
}

/// The same number in another notation, or another number.
fn other_lexeme(lexeme: &str, choices: &mut Choices) -> String {
    let exponent = lexeme.find(['e', 'E']).map(|at| lexeme.split_at(at + 1));
    match (choices.below(5), exponent) {
        (0, Some((number, exponent))) => swapped_case(number) + exponent,
        (1, Some((number, exponent))) => match exponent.strip_prefix('+') {
            Some(digits) => format!("{number}{digits}"),
            None if exponent.starts_with('-') => format!("{number}{}", &exponent[1..]),
            None => format!("{number}+{exponent}"),
        },
        (2, _) => lexeme.strip_prefix('-').map_or_else(|| format!("-{lexeme}"), str::to_owned),
        (3, _) => {
            let (rest, last) = lexeme.split_at(lexeme.len() - 1);
            format!("{rest}{}", if last == "1" { "2" } else { "1" })
        }
        _ if ["0", "-0"].contains(&lexeme) => format!("{lexeme}.0"),
        _ => format!("{lexeme}0"),
    }
}

fn swapped_case(text: &str) -> String {
    let swapped = |character: char| match character {
        'a'..='z' => character.to_ascii_uppercase(),
        _ => character.to_ascii_lowercase(),
    };
    text.chars().map(swapped).collect()
}

fn other_string(string: &str, choices: &mut Choices) -> String {
    let mut characters: Vec<char> = string.chars().collect();
    let at = choices.below(characters.len());
    if choices.below(3) == 0 && string.bytes().any(|byte| byte.is_ascii_alphabetic()) {
        return swapped_case(string);
    }
    match characters.get(at) {
        Some(_) if choices.below(2) == 0 => drop(characters.remove(at)),
        Some('a') => characters[at] = 'b',
        Some(_) => characters[at] = 'a',
        None => characters.push('\0'),
    }
    characters.into_iter().collect()
}
