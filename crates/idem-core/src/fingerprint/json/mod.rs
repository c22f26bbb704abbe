//! A streaming JSON canonicaliser.
//!
//! One pass over the text, in chunks of any size, writes a canonical form into one buffer; no tree is built. An object
//! whose members did not come in order is put in order when it closes, by moving the pieces of the buffer. Whatever is
//! doubtful ends the pass: the caller then uses the raw bytes.
//!
//! The canonical form can be read back in one way only, so that equal forms mean equal documents:
//! `"` characters `0xFF` for a string (UTF-8 has no such byte), `#` lexeme `,` for a number, `t`, `f` or `n`, and
//! `{` members `}` and `[` elements `]`, where a member is its name and its value.

mod number;
mod string;

use std::cmp::Ordering;
use std::ops::Range;
use std::sync::Arc;

use super::pointer::JsonPointer;
use crate::planted;
use number::NumberState;
use string::StringState;

/// More than documents need, and one level more than `serde_json` reads: what a handler would refuse is compared raw.
const MAX_DEPTH: usize = 128;

pub(super) struct JsonCanonicalizer {
    out: Vec<u8>,
    containers: Vec<Container>,
    /// The members of all open objects; each object knows where its own begin.
    members: Vec<Member>,
    ignored: Arc<[JsonPointer]>,
    expect: Expect,
}

/// What may come next.
enum Expect {
    /// A value.
    Value,
    /// A value, or the end of an array that has no elements yet.
    FirstElement,
    /// A member name, or the end of an object that has no members yet.
    FirstName,
    /// A member name.
    Name,
    /// The colon after a member name.
    Colon,
    /// A comma, or the end of the container.
    Separator,
    /// Nothing but white space.
    End,
    /// The rest of a string whose characters begin at `start` in the output.
    String { state: StringState, start: usize, is_name: bool },
    /// The rest of a number.
    Number(NumberState),
    /// The rest of a literal.
    Literal(&'static [u8]),
    /// Nothing: the text is not one that can be canonicalised.
    Doubt,
}

/// An open object or array.
struct Container {
    is_object: bool,
    /// Where its first member or element begins in the output.
    start: usize,
    /// Its first entry in `members`.
    first_member: usize,
    /// Whether its members came in ascending order so far.
    sorted: bool,
    /// Where the present member or element begins in the output.
    item_start: usize,
    /// The name of the present member, as a range of the output.
    name: Range<usize>,
    /// How many elements have begun.
    elements: usize,
    /// Whether the present member or element is ignored.
    item_ignored: bool,
    /// The ignored pointers that lead into this container.
    pointers: Vec<usize>,
    /// Those of them that lead into the present member or element.
    item_pointers: Vec<usize>,
    /// Those of them that ended at a member or element so far.
    ended_pointers: Vec<usize>,
    /// Whether the present member is ignored and has the name of one before.
    item_ignored_twice: bool,
}

/// A closed member of an open object, as ranges of the output.
struct Member {
    name: Range<usize>,
    whole: Range<usize>,
}

impl JsonCanonicalizer {
    pub(super) fn new(ignored: Arc<[JsonPointer]>) -> Self {
        Self { out: Vec::new(), containers: Vec::new(), members: Vec::new(), ignored, expect: Expect::Value }
    }

    pub(super) fn update(&mut self, mut input: &[u8]) {
        while let Some((&byte, rest)) = input.split_first() {
            input = match &mut self.expect {
                Expect::String { state, .. } => match state.read(input, &mut self.out) {
                    string::Progress::More => return,
                    string::Progress::Closed(rest) => {
                        self.close_string();
                        rest
                    }
                    string::Progress::Doubt => return self.doubt(),
                },
                Expect::Number(state) => {
                    if state.accept(byte) {
                        self.out.push(byte);
                        rest
                    } else {
                        self.close_number();
                        input
                    }
                }
                Expect::Literal(expected) => match expected.split_first() {
                    Some((&next, left)) if next == byte => {
                        *expected = left;
                        if left.is_empty() {
                            self.close_value();
                        }
                        rest
                    }
                    _ => return self.doubt(),
                },
                Expect::Doubt => return,
                _ if matches!(byte, b' ' | b'\t' | b'\n' | b'\r') => rest,
                _ => {
                    self.structure(byte);
                    rest
                }
            };
        }
    }

