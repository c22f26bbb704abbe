//! How HTTP requests are protected: the settings.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use idem_core::JsonPointer;

use crate::budget::ByteBudget;
use crate::continuation::Continuation;
use crate::meaning::{AnsweredWith, Classifier, Meaning};
use crate::principal_limit::PrincipalLimit;
use crate::problem::Problem;
use crate::problem_style::{ProblemBody, ProblemStyle};
use crate::syntax::{is_field_value, is_token};

/// How HTTP requests are protected. Everything has a default.
#[derive(Debug, Clone)]
pub struct HttpPolicy {
    pub(crate) key_header: String,
    pub(crate) replay_header: Bytes,
    pub(crate) challenge: Bytes,
    pub(crate) key_required: bool,
    pub(crate) min_key_length: usize,
    pub(crate) methods: Vec<String>,
    pub(crate) request_body_limit: usize,
    pub(crate) request_body_timeout: Duration,
    pub(crate) stored_response_limit: usize,
    pub(crate) key_only: bool,
    /// Whether only named headers are stored.
    pub(crate) named_headers_only: bool,
    pub(crate) response_body_timeout: Duration,
    pub(crate) budget: ByteBudget,
    pub(crate) principal_limit: Option<PrincipalLimit>,
    pub(crate) fingerprint_headers: Vec<String>,
    pub(crate) ignored_members: Arc<[JsonPointer]>,
    pub(crate) allowed_headers: Vec<String>,
    pub(crate) classifier: Option<Classifier>,
    pub(crate) key_member: Option<JsonPointer>,
    pub(crate) mismatch_status: u16,
    pub(crate) problems: ProblemStyle,
    pub(crate) continuation: Option<Arc<dyn Continuation>>,
}

/// Request headers of the fingerprint; [`HttpPolicy::fingerprint_header`] says why.
pub(crate) const FINGERPRINT_HEADERS: [&str; 13] = [
    "content-type",
    "content-encoding",
    "content-language",
    "content-location",
    "content-disposition",
    "content-range",
    "if-match",
    "if-none-match",
    "if-modified-since",
    "if-unmodified-since",
    "x-http-method-override",
    "x-http-method",
    "x-method-override",
];

impl Default for HttpPolicy {
    fn default() -> Self {
        Self::new()
    }
}

impl HttpPolicy {
    /// The defaults.
    #[must_use]
    pub fn new() -> Self {
        Self {
            key_header: "idempotency-key".to_owned(),
            replay_header: Bytes::from_static(b"idempotency-replayed"),
            challenge: Bytes::from_static(b"Bearer"),
            key_required: true,
            min_key_length: 1,
            methods: vec!["POST".to_owned(), "PATCH".to_owned()],
            request_body_limit: 1024 * 1024,
            request_body_timeout: Duration::from_secs(60),
            stored_response_limit: 1024 * 1024,
            key_only: false,
            named_headers_only: false,
            response_body_timeout: Duration::from_secs(60),
            budget: ByteBudget::new(256 * 1024 * 1024),
            principal_limit: None,
            fingerprint_headers: FINGERPRINT_HEADERS.map(str::to_owned).to_vec(),
            ignored_members: Arc::from([]),
            allowed_headers: Vec::new(),
            classifier: None,
            key_member: None,
            mismatch_status: 422,
            problems: ProblemStyle::default(),
            continuation: None,
        }
    }

    /// The request header that carries the key. Default `Idempotency-Key`
    /// (draft-ietf-httpapi-idempotency-key-header).
    ///
    /// # Panics
    /// If no header field can have this name: no client could send a key.
    #[must_use]
    pub fn key_header(mut self, name: &str) -> Self {
        self.key_header = field_name(name);
        self
    }

    /// Takes the key from a member of the JSON request body, such as `"/id"`, instead of a header.
    ///
    /// Use it for webhooks whose senders name the event in the body; for those that name it in a header,
    /// [`key_header`](Self::key_header) is enough. The member is a string, or a whole number of 64 bits. If it occurs twice,
    /// the last one counts. Every request needs it, whatever [`key_optional`](Self::key_optional) says, because the layer
    /// finds it only after it has read the body.
    ///
    /// **Check the sender's signature outside of the layer**, and put the body back. Or answer 401 or 403 inside, which frees
    /// the key. A 400 is stored: a stranger could then send the id of a future event with another body, and the event itself
    /// would be a mismatch. Middleware that decompresses bodies must stand outside as well.
    #[must_use]
    pub fn key_member(mut self, member: JsonPointer) -> Self {
        self.key_member = Some(member);
        self
    }

