//! The parts of a multipart body (RFC 2046 section 5.1), whatever the boundary between them.

use sha2::{Digest, Sha256};

/// What ends a header block: its last line break, and an empty line.
const EMPTY_LINE: &[u8; 4] = b"\r\n\r\n";

/// Hashes a multipart body part by part.
///
/// A part counts as its header block and its content, byte for byte. The digest of the body is the SHA-256 over the
/// SHA-256 of each part, in order.
///
/// Only the plain layout that clients send is accepted:
/// - There is no preamble, no epilogue, and no padding after a boundary.
/// - There is no `--boundary` inside a line, where some parsers end a part.
/// - Each part has a header and the empty line that ends it. Without them, some parsers take the next delimiter for
///   content.
///
/// Any other layout is doubtful, and the caller uses the raw bytes.
pub(super) struct MultipartHasher {
    /// `CRLF "--" boundary`.
    delimiter: Vec<u8>,
    /// What has arrived and is not decided yet: less than a delimiter and two bytes, between calls.
    pending: Vec<u8>,
    state: State,
    /// How many bytes of [`EMPTY_LINE`] the part ends with so far; all of them once the empty line was there.
    empty_line: usize,
    /// The length of the header read so far, including the empty line.
    header_bytes: usize,
    part: Sha256,
    parts: Sha256,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the first delimiter, which needs no line break before it.
    Start,
    /// After a delimiter: a line break opens a part, two hyphens close the body.
    AfterDelimiter,
    /// Inside a part.
    Part,
    /// After the closing delimiter, where only one line break may follow.
    Closed,
    Doubt,
}

impl MultipartHasher {
    pub(super) fn new(boundary: &[u8]) -> Self {
        // RFC 2046: 1 to 70 characters.
        let state = if (1..=70).contains(&boundary.len()) { State::Start } else { State::Doubt };
        let delimiter = [b"\r\n--", boundary].concat();
        Self {
            delimiter,
            pending: Vec::new(),
            state,
            empty_line: 0,
            header_bytes: 0,
            part: Sha256::new(),
            parts: Sha256::new(),
        }
    }

    pub(super) fn update(&mut self, chunk: &[u8]) {
        if self.state == State::Doubt {
            return;
        }
        self.pending.extend_from_slice(chunk);
        let pending = std::mem::take(&mut self.pending);
        let decided = self.decide(&pending);
        self.pending = pending[decided..].to_vec();
    }

    /// Takes as much of `input` as can be decided, and says how much that was.
    fn decide(&mut self, input: &[u8]) -> usize {
        let mut at = 0;
        loop {
            let rest = &input[at..];
            match self.state {
                State::Start => {
                    // The line break of the first delimiter is the one that ended the header of the message.
                    let first = &self.delimiter[2..];
                    if rest.len() < first.len() {
                        return at;
                    }
                    let starts = rest.starts_with(first);
                    at += first.len();
                    self.state = if starts { State::AfterDelimiter } else { State::Doubt };
                }
                State::AfterDelimiter => match rest {
                    [b'\r', b'\n', ..] => {
                        // The line break may also be the beginning of the next delimiter, so a part begins with it.
                        self.state = State::Part;
                    }
                    [b'-', b'-', ..] => {
                        at += 2;
                        self.state = State::Closed;
                    }
                    [_, _, ..] => self.state = State::Doubt,
                    _ => return at,
                },
                State::Part => match find(rest, &self.delimiter[2..]) {
                    // Its CRLF is in `rest`: a part begins with a line break, and enough bytes before the dashes stay
                    // undecided.
                    Some(dashes) if rest[..dashes].ends_with(b"\r\n") => {
                        self.take(&rest[..dashes - 2]);
                        self.parts.update(self.part.finalize_reset());
                        at += dashes - 2 + self.delimiter.len();
                        let (matched, bytes) =
                            (std::mem::take(&mut self.empty_line), std::mem::take(&mut self.header_bytes));
                        let has_header = matched == EMPTY_LINE.len() && bytes > EMPTY_LINE.len();
                        self.state = if has_header { State::AfterDelimiter } else { State::Doubt };
                    }
                    Some(_) => self.state = State::Doubt,
                    None => {
                        let decided = rest.len().saturating_sub(self.delimiter.len() - 1);
                        self.take(&rest[..decided]);
                        return at + decided;
                    }
                },
                State::Closed if b"\r\n".starts_with(rest) => return at,
                State::Closed => self.state = State::Doubt,
                // Nothing of it is needed any more, and an epilogue can be large.
                State::Doubt => return input.len(),
            }
        }
    }