    /// The canonical form, or `None` when there was any doubt.
    pub(super) fn finish(mut self) -> Option<Vec<u8>> {
        if matches!(self.expect, Expect::Number(_)) {
            self.close_number();
        }
        matches!(self.expect, Expect::End).then_some(self.out)
    }

    fn doubt(&mut self) {
        self.expect = Expect::Doubt;
        // Nothing of it is needed any more, and a doubtful body can be large.
        self.out = Vec::new();
        self.members = Vec::new();
        self.containers = Vec::new();
    }

    /// Takes a byte that begins, separates or ends values.
    fn structure(&mut self, byte: u8) {
        match (&self.expect, byte) {
            (Expect::FirstElement, b']') | (Expect::FirstName, b'}') => self.close_container(),
            (Expect::Value | Expect::FirstElement, _) => self.open_value(byte),
            (Expect::FirstName | Expect::Name, b'"') => {
                if let Some(object) = self.containers.last_mut() {
                    object.item_start = self.out.len();
                }
                self.open_string(true);
            }
            (Expect::Colon, b':') => self.expect = Expect::Value,
            (Expect::Separator, b',') => match self.containers.last() {
                Some(Container { is_object: true, .. }) => self.expect = Expect::Name,
                _ => self.expect = Expect::Value,
            },
            (Expect::Separator, b'}' | b']') => match self.containers.last() {
                Some(container) if container.is_object == (byte == b'}') => self.close_container(),
                _ => self.doubt(),
            },
            _ => self.doubt(),
        }
    }

    fn open_value(&mut self, byte: u8) {
        let depth = self.containers.len();
        if let Some(array) = self.containers.last_mut().filter(|container| !container.is_object) {
            array.item_start = self.out.len();
            array.elements += 1;
            if !array.pointers.is_empty() {
                let index = (array.elements - 1).to_string();
                array.enter(&self.ignored, depth - 1, &index);
            }
        }
        match byte {
            b'{' | b'[' => self.open_container(byte == b'{'),
            b'"' => self.open_string(false),
            b't' => self.open_literal(byte, b"rue"),
            b'f' => self.open_literal(byte, b"alse"),
            b'n' => self.open_literal(byte, b"ull"),
            _ => match NumberState::begin(byte) {
                Some(state) => {
                    self.out.extend([b'#', byte]);
                    self.expect = Expect::Number(state);
                }
                None => self.doubt(),
            },
        }
    }

    fn open_literal(&mut self, first: u8, rest: &'static [u8]) {
        self.out.push(first);
        self.expect = Expect::Literal(rest);
    }

    fn open_string(&mut self, is_name: bool) {
        self.out.push(b'"');
        self.expect = Expect::String { state: StringState::new(), start: self.out.len(), is_name };
    }

    fn open_container(&mut self, is_object: bool) {
        if self.containers.len() == MAX_DEPTH {
            return self.doubt();
        }
        let pointers = match self.containers.last_mut() {
            None => (0..self.ignored.len()).collect(),
            Some(parent) => std::mem::take(&mut parent.item_pointers),
        };
        self.out.push(if is_object { b'{' } else { b'[' });
        self.containers.push(Container {
            is_object,
            start: self.out.len(),
            first_member: self.members.len(),
            sorted: true,
            item_start: self.out.len(),
            name: 0..0,
            elements: 0,
            item_ignored: false,
            pointers,
            item_pointers: Vec::new(),
            ended_pointers: Vec::new(),
            item_ignored_twice: false,
        });
        self.expect = if is_object { Expect::FirstName } else { Expect::FirstElement };
    }

