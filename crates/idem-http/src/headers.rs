//! Header fields: how they are read, and which of them a record stores.

use bytes::Bytes;
use idem_core::{HeaderField, TraceParent};

use crate::syntax::BLANKS;

/// The header fields of a message, whatever type a framework keeps them in.
pub trait HeaderFields {
    /// The values of all lines of the field `name` (lower case), in their order.
    fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> + 'a;

    /// All field lines in their order: names in lower case, and values.
    fn lines(&self) -> impl Iterator<Item = (&str, &[u8])>;
}

impl<F: HeaderFields + ?Sized> HeaderFields for &F {
    fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> + 'a {
        F::values(self, name)
    }

    fn lines(&self) -> impl Iterator<Item = (&str, &[u8])> {
        F::lines(self)
    }
}

/// Plain field lines, for tests and for adapters whose framework has no header map.
impl HeaderFields for [(&str, &[u8])] {
    fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> + 'a {
        self.lines().filter(move |(line, _)| *line == name).map(|(_, value)| value)
    }

    fn lines(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.iter().copied()
    }
}

/// The declared length of a body, if it is a number. The server refuses a malformed one.
pub(crate) fn declared_bytes(fields: &(impl HeaderFields + ?Sized)) -> Option<u64> {
    let length = fields.values("content-length").next().and_then(|value| std::str::from_utf8(value).ok());
    length?.parse().ok()
}

/// The `traceparent` of a request. An invalid one, or more than one, counts as none
/// ([W3C Trace Context](https://www.w3.org/TR/trace-context/#a-traceparent-is-received)).
pub(crate) fn trace_parent(fields: &(impl HeaderFields + ?Sized)) -> Option<TraceParent> {
    let mut values = fields.values("traceparent");
    let only = values.next().filter(|_| values.next().is_none())?;
    std::str::from_utf8(only).ok()?.parse().ok()
}

/// Never stored: cookies and credentials belong to one connection or one user agent, not to the operation.
const SECRET: &[&str] = &[
    "authentication-info",
    "authorization",
    "cookie",
    "proxy-authenticate",
    "proxy-authentication-info",
    "proxy-authorization",
    "set-cookie",
    "set-cookie2",
    "www-authenticate",
    "x-access-token",
    "x-amz-security-token",
    "x-api-key",
    "x-auth-token",
    "x-csrf-token",
    "x-refresh-token",
    "x-session-token",
    "x-xsrf-token",
];

/// Never replayed: fields of the connection (RFC 9110 section 7.6.1), of the moment, and of the first request.
const MOMENTARY: &[&str] = &[
    "age",
    "cf-ray",
    "connection",
    "date",
    "keep-alive",
    "proxy-connection",
    "request-id",
    "retry-after",
    "server-timing",
    "te",
    "traceparent",
    "tracestate",
    "trailer",
    "upgrade",
    "x-amz-request-id",
    "x-amzn-requestid",
    "x-correlation-id",
    "x-request-id",
    "x-trace-id",
];

/// Never replayed, even if a route asks for it: the length and the framing of the first answer's body. A replay with another
/// body would be read as the beginning of the next answer on its connection.
const FRAMING: &[&str] = &["content-length", "transfer-encoding"];

/// Whether a field describes the length or the framing of a body.
pub(crate) fn is_framing(name: &str) -> bool {
    FRAMING.contains(&name)
}

/// Never replayed: CORS fields depend on the origin of each request, and rate limits on its time.
const MOMENTARY_PREFIXES: &[&str] = &["access-control-", "ratelimit", "x-rate-limit-", "x-ratelimit-"];