    /// Adds to the part.
    fn take(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if self.empty_line == EMPTY_LINE.len() {
                break;
            }
            self.header_bytes += 1;
            self.empty_line = match byte {
                _ if byte == EMPTY_LINE[self.empty_line] => self.empty_line + 1,
                b'\r' => 1,
                _ => 0,
            };
        }
        self.part.update(bytes);
    }

    /// The digest of the parts.
    ///
    /// # Errors
    /// The boundary when there was any doubt.
    pub(super) fn finish(mut self) -> Result<[u8; 32], Vec<u8>> {
        if self.state == State::Closed && self.pending != b"\r" {
            Ok(self.parts.finalize().into())
        } else {
            Err(self.delimiter.split_off(b"\r\n--".len()))
        }
    }
}

/// Where `needle`, which is not empty, begins in `haystack`.
fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    let mut from = 0;
    while let Some(distance) = haystack[from..].iter().position(|&byte| byte == needle[0]) {
        let at = from + distance;
        if haystack[at..].starts_with(needle) {
            return Some(at);
        }
        from = at + 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(boundary: &str, body: &str, chunk: usize) -> Option<[u8; 32]> {
        let mut hasher = MultipartHasher::new(boundary.as_bytes());
        for chunk in body.as_bytes().chunks(chunk) {
            hasher.update(chunk);
        }
        hasher.finish().ok()
    }

    fn body(boundary: &str, parts: &[&str]) -> String {
        let parts: String = parts.iter().map(|part| format!("--{boundary}\r\n{part}\r\n")).collect();
        format!("{parts}--{boundary}--\r\n")
    }

    const PART: &str = "Content-Disposition: form-data; name=\"a\"\r\n\r\none\r\n--not the boundary\r\n";

    #[test]
    fn the_boundary_and_the_chunks_do_not_matter() {
        let expected = digest("xyz", &body("xyz", &[PART, "n: 1\r\n\r\n2"]), usize::MAX);
        assert!(expected.is_some());
        for chunk in 1..100 {
            assert_eq!(digest("other-one", &body("other-one", &[PART, "n: 1\r\n\r\n2"]), chunk), expected, "{chunk}");
        }
    }

    #[test]
    fn parts_their_order_and_their_borders_matter() {
        let bodies = [
            body("b", &["n:\r\n\r\n1", "n:\r\n\r\n2"]),
            body("b", &["n:\r\n\r\n2", "n:\r\n\r\n1"]),
            body("b", &["n:\r\n\r\n1\r\nn:\r\n\r\n2"]),
        ];
        let digests: Vec<_> = bodies.iter().map(|body| digest("b", body, 3)).collect();
        assert!(digests.iter().all(Option::is_some));
        assert!(digests[0] != digests[1] && digests[0] != digests[2] && digests[1] != digests[2]);
    }

    #[test]
    fn a_boundary_that_does_not_begin_a_line_is_doubtful() {
        for before in ["\r", "\n", "\n\r", "\r\r", "x", "\r\n-", "\r\n "] {
            let body = body("b", &[&format!("n:\r\n\r\nhi{before}--b\r\nn:\r\n\r\n999")]);
            let line_break = body.replacen(&format!("{before}--b"), "\r\n--b", 1);
            assert!(digest("b", &line_break, 7).is_some());
            for chunk in 1..body.len() {
                assert_eq!(digest("b", &body, chunk), None, "{before:?} in chunks of {chunk}");
            }
        }
    }

    #[test]
    fn an_empty_part_is_a_part() {
        let [none, one, two] = [&[][..], &["n:\r\n\r\n"], &["n:\r\n\r\n", "n:\r\n\r\n"]]
            .map(|parts| digest("b", &body("b", parts), 2).unwrap());
        assert!(none != one && none != two && one != two);
    }

    #[test]
    fn a_part_without_a_header_and_its_end_is_doubtful() {
        for part in [
            "",
            "\r\n",
            "\r\n\r\n",
            "\r\n\r\n1",
            "\r\n\r\n\nname: a\r\n\r\n",
            "\r\nname: a",
            "\r\nname: a\r\n",
            "\r\nname: a\r\n\r",
            "\r\nname: a\n\n1",
            "\r\na\r\rb\r\n",
        ] {
            let text = format!("--b{part}\r\n--b--");
            for chunk in 1..text.len() {
                assert_eq!(digest("b", &text, chunk), None, "{part:?} in chunks of {chunk}");
            }
        }
        for part in ["\r\nname: a\r\n\r\n", "\r\na\r\r\n\r\n1"] {
            let text = format!("--b{part}\r\n--b--");
            for chunk in 1..text.len() {
                assert!(digest("b", &text, chunk).is_some(), "{part:?} in chunks of {chunk}");
            }
        }
    }

    #[test]
    fn nothing_is_kept_in_memory_but_what_is_undecided() {
        let mut hasher = MultipartHasher::new(b"b");
        let kept = |hasher: &mut MultipartHasher, chunk: &str| {
            hasher.update(chunk.as_bytes());
            hasher.pending.len()
        };
        assert_eq!(kept(&mut hasher, "--"), 2);
        assert_eq!(kept(&mut hasher, &format!("b\r\n{PART}")), "\r\n--b".len() - 1);
        assert_eq!(kept(&mut hasher, "\r\n--b--"), 0);
        assert_eq!(kept(&mut hasher, "\r"), 1);
        assert_eq!(kept(&mut hasher, "epilogue"), 0);
        assert_eq!(kept(&mut hasher, "epilogue"), 0);
        assert_eq!(hasher.finish(), Err(b"b".to_vec()));
        assert_eq!(kept(&mut MultipartHasher::new(b"b"), "--b no line break"), 0);
        assert_eq!(kept(&mut MultipartHasher::new(b"b"), "preamble"), 0);
    }

    #[test]
    fn whatever_is_not_plain_is_doubtful() {
        let whole = body("b", &[PART]);
        for cut in 0..whole.len() - 2 {
            assert_eq!(digest("b", &whole[..cut], 7), None, "cut at {cut}");
        }
        // The closing line break may be missing, and it may be cut nowhere else.
        assert!(digest("b", &whole[..whole.len() - 2], 7).is_some());
        assert_eq!(digest("b", &whole[..whole.len() - 1], 7), None);
        assert_eq!(digest("b", &format!("preamble\r\n{whole}"), 7), None);
        assert_eq!(digest("b", &format!("{whole}epilogue"), 7), None);
        assert_eq!(digest("b", &whole.replacen("--b\r\n", "--b \r\n", 1), 7), None);
        assert_eq!(digest("b", &whole.replacen("--b\r\n", "--bc\r\n", 1), 7), None);
        assert_eq!(digest("", "--\r\n\r\n----", 7), None);
        assert_eq!(digest(&"b".repeat(71), &body(&"b".repeat(71), &[PART]), 7), None);
        assert!(digest(&"b".repeat(70), &body(&"b".repeat(70), &[PART]), 7).is_some());
    }
}
