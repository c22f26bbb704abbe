//! The decisions on a request before it runs, and the settings that they follow.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use idem_core::engine::{Conclusion, Operation};
use idem_core::{Fingerprint, FingerprintBuilder, HeaderField, IdempotencyKey, JsonPointer, Scope, StoredResponse};

use crate::authority::host;
use crate::budget::ByteBudget;
use crate::content::content;
use crate::directives::ResponseDirectives;
use crate::headers::{HeaderFields, storable};
use crate::key_header::parse_key_header;
use crate::prefer;
use crate::problem::{Problem, ProblemKind};
use crate::reply::Reply;
use crate::request::RequestBuffer;
use crate::response::{ResponseCapture, fault};

/// How HTTP requests are protected. Everything has a default.
#[derive(Debug, Clone)]
pub struct HttpPolicy {
    key_header: String,
    pub(crate) replay_header: Bytes,
    pub(crate) challenge: Bytes,
    key_required: bool,
    methods: Vec<String>,
    request_body_limit: usize,
    request_body_timeout: Duration,
    stored_response_limit: usize,
    response_body_timeout: Duration,
    budget: ByteBudget,
    fingerprint_headers: Vec<String>,
    ignored_members: Arc<[JsonPointer]>,
    allowed_headers: Vec<String>,
}

/// Request headers of the fingerprint; [`HttpPolicy::fingerprint_header`] says why.
const FINGERPRINT_HEADERS: [&str; 13] = [
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

/// What a request is to the layer.
#[derive(Debug)]
#[expect(clippy::exhaustive_enums, reason = "adapters must handle every decision")]
#[expect(
    clippy::large_enum_variant,
    reason = "it is taken apart at once, and most protected requests are this variant"
)]
pub enum Inspection {
    /// None of its business: pass it on untouched. No record is made.
    Pass,
    /// Answer with this problem; nothing runs.
    Refuse(Problem),
    /// Protect it.
    Protect(ProtectedRequest),
}

