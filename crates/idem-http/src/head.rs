//! The head of a request: which operation it asks for, and by which key.

use std::time::Duration;

use idem_core::{FingerprintBuilder, IdempotencyKey};

use crate::authority::host;
use crate::content::content;
use crate::headers::HeaderFields;
use crate::key_header::parse_key_header;
use crate::policy::HttpPolicy;
use crate::prefer;
use crate::problem::{Problem, ProblemKind};

/// The parts of a request's head that a layer reads.
#[derive(Debug)]
#[expect(clippy::exhaustive_structs, reason = "an adapter must say everything that counts")]
pub struct RequestHead<'a, F> {
    /// The method.
    pub method: &'a str,
    /// Host and port of a target in absolute form (RFC 9112 section 3.2.2), or of `:authority`; not the field `Host`, which is
    /// one of the header fields.
    pub authority: Option<&'a str>,
    /// The path as the client sent it.
    pub path: &'a str,
    /// The query as the client sent it.
    pub query: Option<&'a str>,
    /// The pattern of the route. `None` in a layer outside of all routers, where the path names the operation instead.
    pub route: Option<&'a str>,
    /// The header fields.
    pub headers: F,
    /// Whether another layer protects the request already, so that its extensions have a
    /// [`Context`](idem_core::engine::Context).
    pub is_protected: bool,
}

/// What the head of a protected request says.
pub(crate) struct KeyedHead {
    /// `None` when it is in the body.
    pub(crate) key: Option<IdempotencyKey>,
    /// How long the client prefers to wait for another request's run.
    pub(crate) wait: Option<Duration>,
    /// The fingerprint of the head; the body is still to be added.
    pub(crate) fingerprint: FingerprintBuilder,
}

impl<F: HeaderFields> RequestHead<'_, F> {
    /// The name of the operation: method and route.
    pub(crate) fn operation(&self) -> String {
        format!("{} {}", self.method, self.route.unwrap_or(self.path))
    }

    /// Reads what a policy needs from the head; `None` if the policy does not protect the request.
    pub(crate) fn read(&self, policy: &HttpPolicy) -> Result<Option<KeyedHead>, Problem> {
        if !policy.methods.iter().any(|protected| protected == self.method) {
            return Ok(None);
        }
        let may_pass = !policy.key_required && policy.key_member.is_none();
        if may_pass && self.headers.values(&policy.key_header).next().is_none() {
            return Ok(None);
        }
        if self.headers.values("content-type").any(is_grpc) {
            return Err(Problem::new(ProblemKind::GrpcUnsupported));
        }
        let key = match parse_key_header(self.headers.values(&policy.key_header)) {
            _ if policy.key_member.is_some() => None,
            Ok(Some(key)) => Some(long_enough(key, policy)?),
            Ok(None) => {
                let detail = format!(
                    "This request needs an idempotency key in the header {}: new for every operation, and the same on every \
                     repeat.",
                    policy.key_header
                );
                return Err(Problem::new(ProblemKind::KeyMissing).detail(detail));
            }
            Err(error) => {
                let detail = format!("The header {} is refused: {error}.", policy.key_header);
                return Err(Problem::new(ProblemKind::KeyInvalid).detail(detail));
            }
        };
        let wait = prefer::wait(self.headers.values("prefer"));
        Ok(Some(KeyedHead { key, wait, fingerprint: self.fingerprint(policy)? }))
    }

    /// The head of a version 1 fingerprint: method, path, query and the listed header fields, in this order.
    fn fingerprint(&self, policy: &HttpPolicy) -> Result<FingerprintBuilder, Problem> {
        let headers = &self.headers;
        let content_types: Vec<&[u8]> = headers.values("content-type").collect();
        let content = content(&content_types, headers.values("content-encoding"), &policy.ignored_members);
        let mut fingerprint = FingerprintBuilder::new(content.format);
        fingerprint.field("method", self.method.as_bytes());
        fingerprint.field("path", self.path.as_bytes());
        if let Some(query) = self.query {
            fingerprint.field("query", query.as_bytes());
        }
        for name in &policy.fingerprint_headers {
            match (name.as_str(), content.content_type) {
                ("content-type", Some(content_type)) => fingerprint.field(name, content_type),
                ("host", _) => {
                    if let Some(host) = host(self.authority, headers.values(name))? {
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
}

/// Whether the content type is that of gRPC or gRPC-Web, whose responses carry their outcome in trailers.
fn is_grpc(content_type: &[u8]) -> bool {
    const GRPC: &[u8] = b"application/grpc";
    content_type.get(..GRPC.len()).is_some_and(|start| start.eq_ignore_ascii_case(GRPC))
}

/// Refuses a key that is shorter than the policy wants it.
pub(crate) fn long_enough(key: IdempotencyKey, policy: &HttpPolicy) -> Result<IdempotencyKey, Problem> {
    let (bytes, least) = (key.as_str().len(), policy.min_key_length);
    if bytes >= least {
        return Ok(key);
    }
    let detail = format!("The key has {bytes} bytes; at least {least} are needed, as in a UUID.");
    Err(Problem::new(ProblemKind::KeyInvalid).detail(detail))
}

#[cfg(test)]
mod tests;
