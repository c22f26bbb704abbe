//! The key of one logical operation.

use std::time::Duration;

use http::HeaderValue;
use http::header::CONTENT_TYPE;
use idem_core::{BodyFormat, FingerprintBuilder, IdempotencyKey};
use reqwest::Request;
use uuid::Uuid;

/// What a caller says about one operation. Put it into the extensions of the request:
/// `client.post(url).with_extension(Operation::new())`.
///
/// A request without it gets a random key.
#[derive(Debug, Clone, Default)]
pub struct Operation {
    key: KeySource,
    pub(crate) label: Option<String>,
    pub(crate) deadline: Option<Duration>,
}

#[derive(Debug, Clone, Default)]
enum KeySource {
    #[default]
    Random,
    Own(IdempotencyKey),
    Content,
}

impl Operation {
    /// An operation with a random key, a UUIDv4. Each `send` is another operation.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An operation with the caller's own key, such as the id of an order.
    ///
    /// The client counts the server's retention from its own first send. If the same key was sent before, by another client or by
    /// an earlier process without a journal, the caller has to know that the server still keeps the answer.
    #[must_use]
    pub fn with_key(key: IdempotencyKey) -> Self {
        Self { key: KeySource::Own(key), ..Self::default() }
    }

    /// An operation whose key is made from method, URL, `Content-Type` and body, by the fingerprint of `idem-core`: white
    /// space and the order of members of JSON do not count.
    ///
    /// - A time, a random number or an id in the body makes a new key for each request, and so no protection.
    /// - Two operations with the same content are one: a second payment of the same amount to the same account is not made
    ///   within the server's retention.
    #[must_use]
    pub fn by_content() -> Self {
        Self { key: KeySource::Content, ..Self::default() }
    }

    /// A text by which [`resume`](crate::Journal::resume) finds the credentials again, such as the name of the account that pays.
    ///
    /// A journal keeps it in clear. Give one if operations of several accounts are in one journal: a key belongs to one account,
    /// and under the credentials of another one the server would run the operation again.
    #[must_use]
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// How long this operation may take. Default: [`Settings::deadline`](crate::Settings::deadline).
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// The key; `None` if the body is not in memory, so that nothing can be made from it.
    pub(crate) fn key(&self, request: &Request) -> Option<IdempotencyKey> {
        match &self.key {
            KeySource::Random => IdempotencyKey::new(Uuid::new_v4().to_string()).ok(),
            KeySource::Own(key) => Some(key.clone()),
            KeySource::Content => bytes_of(request).and_then(|body| key_of_content(request, body)),
        }
    }
}

/// The body of a request; `None` if it is not in memory.
pub(crate) fn bytes_of(request: &Request) -> Option<&[u8]> {
    request.body().map_or(Some(&[]), |body| body.as_bytes())
}

fn key_of_content(request: &Request, body: &[u8]) -> Option<IdempotencyKey> {
    let content_type = request.headers().get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    let format = if is_json(content_type) { BodyFormat::json() } else { BodyFormat::Raw };
    let mut builder = FingerprintBuilder::new(format);
    builder.field("method", request.method().as_str().as_bytes());
    let mut url = request.url().clone();
    // A fragment is not sent.
    url.set_fragment(None);
    builder.field("url", url.as_str().as_bytes());
    builder.field("content-type", content_type);
    builder.body(body);
    let hex: String = builder.finish().digest().iter().map(|byte| format!("{byte:02x}")).collect();
    IdempotencyKey::new(format!("content-{hex}")).ok()
}

fn is_json(content_type: &[u8]) -> bool {
    let media_type =
        content_type.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii().to_ascii_lowercase();
    media_type == b"application/json" || media_type.ends_with(b"+json")
}

/// The value of the header field: a String of RFC 8941 section 3.3.3, or the key as it is.
pub(crate) fn header_value(key: &IdempotencyKey, bare: bool) -> Option<HeaderValue> {
    let text = match bare {
        true => key.as_str().to_owned(),
        false => format!("\"{}\"", key.as_str().replace('\\', "\\\\").replace('"', "\\\"")),
    };
    let mut value = HeaderValue::from_str(&text).ok()?;
    // So that logs of requests hide it.
    value.set_sensitive(true);
    Some(value)
}

#[cfg(test)]
mod tests {
    use reqwest::Method;

    use super::*;

    fn request(url: &str, body: &'static str) -> Request {
        let mut request = Request::new(Method::POST, url.parse().unwrap());
        *request.body_mut() = Some(body.into());
        request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        request
    }

    fn content(request: &Request) -> String {
        Operation::by_content().key(request).unwrap().as_str().to_owned()
    }

    #[test]
    fn equal_content_has_equal_keys() {
        let first = content(&request("http://a.test/pay", r#"{"amount": 1.0, "to": "x"}"#));
        assert_eq!(first, content(&request("http://a.test/pay#part", r#"{"to":"x","amount":1.0}"#)));
        for (url, body) in [
            ("http://a.test/pay", r#"{"to":"x","amount":1}"#),
            ("http://a.test/pay?x", r#"{"to":"x","amount":1.0}"#),
            ("http://b.test/pay", r#"{"to":"x","amount":1.0}"#),
        ] {
            assert_ne!(first, content(&request(url, body)), "{url} {body}");
        }
        let mut typed = request("http://a.test/pay", r#"{"to":"x","amount":1.0}"#);
        typed.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
        let plain = content(&typed);
        assert_ne!(first, plain);
        *typed.body_mut() = Some(r#"{"to":"x", "amount":1.0}"#.into());
        assert_ne!(plain, content(&typed), "white space counts in text");
    }

    #[test]
    fn random_keys_differ_and_own_keys_stay() {
        let request = request("http://a.test/pay", "");
        let key = |operation: &Operation| operation.key(&request).unwrap();
        assert_ne!(key(&Operation::new()), key(&Operation::new()));
        let own = IdempotencyKey::new("order-1").unwrap();
        assert_eq!(key(&Operation::with_key(own.clone())), own);
    }

    #[test]
    fn keys_are_quoted_as_structured_fields_demand() {
        let key = IdempotencyKey::new(r#"a"b\c"#).unwrap();
        assert_eq!(header_value(&key, false).unwrap(), r#""a\"b\\c""#);
        assert_eq!(header_value(&key, true).unwrap(), r#"a"b\c"#);
        assert!(header_value(&key, false).unwrap().is_sensitive());
    }
}