/// A request that is to be protected, once its body has arrived.
#[derive(Debug)]
pub struct ProtectedRequest {
    key: IdempotencyKey,
    wait: Option<Duration>,
    fingerprint: FingerprintBuilder,
}

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
            methods: vec!["POST".to_owned(), "PATCH".to_owned()],
            request_body_limit: 1024 * 1024,
            request_body_timeout: Duration::from_secs(60),
            stored_response_limit: 1024 * 1024,
            response_body_timeout: Duration::from_secs(60),
            budget: ByteBudget::new(256 * 1024 * 1024),
            fingerprint_headers: FINGERPRINT_HEADERS.map(str::to_owned).to_vec(),
            ignored_members: Arc::from([]),
            allowed_headers: Vec::new(),
        }
    }

    /// The request header that carries the key. Default `Idempotency-Key`
    /// (draft-ietf-httpapi-idempotency-key-header).
    #[must_use]
    pub fn key_header(mut self, name: &str) -> Self {
        self.key_header = name.to_ascii_lowercase();
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

    /// How long an adapter awaits a request body.
    #[must_use]
    pub fn body_timeout(&self) -> Duration {
        self.request_body_timeout
    }

    /// The largest response body that is stored, in bytes. Default 1 MiB; the record of a larger one is a tombstone.
    #[must_use]
    pub fn stored_response_limit(mut self, bytes: usize) -> Self {
        self.stored_response_limit = bytes;
        self
    }

    /// How long the body of an answer may take to be made, up to its end or to the limit of what is stored. Default 60 s, as
    /// long as a request's body may take to arrive. Its key, its transaction and a
    /// [shutdown](idem_core::engine::Idempotency::shutdown) wait for it.
    ///
    /// A body that takes longer is one that broke off: the client gets a 500 problem, and the contract says what becomes of the
    /// operation. An answer that is meant to be slow says so by
    /// [`do_not_retain_body`](ResponseDirectives::do_not_retain_body), or is an event stream; it is settled before its body.
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

    /// Stores and replays a response header that is otherwise left out, such as one that a route needs. Default none.
    #[must_use]
    pub fn allow_stored_header(mut self, name: &str) -> Self {
        self.allowed_headers.push(name.to_ascii_lowercase());
        self
    }

    #[cfg(feature = "openapi")]
    pub(crate) fn key_header_name(&self) -> &str {
        &self.key_header
    }

    #[cfg(feature = "openapi")]
    pub(crate) fn is_key_required(&self) -> bool {
        self.key_required
    }

    /// Decides what a request is. `path` and `query` are as they were sent; `authority` is that of the target or of
    /// `:authority`, if the request has one.
    #[must_use]
    pub fn inspect(
        &self,
        method: &str,
        authority: Option<&str>,
        path: &str,
        query: Option<&str>,
        headers: &(impl HeaderFields + ?Sized),
    ) -> Inspection {
        if !self.methods.iter().any(|protected| protected == method) {
            return Inspection::Pass;
        }
        let key = match parse_key_header(headers.values(&self.key_header)) {
            Ok(Some(key)) => key,
            Ok(None) if self.key_required => return Inspection::Refuse(Problem::new(ProblemKind::KeyMissing)),
            Ok(None) => return Inspection::Pass,
            Err(error) => {
                let problem = Problem::new(ProblemKind::KeyInvalid).detail(format!("The header is refused: {error}."));
                return Inspection::Refuse(problem);
            }
        };
        let wait = prefer::wait(headers.values("prefer"));
        match self.fingerprint(method, authority, path, query, headers) {
            Ok(fingerprint) => Inspection::Protect(ProtectedRequest { key, wait, fingerprint }),
            Err(problem) => Inspection::Refuse(problem),
        }
    }

    /// The head of a version 1 fingerprint: method, path, query and the listed header fields, in this order.
    fn fingerprint(
        &self,
        method: &str,
        authority: Option<&str>,
        path: &str,
        query: Option<&str>,
        headers: &(impl HeaderFields + ?Sized),
    ) -> Result<FingerprintBuilder, Problem> {
        let content_types: Vec<&[u8]> = headers.values("content-type").collect();
        let content = content(&content_types, headers.values("content-encoding"), &self.ignored_members);
        let mut fingerprint = FingerprintBuilder::new(content.format);
        fingerprint.field("method", method.as_bytes());
        fingerprint.field("path", path.as_bytes());
        if let Some(query) = query {
            fingerprint.field("query", query.as_bytes());
        }
        for name in &self.fingerprint_headers {
            match (name.as_str(), content.content_type) {
                ("content-type", Some(content_type)) => fingerprint.field(name, content_type),
                ("host", _) => {
                    if let Some(host) = host(authority, headers.values(name))? {
                        fingerprint.field(name, &host);
                    }
                }
                ("cookie", _) => {
                    let crumbs: Vec<&[u8]> = headers.values(name).collect();
                    if !crumbs.is_empty() {
                        fingerprint.field(name, &crumbs.join(&b"; "[..]));
                    }
                }
                _ => headers.values(name).for_each(|value| fingerprint.field(name, value)),
            }
        }
        Ok(fingerprint)
    }

    /// Begins to collect a response of the handler.
    #[must_use]
    pub fn capture(
        &self,
        status: u16,
        headers: &(impl HeaderFields + ?Sized),
        directives: Option<&ResponseDirectives>,
    ) -> ResponseCapture {
        let mut headers = storable(headers, &self.allowed_headers);
        // A replay is marked by this policy alone; a mark that the handler passed on belongs to somebody else's replay.
        headers.retain(|field| field.name != self.replay_header);
        let directives = directives.cloned().unwrap_or_default();
        ResponseCapture::new(status, headers, directives, self.stored_response_limit, self.response_body_timeout)
    }

    /// The conclusion of a handler that panicked, or whose answer broke off or took too long under the limit: a 500 problem.
    #[must_use]
    pub fn handler_failed<T>(&self) -> Conclusion<Result<T, Reply>> {
        let reply = self.problem(&Problem::new(ProblemKind::HandlerFailed));
        let field = |(name, value): &(Bytes, Bytes)| HeaderField { name: name.clone(), value: value.clone() };
        let headers = reply.headers.iter().map(field).collect();
        fault(StoredResponse { headers, ..StoredResponse::new(reply.status, reply.body.clone()) }, Err(reply))
    }
}

impl ProtectedRequest {
    /// Begins to collect the request's body, which counts against the share of `principal`, and keeps what the operation
    /// needs besides.
    #[must_use]
    pub fn buffer(self, policy: &HttpPolicy, principal: Option<&str>) -> (PendingOperation, RequestBuffer) {
        let buffer = RequestBuffer::new(self.fingerprint, policy.request_body_limit, &policy.budget, principal);
        (PendingOperation { key: self.key, wait: self.wait }, buffer)
    }
}

/// An operation that lacks its fingerprint, because the body is still arriving.
#[derive(Debug)]
pub struct PendingOperation {
    key: IdempotencyKey,
    wait: Option<Duration>,
}

impl PendingOperation {
    /// The operation of the request in `scope`.
    #[must_use]
    pub fn complete(self, scope: Scope, fingerprint: Fingerprint) -> Operation {
        let operation = Operation::new(scope, self.key, fingerprint);
        match self.wait {
            Some(wait) => operation.wait(wait),
            None => operation,
        }
    }
}

#[cfg(test)]
mod tests;