    /// Answers 409 instead of 422 if a key was used for a different request. Default 422, as in
    /// draft-ietf-httpapi-idempotency-key-header section 2.7. Some clients take every 422 for a validation error. Others
    /// repeat every 409, and would repeat this one in vain. The problem's `type` tells it from a run in progress.
    #[must_use]
    pub fn mismatch_is_conflict(mut self) -> Self {
        self.mismatch_status = 409;
        self
    }

    /// Sets the prefix of the `type` URI of problems; the [name](crate::ProblemKind::name) of the kind follows. Default: the
    /// page of [`problem`](crate::problem) on docs.rs, which says what to do. Set it to hide which library you use, or where
    /// your own pages explain errors: `https://api.example.com/problems/`.
    #[must_use]
    pub fn problem_type_base(mut self, base: impl Into<String>) -> Self {
        self.problems.type_base = base.into().into();
        self
    }

    /// Writes problems in the form of your other errors instead of `application/problem+json`. `write` gets the problem and
    /// the status of the answer, and returns the body. The status and `Retry-After` stay the same. If `write` panics, the
    /// answer has the default body.
    ///
    /// ```
    /// use idem_http::HttpPolicy;
    ///
    /// let policy = HttpPolicy::new().problem_body("application/json", |problem, _status| {
    ///     format!(r#"{{"error":{{"code":"{}"}}}}"#, problem.kind().name()).into_bytes()
    /// });
    /// ```
    ///
    /// # Panics
    /// If `content_type` has a line break or another control character: no problem would have a content type.
    #[must_use]
    pub fn problem_body(
        mut self,
        content_type: &str,
        write: impl Fn(&Problem, u16) -> Vec<u8> + Send + Sync + 'static,
    ) -> Self {
        assert!(is_field_value(content_type), "{content_type:?} cannot be the value of a header field");
        self.problems.body = Some(ProblemBody::new(content_type, write));
        self
    }

    /// The response header that marks a replay. Default `Idempotency-Replayed`.
    ///
    /// # Panics
    /// If no header field can have this name: no replay would be marked.
    #[must_use]
    pub fn replay_header(mut self, name: &str) -> Self {
        self.replay_header = field_name(name).into();
        self
    }

    /// The `WWW-Authenticate` challenge of a 401, which RFC 9110 section 15.5.2 demands. Default `Bearer`.
    ///
    /// # Panics
    /// If it has a line break or another control character: a 401 would have no challenge.
    #[must_use]
    pub fn challenge(mut self, challenge: &str) -> Self {
        assert!(is_field_value(challenge), "the challenge {challenge:?} cannot be the value of a header field");
        self.challenge = Bytes::copy_from_slice(challenge.as_bytes());
        self
    }

    /// Lets requests without a key pass unprotected. Default: the key is required, because clients that forget it need the
    /// protection most.
    #[must_use]
    pub fn key_optional(mut self) -> Self {
        self.key_required = false;
        self
    }

    /// The shortest accepted key, in bytes; shorter keys get 400. Default 1, because a key must be unique only within its
    /// principal and operation. A client that counts from 1 and starts again meets its earlier keys. A minimum of 16 refuses
    /// such keys, and accepts UUIDs.
    #[must_use]
    pub fn min_key_length(mut self, bytes: usize) -> Self {
        self.min_key_length = bytes;
        self
    }

    /// The methods that are protected. Default POST and PATCH, because the others are idempotent by definition (RFC 9110
    /// section 9.2.2). GET, HEAD, OPTIONS, CONNECT and TRACE are never protected, whatever is named here.
    #[must_use]
    pub fn methods(mut self, methods: &[&str]) -> Self {
        const NEVER: [&str; 5] = ["GET", "HEAD", "OPTIONS", "CONNECT", "TRACE"];
        let is_never = |method: &str| NEVER.iter().any(|never| never.eq_ignore_ascii_case(method));
        let protected = methods.iter().filter(|method| !is_never(method));
        self.methods = protected.map(|method| method.to_ascii_uppercase()).collect();
        self
    }

    /// The largest request body, in bytes. Default 1 MiB. A larger one is refused before anything runs.
    ///
    /// The body is held in memory until its fingerprint is known. The fingerprint of a JSON body is computed after the last
    /// byte, in one go of a few milliseconds per MiB. Meanwhile it takes up to five times the body's memory on that thread.
    #[must_use]
    pub fn request_body_limit(mut self, bytes: usize) -> Self {
        self.request_body_limit = bytes;
        self
    }

