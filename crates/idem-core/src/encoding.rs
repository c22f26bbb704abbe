//! Length-prefixed framing for everything that is hashed.
//!
//! A digest identifies its input only if the input can be read back in one way. Every field is therefore written as its
//! length (8 bytes, big endian) and its bytes; an optional field is preceded by a byte that says whether it is there.

/// What receives the framed bytes: a hash or an HMAC.
pub(crate) trait Sink {
    fn put(&mut self, bytes: &[u8]);
}

impl Sink for sha2::Sha256 {
    fn put(&mut self, bytes: &[u8]) {
        sha2::Digest::update(self, bytes);
    }
}

impl Sink for hmac::Hmac<sha2::Sha256> {
    fn put(&mut self, bytes: &[u8]) {
        hmac::Mac::update(self, bytes);
    }
}

/// Writes the length of `field` and `field` itself.
pub(crate) fn put_field(sink: &mut impl Sink, field: &[u8]) {
    sink.put(&(field.len() as u64).to_be_bytes());
    sink.put(field);
}

/// Writes whether `field` is there, and if so the field.
pub(crate) fn put_optional(sink: &mut impl Sink, field: Option<&[u8]>) {
    match field {
        None => sink.put(&[0]),
        Some(field) => {
            sink.put(&[1]);
            put_field(sink, field);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Sink for Vec<u8> {
        fn put(&mut self, bytes: &[u8]) {
            self.extend_from_slice(bytes);
        }
    }

    #[test]
    fn fields_are_framed_by_length_and_presence() {
        let mut out = Vec::new();
        put_field(&mut out, b"ab");
        put_optional(&mut out, None);
        put_optional(&mut out, Some(b"c"));
        assert_eq!(out, b"\0\0\0\0\0\0\0\x02ab\0\x01\0\0\0\0\0\0\0\x01c");
    }
}
