//! The names of keys.

use idem_core::RecordId;

/// Builds the keys of records. In a Cluster, the hash tag in braces decides the slot of a key.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    prefix: String,
}

impl Keys {
    pub(crate) fn new(prefix: &str) -> Self {
        Self { prefix: format!("{prefix}{{") }
    }

    /// The key of a record.
    pub(crate) fn of(&self, id: &RecordId) -> String {
        self.with(id, "}")
    }

    /// The key of a record's entry in the fast store.
    pub(crate) fn fast(&self, id: &RecordId) -> String {
        self.with(id, "}:fast")
    }

    /// Builds a key without `format!`, as every verb needs one.
    fn with(&self, id: &RecordId, end: &str) -> String {
        const DIGITS: [char; 16] = ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'a', 'b', 'c', 'd', 'e', 'f'];
        let mut key = String::with_capacity(self.prefix.len() + 64 + end.len());
        key.push_str(&self.prefix);
        for byte in id.as_bytes() {
            key.push(DIGITS[usize::from(byte >> 4)]);
            key.push(DIGITS[usize::from(byte & 15)]);
        }
        key.push_str(end);
        key
    }

    /// A pattern of `SCAN` that all keys of records match, and no key with another prefix.
    pub(crate) fn pattern(&self) -> String {
        let mut pattern = String::with_capacity(self.prefix.len() + 2);
        for letter in self.prefix.chars() {
            if matches!(letter, '*' | '?' | '[' | ']' | '^' | '-' | '\\') {
                pattern.push('\\');
            }
            pattern.push(letter);
        }
        pattern.push_str("*}");
        pattern
    }

    /// The record that has this key; `None` for any other key.
    pub(crate) fn id(&self, key: &[u8]) -> Option<RecordId> {
        let digits = key.strip_prefix(self.prefix.as_bytes())?.strip_suffix(b"}")?;
        let mut id = [0; 32];
        if digits.len() != 2 * id.len() {
            return None;
        }
        if !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        for (byte, pair) in id.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
        }
        Some(RecordId::from_bytes(id))
    }

    /// The list of the notes of repairs.
    pub(crate) fn repairs(&self) -> String {
        format!("{}repairs}}", self.prefix)
    }

    /// The pub/sub channel of settlements.
    pub(crate) fn channel(&self) -> String {
        format!("{}settled}}", self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_no_pattern() {
        assert_eq!(Keys::new("a*[b]?\\:").pattern(), "a\\*\\[b\\]\\?\\\\:{*}");
    }

    #[test]
    fn a_key_leads_back_to_its_record() {
        let keys = Keys::new("idem:");
        let id = RecordId::from_bytes(std::array::from_fn(|at| at as u8 * 7));
        assert_eq!(keys.of(&id), format!("idem:{{{id}}}"));
        assert_eq!(keys.id(keys.of(&id).as_bytes()), Some(id));
        for key in ["idem:{}", "idem:{settled}", "other:{00}", "", &"x".repeat(70), &keys.of(&id).replace("1c", "+1")] {
            assert_eq!(keys.id(key.as_bytes()), None, "{key}");
        }
    }
}