    /// How long a request body may take to arrive. Default 60 s, enough for 1 MiB over a slow line. Received bytes stay in
    /// memory and count against the budget of all requests, so an upload cannot last forever.
    #[must_use]
    pub fn request_body_timeout(mut self, limit: Duration) -> Self {
        self.request_body_timeout = limit;
        self
    }

    /// The largest response body that is stored, in bytes. Default 1 MiB. The record of a larger one is a tombstone.
    #[must_use]
    pub fn stored_response_limit(mut self, bytes: usize) -> Self {
        self.stored_response_limit = bytes;
        self
    }

    /// Stores no bodies. Default off: a repeat gets the whole first answer.
    ///
    /// A replay has the original status, the `Location`, the headers of [`allow_stored_header`](Self::allow_stored_header),
    /// and an empty body. Use it for answers that must not be stored, or that clients do not need twice. A response is
    /// settled before its body is sent, unless [`classify`](Self::classify) must read it.
    #[must_use]
    pub fn key_only(mut self) -> Self {
        self.key_only = true;
        self
    }

    /// How long a response body may take to be produced, up to its end or to the limit of what is stored. Default 60 s, like
    /// the request body. The key, the transaction and a [shutdown](idem_core::engine::Idempotency::shutdown) wait for it.
    ///
    /// A body that takes longer counts as broken off: the client gets a 500 problem, and the contract decides what becomes of
    /// the operation. Mark an intentionally slow response with
    /// [`do_not_retain_body`](crate::ResponseDirectives::do_not_retain_body), or send an event stream. Both are settled
    /// before their body.
    #[must_use]
    pub fn response_body_timeout(mut self, limit: Duration) -> Self {
        self.response_body_timeout = limit;
        self
    }

    /// How many bytes of request bodies may be held at once, in total and by one principal. Clone one budget to share it
    /// between layers. Default 256 MiB for each policy, which is 256 bodies of the default limit; one principal may hold a
    /// quarter of it.
    #[must_use]
    pub fn budget(mut self, budget: ByteBudget) -> Self {
        self.budget = budget;
        self
    }

    /// How many keys of one principal may be in use at once in this process, at least 1: its requests that arrive, run, or wait
    /// for another one's run. More are answered with 429 `share-exceeded`, and nothing runs.
    ///
    /// Default no limit, because one principal may stand for many clients, such as a gateway. Set one where a single client could
    /// take all operations that the engine [runs at once](idem_core::engine::Settings::max_running), or all transactions of a
    /// store. A layer without principals has no limit.
    #[must_use]
    pub fn max_keys_per_principal(mut self, most: usize) -> Self {
        self.principal_limit = Some(PrincipalLimit::new(most));
        self
    }

    /// Adds a request header to the fingerprint. Defaults:
    ///
    /// - fields that say what the body means, or where it belongs: `Content-Type`, `Content-Encoding`, `Content-Language`,
    ///   `Content-Location`, `Content-Disposition` and `Content-Range`;
    /// - preconditions (RFC 9110 section 13.1): `If-Match`, `If-None-Match`, `If-Modified-Since` and `If-Unmodified-Since`. A
    ///   request with another precondition asks for something else;
    /// - method overrides: `X-HTTP-Method-Override`, `X-HTTP-Method` and `X-Method-Override`.
    ///
    /// `Accept` and its relatives, and `Prefer`, do not count: they ask for another form of the same answer. If they counted,
    /// a client that repeats a request through another library would get 422 for a finished operation. Most other fields
    /// change between attempts.
    ///
    /// `host` covers the authority of the request in every protocol: the field `Host`, the host of a target in absolute form,
    /// and `:authority`. Name it where one route serves several sites. It is no default, because many proxies replace it by
    /// the address of the server, which differs between attempts. If it counts, a request that names two hosts is refused
    /// with 400.
    ///
    /// `cookie` counts the same in one line and in several lines, which HTTP/2 allows (RFC 9113 section 8.2.3).
    ///
    /// # Panics
    /// If no header field can have this name: it would never count.
    #[must_use]
    pub fn fingerprint_header(mut self, name: &str) -> Self {
        let name = if name.eq_ignore_ascii_case(":authority") { "host" } else { name };
        self.fingerprint_headers.push(field_name(name));
        self
    }

    /// Excludes members of JSON request bodies from the fingerprint, such as a time of sending. Default none.
    #[must_use]
    pub fn ignore_members(mut self, members: impl IntoIterator<Item = JsonPointer>) -> Self {
        self.ignored_members = members.into_iter().collect();
        self
    }

