//! Writes a document in one of many notations.

use super::value::Json;
use crate::choices::Choices;

/// Varies what must not matter: the order of members, white space, and escapes.
pub(crate) fn write(value: &Json, choices: &mut Choices) -> String {
    let mut writer = Writer { text: String::new(), choices };
    writer.space();
    writer.value(value);
    writer.space();
    writer.text
}

struct Writer<'a> {
    text: String,
    choices: &'a mut Choices,
}

impl Writer<'_> {
    fn space(&mut self) {
        let spaces = ["", "", "", "", " ", "\n", "\r\n\t ", "  "];
        self.text.push_str(spaces[self.choices.below(spaces.len())]);
    }

    fn value(&mut self, value: &Json) {
        match value {
            Json::Literal(lexeme) => self.text.push_str(lexeme),
            Json::Number(lexeme) => self.text.push_str(lexeme),
            Json::String(string) => self.string(string),
            Json::Array(elements) => self.list('[', elements, ']', |writer, element| writer.value(element)),
            Json::Object(members) => {
                let mut members: Vec<_> = members.iter().collect();
                for last in (1..members.len()).rev() {
                    members.swap(last, self.choices.below(last + 1));
                }
                self.list('{', &members, '}', |writer, (name, member)| {
                    writer.string(name);
                    writer.space();
                    writer.text.push(':');
                    writer.space();
                    writer.value(member);
                });
            }
        }
    }

    fn list<T>(&mut self, open: char, items: &[T], close: char, write: impl Fn(&mut Self, &T)) {
        self.text.push(open);
        self.space();
        for (at, item) in items.iter().enumerate() {
            if at > 0 {
                self.text.push(',');
                self.space();
            }
            write(self, item);
            self.space();
        }
        self.text.push(close);
    }

    fn string(&mut self, string: &str) {
        self.text.push('"');
        string.chars().for_each(|character| self.character(character));
        self.text.push('"');
    }

    fn character(&mut self, character: char) {
        let letter = match character {
            '\x08' => 'b',
            '\x0C' => 'f',
            '\n' => 'n',
            '\r' => 'r',
            '\t' => 't',
            '"' | '\\' | '/' => character,
            _ => return self.plain_or_units(character),
        };
        match self.choices.below(3) {
            0 => self.plain_or_units(character),
            _ => self.text.extend(['\\', letter]),
        }
    }

    fn plain_or_units(&mut self, character: char) {
        let must_be_escaped = matches!(character, '"' | '\\' | '\0'..='\x1F');
        if !must_be_escaped && self.choices.below(8) > 0 {
            return self.text.push(character);
        }
        for unit in character.encode_utf16(&mut [0; 2]) {
            let digits = if self.choices.below(2) == 0 { format!("{unit:04x}") } else { format!("{unit:04X}") };
            self.text.push_str("\\u");
            self.text.push_str(&digits);
        }
    }
}
