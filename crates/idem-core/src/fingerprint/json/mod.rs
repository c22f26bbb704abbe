//! A streaming JSON canonicaliser.
//!
//! One pass over the text, in chunks of any size, writes a canonical form into one buffer; no tree is built. An object
//! with unsorted members is sorted when it closes. Any doubt ends the pass, and the caller uses the raw bytes.
//!
//! The canonical form can be read back in one way only, so that equal forms mean equal documents:
//! - A string is `"`, its characters and `0xFF`, a byte that UTF-8 does not have.
//! - A number is `#`, its lexeme and `,`.
//! - A literal is `t`, `f` or `n`.
//! - An object is `{`, its members and `}`. A member is its name and its value.
//! - An array is `[`, its elements and `]`.
//! - An object or array whose form is longer than [`MAX_INLINE`] bytes is `=` and the SHA-256 of its form.
//!
//! Because of the digests, each byte is moved at one level only, so that hostile nesting takes linear time.
//!
//! # Memory
//! The buffer grows to at most 1.5 times the text (`1,` becomes `#1,`), and [`MAX_MEMBERS`] members to 384 KiB. Either
//! vector may hold twice its length, and half as much again while it is moved.

mod number;
mod string;

use std::cmp::Ordering;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use super::pointer::JsonPointer;
use number::NumberState;
use string::StringState;

/// More than documents need, and one level more than `serde_json` reads: what a handler would refuse is compared raw.
const MAX_DEPTH: usize = 128;

/// The most members that all open objects may have together. They are held until their object closes, so a body with
/// more is compared raw. At the default body limit, a body has more only if its members are shorter than 32 bytes.
pub(super) const MAX_MEMBERS: usize = 32 * 1024;

/// The longest form of an object or array, in bytes, that stands inside the form of its container.
const MAX_INLINE: usize = 512;

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
    /// Nothing: the text cannot be canonicalised.
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
    /// Where the name of the present member ends in the output.
    name_end: usize,
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

/// A closed member of an open object, as places in the output.
#[derive(Clone, Copy)]
struct Member {
    /// Where it begins; its name begins one byte later.
    start: u32,
    name_end: u32,
    end: u32,
}

impl Member {
    /// `None` when the output is too long for 32-bit offsets.
    fn new(start: usize, name_end: usize, end: usize) -> Option<Self> {
        let place = |at: usize| u32::try_from(at).ok();
        Some(Self { start: place(start)?, name_end: place(name_end)?, end: place(end)? })
    }

    fn name<'a>(&self, out: &'a [u8]) -> &'a [u8] {
        &out[self.start as usize + 1..self.name_end as usize]
    }

    fn whole<'a>(&self, out: &'a [u8]) -> &'a [u8] {
        &out[self.start as usize..self.end as usize]
    }
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
            name_end: 0,
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
            object.name_end = characters.end;
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
            let member = Member::new(container.item_start, container.name_end, self.out.len());
            let Some(member) = member.filter(|_| self.members.len() < MAX_MEMBERS) else { return self.doubt() };
            if let Some(before) = self.members[container.first_member..].last() {
                match before.name(&self.out).cmp(member.name(&self.out)) {
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
        let members = &mut self.members[container.first_member..];
        if !container.sorted && !sort(members, &self.out) {
            return self.doubt();
        }
        let begin = container.start - 1;
        if self.out.len() - begin >= MAX_INLINE {
            let digest = container.digest(members, &self.out);
            self.out.truncate(begin);
            self.out.push(b'=');
            self.out.extend_from_slice(&digest);
        } else {
            if !container.sorted {
                // Short, so a copy costs little.
                let mut sorted = Vec::with_capacity(self.out.len() - container.start);
                members.iter().for_each(|member| sorted.extend_from_slice(member.whole(&self.out)));
                self.out.truncate(container.start);
                self.out.extend_from_slice(&sorted);
            }
            self.out.push(container.end());
        }
        self.members.truncate(container.first_member);
        self.close_value();
    }
}

/// Puts the members of an object in the order of their names; false when two have the same name.
fn sort(members: &mut [Member], out: &[u8]) -> bool {
    members.sort_unstable_by(|one, other| one.name(out).cmp(other.name(out)));
    members.windows(2).all(|pair| pair[0].name(out) != pair[1].name(out))
}

impl Container {
    /// The byte that ends its form.
    fn end(&self) -> u8 {
        if self.is_object { b'}' } else { b']' }
    }

    /// The SHA-256 of its form: the rest of `out` with the members in order, and the closing byte.
    fn digest(&self, members: &[Member], out: &[u8]) -> [u8; 32] {
        let mut hash = Sha256::new();
        if self.sorted {
            hash.update(&out[self.start - 1..]);
        } else {
            hash.update(b"{");
            members.iter().for_each(|member| hash.update(member.whole(out)));
        }
        hash.update([self.end()]);
        hash.finalize().into()
    }

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