    /// Sets what responses mean. Default [`Meaning::of_status`].
    ///
    /// `classify` is called once for each response, after its body has been read. The handler's
    /// [`ResponseDirectives`](crate::ResponseDirectives) take precedence. If `classify` panics, the response counts as broken
    /// off.
    ///
    /// ```
    /// use idem_http::{HttpPolicy, Meaning};
    ///
    /// // A client may correct a request that failed validation, and send it with the same key.
    /// let policy = HttpPolicy::new().classify(|response| match response.status {
    ///     400 | 422 => Meaning::Release,
    ///     status => Meaning::of_status(status),
    /// });
    /// // A GraphQL server answers 200 to a mutation that failed.
    /// let graphql = HttpPolicy::new().classify(Meaning::of_graphql);
    /// ```
    #[must_use]
    pub fn classify(mut self, classify: impl Fn(&AnsweredWith<'_>) -> Meaning + Send + Sync + 'static) -> Self {
        self.classifier = Some(Classifier::new(classify));
        self
    }

    /// Answers repeats with the final answer, if the first answer only says that the work was accepted.
    ///
    /// Default none: every repeat gets the first answer, such as a 202, byte for byte. With `idem-jobs`, a repeat of the request
    /// gets the result of its job as soon as there is one.
    #[must_use]
    pub fn continued_by(mut self, continuation: Arc<dyn Continuation>) -> Self {
        self.continuation = Some(continuation);
        self
    }

    /// Stores and replays a response header that the layer leaves out by default. Default none. `Content-Length` and
    /// `Transfer-Encoding` stay out: they belong to one message.
    ///
    /// # Panics
    /// If no header field can have this name.
    #[must_use]
    pub fn allow_stored_header(mut self, name: &str) -> Self {
        self.allowed_headers.push(field_name(name));
        self
    }

    /// Stores and replays only these response headers: those of [`allow_stored_header`](Self::allow_stored_header), `Location`,
    /// `Content-Type`, `Content-Encoding`, `Content-Language`, `Cache-Control`, `Expires` and `Vary`. Default: all but
    /// credentials and what belongs to one moment, because clients may need any of them. Use it where inner middleware adds
    /// headers that repeats must not get. Name the security headers that such middleware adds.
    #[must_use]
    pub fn store_named_headers_only(mut self) -> Self {
        self.named_headers_only = true;
        self
    }

    /// The name of the response header that marks a replay, in lower case. Adapters remove it from the handler's own answer, where
    /// it belongs to an upstream server: a client would take the first answer for a replay.
    #[must_use]
    pub fn replay_header_name(&self) -> &str {
        // A token is ASCII.
        std::str::from_utf8(&self.replay_header).unwrap_or_default()
    }

    /// Whether a replay has a header that [`storable`](crate::headers::storable) does not leave out; its name is in lower case.
    pub(crate) fn is_replayed(&self, name: &[u8]) -> bool {
        let is_named = || name == b"location" || self.allowed_headers.iter().any(|allowed| allowed.as_bytes() == name);
        match (self.key_only, self.named_headers_only) {
            (true, _) => is_named(),
            (false, true) => is_named() || OF_BODIES.contains(&name),
            (false, false) => true,
        }
    }
}

/// Headers that describe a body, and say who may keep it.
const OF_BODIES: [&[u8]; 6] =
    [b"content-type", b"content-encoding", b"content-language", b"cache-control", b"expires", b"vary"];

/// The name of a header field in lower case.
fn field_name(name: &str) -> String {
    assert!(is_token(name), "{name:?} cannot be the name of a header field");
    name.to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    #[test]
    fn names_that_no_header_field_can_have_are_refused() {
        let settings: [fn() -> HttpPolicy; 6] = [
            || HttpPolicy::new().key_header("X Key"),
            || HttpPolicy::new().replay_header("Replayed:"),
            || HttpPolicy::new().fingerprint_header(""),
            || HttpPolicy::new().allow_stored_header("x\r\n"),
            || HttpPolicy::new().challenge("Bearer\n"),
            || HttpPolicy::new().problem_body("text/\nplain", |_, _| Vec::new()),
        ];
        for (at, set) in settings.into_iter().enumerate() {
            assert!(catch_unwind(set).is_err(), "setting {at}");
        }
        assert_eq!(HttpPolicy::new().fingerprint_header(":Authority").fingerprint_headers.last().unwrap(), "host");
    }
}
