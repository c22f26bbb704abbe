//! The place of a request in a distributed trace.

use std::fmt;
use std::str::FromStr;

/// The length of the text of version 00.
const TEXT_BYTES: usize = 55;

/// The `traceparent` of a request: trace id, parent id and flags
/// ([W3C Trace Context](https://www.w3.org/TR/trace-context/#traceparent-header)).
///
/// It is written as version 00. Of a later version, the parts that version 00 knows are read. The `tracestate` is not kept.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceParent([u8; 25]);

/// Text that is no `traceparent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "a traceparent has the form 00-{{32 digits}}-{{16 digits}}-{{2 digits}}, in lower-case hexadecimal, and no id is zero"
)]
#[non_exhaustive]
pub struct InvalidTraceParent;

impl TraceParent {
    /// A parent read back from a store: 16 bytes of the trace id, 8 of the parent id, 1 of flags.
    ///
    /// # Errors
    /// [`InvalidTraceParent`] if an id is zero.
    pub fn from_bytes(bytes: [u8; 25]) -> Result<Self, InvalidTraceParent> {
        let is_zero = |id: &[u8]| id.iter().all(|byte| *byte == 0);
        if is_zero(&bytes[..16]) || is_zero(&bytes[16..24]) { Err(InvalidTraceParent) } else { Ok(Self(bytes)) }
    }

    /// The 25 bytes that [`from_bytes`](Self::from_bytes) takes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 25] {
        &self.0
    }

    /// The trace id, which all requests of a trace share.
    #[must_use]
    pub fn trace_id(&self) -> TraceId {
        let mut id = [0; 16];
        id.copy_from_slice(&self.0[..16]);
        TraceId(id)
    }
}

/// The id of a trace. As text it has 32 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceId([u8; 16]);

/// Text that is no id of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the id of a trace has 32 lower-case hexadecimal digits, and is not zero; it is the second part of a traceparent"
)]
#[non_exhaustive]
pub struct InvalidTraceId;

impl TraceId {
    /// Its 16 bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl FromStr for TraceId {
    type Err = InvalidTraceId;

    fn from_str(text: &str) -> Result<Self, InvalidTraceId> {
        if text.len() != 32 {
            return Err(InvalidTraceId);
        }
        let mut id = [0; 16];
        for (byte, pair) in id.iter_mut().zip(text.as_bytes().chunks(2)) {
            *byte = digits(pair).ok_or(InvalidTraceId)?;
        }
        if id == [0; 16] { Err(InvalidTraceId) } else { Ok(Self(id)) }
    }
}

impl fmt::Display for TraceId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl fmt::Debug for TraceId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "TraceId({self})")
    }
}

impl FromStr for TraceParent {
    type Err = InvalidTraceParent;

    fn from_str(text: &str) -> Result<Self, InvalidTraceParent> {
        let text = text.as_bytes();
        let (known, rest) = text.split_at_checked(TEXT_BYTES).ok_or(InvalidTraceParent)?;
        let may_go_on = match &known[..2] {
            b"00" => rest.is_empty(),
            b"ff" => false,
            _ => rest.first().is_none_or(|byte| *byte == b'-'),
        };
        let has_dashes = [2, 35, 52].iter().all(|place| known[*place] == b'-');
        if !may_go_on || !has_dashes || digits(&known[..2]).is_none() {
            return Err(InvalidTraceParent);
        }
        let mut bytes = [0; 25];
        let pairs = [&known[3..35], &known[36..52], &known[53..]].into_iter().flat_map(|part| part.chunks(2));
        for (byte, pair) in bytes.iter_mut().zip(pairs) {
            *byte = digits(pair).ok_or(InvalidTraceParent)?;
        }
        Self::from_bytes(bytes)
    }
}

/// The byte of two lower-case hexadecimal digits.
fn digits(pair: &[u8]) -> Option<u8> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    match pair {
        [high, low] => Some(digit(*high)? << 4 | digit(*low)?),
        _ => None,
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("00")?;
        for part in [&self.0[..16], &self.0[16..24], &self.0[24..]] {
            formatter.write_str("-")?;
            part.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))?;
        }
        Ok(())
    }
}

impl fmt::Debug for TraceParent {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "TraceParent({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_parent_is_read_and_written_back() {
        let parent: TraceParent = TEXT.parse().unwrap();
        assert_eq!(parent.to_string(), TEXT);
        assert_eq!(parent.trace_id().to_string(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!(parent.trace_id().to_string().parse(), Ok(parent.trace_id()));
        assert_eq!(TraceParent::from_bytes(*parent.as_bytes()), Ok(parent));
        assert_eq!(format!("{parent:?}"), format!("TraceParent({TEXT})"));
    }

    #[test]
    fn of_a_later_version_the_known_parts_are_read() {
        let parent: TraceParent = TEXT.parse().unwrap();
        for later in [format!("cc{}", &TEXT[2..]), format!("01{}-more", &TEXT[2..])] {
            assert_eq!(later.parse(), Ok(parent), "{later}");
        }
    }

    #[test]
    fn an_id_of_a_trace_has_32_digits() {
        let id = &TEXT[3..35];
        for text in ["", &id[1..], &format!("{id}0"), TEXT, &"0".repeat(32), &id.to_uppercase(), &id.replace('4', "é")]
        {
            assert_eq!(text.parse::<TraceId>(), Err(InvalidTraceId), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        let no_trace = format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32));
        let no_parent = format!("00-4bf92f3577b34da6a3ce929d0e0e4736-{}-01", "0".repeat(16));
        let with = |place: usize, text: &str| format!("{}{text}{}", &TEXT[..place], &TEXT[place + text.len()..]);
        let spoiled = [
            String::new(),
            TEXT[..54].to_owned(),
            format!("{TEXT}-more"),
            format!("cc{}more", &TEXT[2..]),
            with(0, "ff"),
            with(0, "0g"),
            with(2, "_"),
            with(35, "0"),
            with(52, "0"),
            with(4, "B"),
            with(53, "é"),
            no_trace,
            no_parent,
        ];
        for text in spoiled {
            assert_eq!(text.parse::<TraceParent>(), Err(InvalidTraceParent), "{text}");
        }
        assert_eq!(TraceParent::from_bytes([0; 25]), Err(InvalidTraceParent));
    }
}
