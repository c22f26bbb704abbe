//! How HTTP requests are protected: the settings.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use idem_core::JsonPointer;

use crate::budget::ByteBudget;
use crate::meaning::{AnsweredWith, Classifier, Meaning};
use crate::problem::Problem;
use crate::problem_style::{ProblemBody, ProblemStyle};

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
    pub(crate) response_body_timeout: Duration,
    pub(crate) budget: ByteBudget,
    pub(crate) fingerprint_headers: Vec<String>,
    pub(crate) ignored_members: Arc<[JsonPointer]>,
    pub(crate) allowed_headers: Vec<String>,
    pub(crate) classifier: Option<Classifier>,
    pub(crate) key_member: Option<JsonPointer>,
    pub(crate) mismatch_status: u16,
    pub(crate) problems: ProblemStyle,
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
            response_body_timeout: Duration::from_secs(60),
            budget: ByteBudget::new(256 * 1024 * 1024),
            fingerprint_headers: FINGERPRINT_HEADERS.map(str::to_owned).to_vec(),
            ignored_members: Arc::from([]),
            allowed_headers: Vec::new(),
            classifier: None,
            key_member: None,
            mismatch_status: 422,
            problems: ProblemStyle::default(),
        }
    }

    /// The request header that carries the key. Default `Idempotency-Key`
    /// (draft-ietf-httpapi-idempotency-key-header).
    #[must_use]
    pub fn key_header(mut self, name: &str) -> Self {
        self.key_header = name.to_ascii_lowercase();
        self
    }

    /// Takes the key from a member of the JSON request body, as in `"/id"`, instead of a header: for webhooks, whose senders name
    /// the event in it. The member is a string, or a whole number of 64 bits. Every request then needs it, whatever
    /// [`key_optional`](Self::key_optional) says: it is found only when the body has been read. A sender that names the event in a
    /// header needs only [`key_header`](Self::key_header). Where the member occurs twice, the last one counts.
    ///
    /// **Check the sender's signature outside of the layer**, and put the body back, or answer 401 or 403 inside: these free the
    /// key. A 400 is stored. Any stranger could then send the id of an event that is still to come with another body, and the
    /// event itself would be a mismatch. What decompresses bodies has to stand outside as well.
    #[must_use]
    pub fn key_member(mut self, member: JsonPointer) -> Self {
        self.key_member = Some(member);
        self
    }

    /// Answers a key that was used for a different request by 409 instead of 422. Default 422, as in
    /// draft-ietf-httpapi-idempotency-key-header section 2.7. Some clients take every 422 for a validation error. Others
    /// repeat every 409, and would repeat this one in vain: the problem's `type` tells it from a run in progress.
    #[must_use]
    pub fn mismatch_is_conflict(mut self) -> Self {
        self.mismatch_status = 409;
        self
    }

    /// What the `type` of problems begins with; the [name](crate::ProblemKind::name) of the kind follows. Default: the page of
    /// [`problem`](crate::problem) on docs.rs, so that a reader of the URI finds what to do. Set it where clients are not to see
    /// which library you use, or where your own pages explain errors: `https://api.example.com/problems/`.
    #[must_use]
    pub fn problem_type_base(mut self, base: impl Into<String>) -> Self {
        self.problems.type_base = base.into().into();
        self
    }

    /// Writes problems in the form of your other errors instead of `application/problem+json`. `write` gets the problem and
    /// the status that the answer has, and returns the body. Status and `Retry-After` stay. If it panics, the answer is the
    /// default one.
    ///
    /// ```
    /// use idem_http::HttpPolicy;
    ///
    /// let policy = HttpPolicy::new().problem_body("application/json", |problem, _status| {
    ///     format!(r#"{{"error":{{"code":"{}"}}}}"#, problem.kind().name()).into_bytes()
    /// });
    /// ```
    #[must_use]
    pub fn problem_body(
        mut self,
        content_type: &str,
        write: impl Fn(&Problem, u16) -> Vec<u8> + Send + Sync + 'static,
    ) -> Self {
        self.problems.body = Some(ProblemBody::new(content_type, write));
        self
    }

    /// The response header that marks a replay. Default `Idempotency-Replayed`.
    #[must_use]
    pub fn replay_header(mut self, name: &str) -> Self {
        self.replay_header = name.to_ascii_lowercase().into();
        self
    }

    /// The `WWW-Authenticate` challenge of a 401, which RFC 9110 section 15.5.2 demands. Default `Bearer`.
    #[must_use]
    pub fn challenge(mut self, challenge: &str) -> Self {
        self.challenge = Bytes::copy_from_slice(challenge.as_bytes());
        self
    }

    /// Lets requests without a key pass unprotected. Default: the key is required, because a client that forgets it is
    /// the one that needs it.
    #[must_use]
    pub fn key_optional(mut self) -> Self {
        self.key_required = false;
        self
    }

    /// The shortest key that is accepted, in bytes. Shorter ones are refused with 400. Default 1: a key needs to be unique only
    /// among those of one principal and operation. A client that counts from 1 and starts again meets its earlier keys;
    /// 16 refuses such keys, and accepts UUIDs.
    #[must_use]
    pub fn min_key_length(mut self, bytes: usize) -> Self {
        self.min_key_length = bytes;
        self
    }

    /// The methods that are protected. Default POST and PATCH: the others are idempotent by themselves (RFC
    /// 9110 section 9.2.2). GET, HEAD, OPTIONS, CONNECT and TRACE are never protected, whatever is named here.
    #[must_use]
    pub fn methods(mut self, methods: &[&str]) -> Self {
        const NEVER: [&str; 5] = ["GET", "HEAD", "OPTIONS", "CONNECT", "TRACE"];
        let is_never = |method: &str| NEVER.iter().any(|never| never.eq_ignore_ascii_case(method));
        let protected = methods.iter().filter(|method| !is_never(method));
        self.methods = protected.map(|method| method.to_ascii_uppercase()).collect();
        self
    }

    /// The largest request body, in bytes. Default 1 MiB; larger ones are refused before anything runs, since the body
    /// is held in memory until its fingerprint is known. That of a JSON body is made when all of it is there, in one go of
    /// a few milliseconds for each MiB, and meanwhile takes up to five times the body's memory on that thread.
    #[must_use]
    pub fn request_body_limit(mut self, bytes: usize) -> Self {
        self.request_body_limit = bytes;
        self
    }

    /// How long a request body may take to arrive. Default 60 s: a megabyte over a slow line, and not for ever, because
    /// what has arrived is held in memory and counts against the budget of all.
    #[must_use]
    pub fn request_body_timeout(mut self, limit: Duration) -> Self {
        self.request_body_timeout = limit;
        self
    }

    /// The largest response body that is stored, in bytes. Default 1 MiB; the record of a larger one is a tombstone.
    #[must_use]
    pub fn stored_response_limit(mut self, bytes: usize) -> Self {
        self.stored_response_limit = bytes;
        self
    }

    /// Stores no bodies: a replay has the original status, the `Location`, the headers of
    /// [`allow_stored_header`](Self::allow_stored_header), and an empty body. For answers that must not be kept, or that clients do
    /// not need twice. A response is settled before its body is sent, unless [`classify`](Self::classify) has to read it. Default off: a repeat gets the whole first answer.
    #[must_use]
    pub fn key_only(mut self) -> Self {
        self.key_only = true;
        self
    }

    /// How long the body of an answer may take to be made, up to its end or to the limit of what is stored. Default 60 s, as
    /// long as a request's body may take to arrive. Its key, its transaction and a
    /// [shutdown](idem_core::engine::Idempotency::shutdown) wait for it.
    ///
    /// A body that takes longer is one that broke off: the client gets a 500 problem, and the contract says what becomes of the
    /// operation. An answer that is meant to be slow says so by
    /// [`do_not_retain_body`](crate::ResponseDirectives::do_not_retain_body), or is an event stream; it is settled before its
    /// body.
    #[must_use]
    pub fn response_body_timeout(mut self, limit: Duration) -> Self {
        self.response_body_timeout = limit;
        self
    }

    /// How many bytes of request bodies may be held at once, and by one principal; share one budget between layers by
    /// cloning it. Default 256 MiB for each policy, and a quarter of it for one principal: 256 bodies of the default limit,
    /// and a share of a small server's memory.
    #[must_use]
    pub fn budget(mut self, budget: ByteBudget) -> Self {
        self.budget = budget;
        self
    }

    /// Adds a request header to the fingerprint. Defaults:
    ///
    /// - what says what the body means, or where it belongs: `Content-Type`, `Content-Encoding`, `Content-Language`,
    ///   `Content-Location`, `Content-Disposition` and `Content-Range`;
    /// - preconditions (RFC 9110 section 13.1): `If-Match`, `If-None-Match`, `If-Modified-Since` and `If-Unmodified-Since`. A
    ///   request with another precondition asks for something else;
    /// - other methods in disguise: `X-HTTP-Method-Override`, `X-HTTP-Method` and `X-Method-Override`.
    ///
    /// `Accept` and its relatives, and `Prefer`, do not count: they ask for another form of the same answer, and a client that
    /// repeats a request by another library would get 422 for an operation that is done. Most other fields change between
    /// tries.
    ///
    /// `host` counts the authority of the request, by whichever protocol it comes: the field `Host`, the host of a target in
    /// absolute form, and `:authority`. Name it where one route serves several sites. It is no default, because many proxies
    /// put the address of the server in its place, which differs between tries. Where it counts, a request that names
    /// two hosts is refused with 400.
    ///
    /// `cookie` counts the same in one line and in the several that HTTP/2 allows (RFC 9113 section 8.2.3).
    #[must_use]
    pub fn fingerprint_header(mut self, name: &str) -> Self {
        let name = name.to_ascii_lowercase();
        self.fingerprint_headers.push(if name == ":authority" { "host".to_owned() } else { name });
        self
    }

    /// Members of JSON request bodies that do not count, such as a time of sending. Default none.
    #[must_use]
    pub fn ignore_members(mut self, members: impl IntoIterator<Item = JsonPointer>) -> Self {
        self.ignored_members = members.into_iter().collect();
        self
    }

    /// Says what responses mean. Default [`Meaning::of_status`].
    ///
    /// `classify` is called once for each response, when its body has been read. What the handler says by
    /// [`ResponseDirectives`](crate::ResponseDirectives) goes before. If it panics, the response counts as one that broke off.
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

    /// Stores and replays a response header that is otherwise left out, such as one that a route needs. Default none.
    #[must_use]
    pub fn allow_stored_header(mut self, name: &str) -> Self {
        self.allowed_headers.push(name.to_ascii_lowercase());
        self
    }
}