    fn close_string(&mut self) {
        let Expect::String { start, is_name, .. } = self.expect else { return self.doubt() };
        let characters = start..self.out.len();
        let Ok(text) = std::str::from_utf8(&self.out[characters.clone()]) else { return self.doubt() };
        if !is_name {
            self.out.push(0xFF);
            return self.close_value();
        }
        let depth = self.containers.len();
        if let Some(object) = self.containers.last_mut() {
            object.name = characters;
            if !object.pointers.is_empty() {
                object.enter(&self.ignored, depth - 1, text);
                if object.item_ignored_twice {
                    return self.doubt();
                }
            }
        }
        self.out.push(0xFF);
        self.expect = Expect::Colon;
    }

    fn close_number(&mut self) {
        match self.expect {
            Expect::Number(state) if state.is_complete() => {
                planted!("numbers-through-f64" => planted::through_f64(&mut self.out));
                self.out.push(b',');
                self.close_value();
            }
            _ => self.doubt(),
        }
    }

    /// A value has ended: it becomes a member or an element of its container, or the document.
    fn close_value(&mut self) {
        self.expect = Expect::Separator;
        let Some(container) = self.containers.last_mut() else {
            self.expect = Expect::End;
            return;
        };
        if container.item_ignored {
            container.item_ignored = false;
            self.out.truncate(container.item_start);
        } else if container.is_object {
            let member = Member { name: container.name.clone(), whole: container.item_start..self.out.len() };
            if let Some(before) = self.members[container.first_member..].last() {
                match self.out[before.name.clone()].cmp(&self.out[member.name.clone()]) {
                    Ordering::Less => {}
                    Ordering::Equal => return self.doubt(),
                    Ordering::Greater => container.sorted = false,
                }
            }
            self.members.push(member);
        }
    }

    fn close_container(&mut self) {
        let Some(container) = self.containers.pop() else { return self.doubt() };
        if !container.sorted && !self.sort_members(&container) {
            return self.doubt();
        }
        self.members.truncate(container.first_member);
        self.out.push(if container.is_object { b'}' } else { b']' });
        self.close_value();
    }

    /// Puts the members of an object in the order of their names; false when two have the same name.
    fn sort_members(&mut self, object: &Container) -> bool {
        let members = &mut self.members[object.first_member..];
        let out = &self.out;
        members.sort_unstable_by(|one, other| out[one.name.clone()].cmp(&out[other.name.clone()]));
        if members.windows(2).any(|pair| out[pair[0].name.clone()] == out[pair[1].name.clone()]) {
            return false;
        }
        // Piece by piece rather than byte by byte: hostile nesting has every level moved once for each level around it.
        let pieces: Vec<&[u8]> = members.iter().map(|member| &out[member.whole.clone()]).collect();
        let sorted = pieces.concat();
        self.out.truncate(object.start);
        self.out.extend_from_slice(&sorted);
        true
    }
}

impl Container {
    /// Notes which ignored pointers lead into the item called `token`, and whether one ends there. `depth` counts the
    /// containers around this one.
    fn enter(&mut self, ignored: &[JsonPointer], depth: usize, token: &str) {
        let leads_here = |&at: &usize| ignored[at].tokens().get(depth).is_some_and(|name| name == token);
        self.item_pointers = self.pointers.iter().copied().filter(leads_here).collect();
        let ending = self.item_pointers.iter().find(|&&at| ignored[at].tokens().len() == depth + 1);
        self.item_ignored = ending.is_some();
        if let Some(pointer) = ending {
            self.item_ignored_twice = self.ended_pointers.contains(pointer);
            self.ended_pointers.push(*pointer);
        }
    }
}

#[cfg(test)]
mod tests;