/// The fields of a response that go into its record, in their order, repeats included.
///
/// `allowed` are fields (lower case) that a route needs although they are on one of the lists.
pub(crate) fn storable(fields: &(impl HeaderFields + ?Sized), allowed: &[String]) -> Vec<HeaderField> {
    let named_by_connection: Vec<&str> = fields
        .values("connection")
        .filter_map(|value| std::str::from_utf8(value).ok())
        .flat_map(|value| value.split(','))
        .map(|name| name.trim_matches(BLANKS))
        .collect();
    let is_storable = |name: &str| {
        let is_left_out = || {
            SECRET.contains(&name)
                || MOMENTARY.contains(&name)
                || MOMENTARY_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
                || named_by_connection.iter().any(|field| field.eq_ignore_ascii_case(name))
        };
        !is_framing(name) && (allowed.iter().any(|field| field == name) || !is_left_out())
    };
    let copy = |bytes: &[u8]| Bytes::copy_from_slice(bytes);
    let storable = fields.lines().filter(|(name, _)| is_storable(name));
    storable.map(|(name, value)| HeaderField { name: copy(name.as_bytes()), value: copy(value) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(fields: &[(&str, &[u8])], allowed: &[&str]) -> Vec<(String, Vec<u8>)> {
        let allowed: Vec<String> = allowed.iter().map(|&name| name.to_owned()).collect();
        storable(fields, &allowed)
            .into_iter()
            .map(|field| (String::from_utf8(field.name.to_vec()).unwrap(), field.value.to_vec()))
            .collect()
    }

    #[test]
    fn a_trace_is_read_and_what_is_doubtful_is_none() {
        let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let field = ("traceparent", parent.as_bytes());
        let read = |fields: &[(&str, &[u8])]| trace_parent(fields);
        assert_eq!(read(&[field]), Some(parent.parse().unwrap()));
        assert_eq!(read(&[]), None);
        assert_eq!(read(&[field, field]), None);
        assert_eq!(read(&[("traceparent", b"00-\xFF")]), None);
    }

    #[test]
    fn order_repeats_and_bytes_survive() {
        let fields: [(&str, &[u8]); 4] = [("x-b", b"\xFF"), ("x-a", b"1"), ("x-b", b""), ("location", b"/p/1")];
        let expected = [("x-b", b"\xFF".as_slice()), ("x-a", b"1"), ("x-b", b""), ("location", b"/p/1")];
        assert_eq!(stored(&fields, &[]), expected.map(|(name, value)| (name.to_owned(), value.to_vec())));
    }

    #[test]
    fn secrets_and_the_moment_stay_out_unless_allowed() {
        let left_out = [
            "set-cookie",
            "set-cookie2",
            "cookie",
            "x-access-token",
            "x-refresh-token",
            "x-session-token",
            "x-amz-security-token",
            "x-auth-token",
            "x-api-key",
            "x-csrf-token",
            "x-xsrf-token",
            "x-rate-limit-remaining",
            "authorization",
            "proxy-authorization",
            "www-authenticate",
            "proxy-authenticate",
            "authentication-info",
            "proxy-authentication-info",
            "connection",
            "keep-alive",
            "proxy-connection",
            "te",
            "trailer",
            "transfer-encoding",
            "upgrade",
            "date",
            "content-length",
            "retry-after",
            "access-control-allow-origin",
            "access-control-expose-headers",
            "ratelimit",
            "ratelimit-limit",
            "ratelimit-policy",
            "x-ratelimit-remaining",
            "age",
            "cf-ray",
            "x-request-id",
            "request-id",
            "x-amz-request-id",
            "x-amzn-requestid",
            "x-correlation-id",
            "x-trace-id",
            "traceparent",
            "tracestate",
            "server-timing",
        ];
        for name in left_out {
            assert_eq!(stored(&[(name, b"v")], &[]), [], "{name}");
            assert_eq!(stored(&[(name, b"v")], &[name]).len(), usize::from(!FRAMING.contains(&name)), "{name}");
        }
        for kept in ["content-type", "content-encoding", "etag", "location", "vary", "link", "x-anything"] {
            assert_eq!(stored(&[(kept, b"v")], &[]).len(), 1, "{kept}");
        }
    }

    #[test]
    fn fields_that_connection_names_stay_out() {
        let fields: [(&str, &[u8]); 3] = [("x-hop", b"1"), ("connection", b"close, X-Hop"), ("x-end", b"2")];
        assert_eq!(stored(&fields, &[]), [("x-end".to_owned(), b"2".to_vec())]);
    }
}
