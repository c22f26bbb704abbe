//! Replies of a Redis server.

/// A reply of the protocol RESP2.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Reply {
    /// `OK`, `PONG`, `NOKEY`, …
    Status(String),
    /// An error inside an [`Array`](Reply::Array). As the whole reply it is [`Error::Refused`](crate::Error::Refused).
    Error(String),
    /// A number.
    Integer(i64),
    /// A value, which may be text.
    Bytes(Vec<u8>),
    /// A value or array that does not exist.
    Nil,
    /// Several replies.
    Array(Vec<Reply>),
}

impl Reply {
    /// The text of a [`Status`](Reply::Status), an [`Error`](Reply::Error) or [`Bytes`](Reply::Bytes) in UTF-8.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match self {
            Reply::Status(text) | Reply::Error(text) => Some(text),
            Reply::Bytes(bytes) => std::str::from_utf8(bytes).ok(),
            Reply::Integer(_) | Reply::Nil | Reply::Array(_) => None,
        }
    }

    /// The number, even if it is sent as text.
    #[must_use]
    pub fn integer(&self) -> Option<i64> {
        match self {
            Reply::Integer(number) => Some(*number),
            other => other.text()?.parse().ok(),
        }
    }

    /// The replies in an [`Array`](Reply::Array); none in any other reply.
    #[must_use]
    pub fn items(&self) -> &[Reply] {
        match self {
            Reply::Array(items) => items,
            _ => &[],
        }
    }

    /// The value of a line `name:value` in the replies to `INFO` and `CLUSTER INFO`.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<&str> {
        self.text()?.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
    }
}

#[cfg(test)]
mod tests {
    use super::Reply;

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let reply = Reply::Bytes(b"# Server\r\nport_old:1\r\nport:6379\r\nrole:master\r\n".into());
        assert_eq!(reply.field("port"), Some("6379"));
        assert_eq!(reply.field("role"), Some("master"));
        assert_eq!(reply.field("rol"), None);
    }
}
