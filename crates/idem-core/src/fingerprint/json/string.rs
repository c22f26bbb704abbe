//! The characters of a JSON string (RFC 8259 section 7), with its escapes resolved.

/// The state of the reader inside a string. The characters go straight to the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StringState {
    /// Between characters.
    Plain,
    /// After a backslash.
    Escape,
    /// Inside the four digits of `\u`; `high` is the first half of a surrogate pair.
    Unicode {
        digits: u8,
        unit: u16,
        high: Option<u16>,
    },
    /// After the first half of a surrogate pair, where only `\u` can follow.
    LowBackslash {
        high: u16,
    },
    LowU {
        high: u16,
    },
}

pub(super) enum Progress<'a> {
    /// The input ended inside the string.
    More,
    /// The string ended; this is what follows it.
    Closed(&'a [u8]),
    /// It is not a string that denotes characters.
    Doubt,
}

impl StringState {
    pub(super) fn new() -> Self {
        Self::Plain
    }

    /// Reads on, up to the closing quote or the end of the input. Whether plain bytes are UTF-8 is left to the caller.
    pub(super) fn read<'a>(&mut self, mut input: &'a [u8], out: &mut Vec<u8>) -> Progress<'a> {
        loop {
            if *self == Self::Plain {
                let special = |&byte: &u8| byte == b'"' || byte == b'\\' || byte < 0x20;
                let plain = input.iter().position(special).unwrap_or(input.len());
                out.extend_from_slice(&input[..plain]);
                input = &input[plain..];
            }
            let Some((&byte, rest)) = input.split_first() else { return Progress::More };
            if *self == Self::Plain && byte == b'"' {
                return Progress::Closed(rest);
            }
            match self.step(byte, out) {
                Some(next) => *self = next,
                None => return Progress::Doubt,
            }
            input = rest;
        }
    }

    /// The state after a byte that is not a plain character; `None` when it cannot stand here.
    fn step(self, byte: u8, out: &mut Vec<u8>) -> Option<Self> {
        match self {
            Self::Plain => (byte == b'\\').then_some(Self::Escape),
            Self::Escape => {
                let character = match byte {
                    b'"' | b'\\' | b'/' => byte,
                    b'b' => 0x08,
                    b'f' => 0x0C,
                    b'n' => b'\n',
                    b'r' => b'\r',
                    b't' => b'\t',
                    b'u' => return Some(Self::Unicode { digits: 0, unit: 0, high: None }),
                    _ => return None,
                };
                out.push(character);
                Some(Self::Plain)
            }
            Self::LowBackslash { high } => (byte == b'\\').then_some(Self::LowU { high }),
            Self::LowU { high } => (byte == b'u').then_some(Self::Unicode { digits: 0, unit: 0, high: Some(high) }),
            Self::Unicode { digits, unit, high } => {
                let digit = char::from(byte).to_digit(16)?;
                let unit = unit << 4 | u16::try_from(digit).ok()?;
                if digits < 3 {
                    return Some(Self::Unicode { digits: digits + 1, unit, high });
                }
                if high.is_none() && (0xD800..0xDC00).contains(&unit) {
                    return Some(Self::LowBackslash { high: unit });
                }
                let units = high.into_iter().chain([unit]);
                // A high surrogate without a low one, and a low surrogate alone, decode to an error.
                for character in char::decode_utf16(units) {
                    out.extend_from_slice(character.ok()?.encode_utf8(&mut [0; 4]).as_bytes());
                }
                Some(Self::Plain)
            }
        }
    }
}
