//! The parts of a multipart body (RFC 2046 section 5.1), whatever the boundary between them.

use sha2::{Digest, Sha256};

/// Hashes a multipart body part by part.
///
/// A part counts as its header block and its content, byte for byte: every part has a SHA-256 of its own, and the body
/// is the SHA-256 over those in order. Only the plain layout is understood, which is what clients send: no preamble, no
/// epilogue, no padding after a boundary. Anything else is doubtful, and the caller uses the raw bytes.
pub(super) struct MultipartHasher {
    /// `CRLF "--" boundary`.
    delimiter: Vec<u8>,
    /// What has arrived and is not decided yet: less than a delimiter and two bytes, between calls.
    pending: Vec<u8>,
    state: State,
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
        Self { delimiter, pending: Vec::new(), state, part: Sha256::new(), parts: Sha256::new() }
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
                State::Part => match find(rest, &self.delimiter) {
                    Some(length) => {
                        self.part.update(&rest[..length]);
                        self.parts.update(self.part.finalize_reset());
                        at += length + self.delimiter.len();
                        self.state = State::AfterDelimiter;
                    }
                    None => {
                        let decided = rest.len().saturating_sub(self.delimiter.len() - 1);
                        self.part.update(&rest[..decided]);
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

    /// The digest of the parts, or `None` when there was any doubt.
    pub(super) fn finish(self) -> Option<[u8; 32]> {
        let ended = self.state == State::Closed && self.pending != b"\r";
        ended.then(|| self.parts.finalize().into())
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
        hasher.finish()
    }

    fn body(boundary: &str, parts: &[&str]) -> String {
        let parts: String = parts.iter().map(|part| format!("--{boundary}\r\n{part}\r\n")).collect();
        format!("{parts}--{boundary}--\r\n")
    }

    const PART: &str = "Content-Disposition: form-data; name=\"a\"\r\n\r\none\r\n--not the boundary\r\n";

    #[test]
    fn the_boundary_and_the_chunks_do_not_matter() {
        let expected = digest("xyz", &body("xyz", &[PART, "\r\n\r\n2"]), usize::MAX);
        assert!(expected.is_some());
        for chunk in 1..100 {
            assert_eq!(digest("other-one", &body("other-one", &[PART, "\r\n\r\n2"]), chunk), expected, "{chunk}");
        }
    }

    #[test]
    fn parts_their_order_and_their_borders_matter() {
        let bodies = [body("b", &["\r\n1", "\r\n2"]), body("b", &["\r\n2", "\r\n1"]), body("b", &["\r\n1\r\n2"])];
        let digests: Vec<_> = bodies.iter().map(|body| digest("b", body, 3)).collect();
        assert!(digests.iter().all(Option::is_some));
        assert!(digests[0] != digests[1] && digests[0] != digests[2] && digests[1] != digests[2]);
    }

    #[test]
    fn an_empty_part_is_a_part() {
        assert_ne!(digest("b", "--b\r\n--b--", 2).unwrap(), digest("b", "--b\r\n\r\n--b--", 2).unwrap());
        assert_ne!(digest("b", "--b\r\n--b--", 2).unwrap(), digest("b", "--b--", 2).unwrap());
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
        assert_eq!(hasher.finish(), None);
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
