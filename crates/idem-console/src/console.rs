//! The router.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{FromRequestParts, OriginalUri};
use axum::middleware::map_response;
use axum::response::Response;
use axum::routing::get;
use http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS};
use http::request::Parts;
use http::{HeaderValue, StatusCode};
use idem_core::{Inspect, Operate, OwnerToken, SecretTooShort};

use crate::access::{Access, Permissions};
use crate::forgery::Secret;
use crate::pages::{self, Page};
use crate::survey::Survey;

/// How long a resolved record is kept by default: as long as the engine keeps records.
const RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

/// A console for the records of one store.
///
/// It reads the store for each page. The overview also counts all records in the background, in parts of 1,000, for at most a twentieth
/// of the time.
#[derive(Clone)]
pub struct Console {
    pub(crate) inspect: Arc<dyn Inspect>,
    pub(crate) operate: Arc<dyn Operate>,
    access: Arc<dyn Access>,
    pub(crate) secret: Option<Secret>,
    pub(crate) retention: Duration,
    pub(crate) survey: Arc<Survey>,
}

impl Console {
    /// A console that reads by `inspect` and repairs by `operate`, usually one store. `access` says who may do what.
    #[must_use]
    pub fn new(inspect: Arc<dyn Inspect>, operate: Arc<dyn Operate>, access: Arc<dyn Access>) -> Self {
        // 244 random bits, from the operating system.
        let secret = [OwnerToken::random(), OwnerToken::random()].map(|token| *token.as_bytes()).concat();
        let (retention, survey) = (RETENTION, Arc::default());
        Self { inspect, operate, access, secret: Secret::new(&secret), retention, survey }
    }

    /// The secret by which forms are recognised, at least 32 random bytes. It must be the same in all processes that serve the console.
    ///
    /// Default: a random one, so that a form from one process is refused by another one, and after a restart.
    ///
    /// # Errors
    /// [`SecretTooShort`] if it has less than 32 bytes.
    pub fn form_secret(self, secret: &[u8]) -> Result<Self, SecretTooShort> {
        if secret.len() < 32 {
            return Err(SecretTooShort { bytes: secret.len() });
        }
        Ok(Self { secret: Secret::new(secret), ..self })
    }

    /// How long a resolved record is kept from then on; never for less than before.
    ///
    /// Default: 24 hours, as the engine keeps records. Give the retention of your engine, if it is another one.
    #[must_use]
    pub fn retention(self, retention: Duration) -> Self {
        Self { retention, ..self }
    }

    /// The router. Mount it by [`Router::nest`], inside of the layer that authenticates.
    pub fn router(self) -> Router {
        Router::new()
            .route("/", get(pages::overview::get))
            .route("/records", get(pages::records::get))
            .route("/records/{id}", get(pages::record::get))
            .route("/records/{id}/resolve", axum::routing::post(pages::resolve::post))
            .route("/repairs", get(pages::repairs::get))
            .route("/style.css", get(pages::style))
            .layer(map_response(harden))
            .with_state(self)
    }
}

impl fmt::Debug for Console {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = formatter.debug_struct("Console");
        shown.field("inspect", &self.inspect).field("operate", &self.operate).field("retention", &self.retention);
        shown.finish_non_exhaustive()
    }
}

/// No script, no frame, no form elsewhere, no copy in a cache.
async fn harden(mut response: Response) -> Response {
    const POLICY: &str =
        "default-src 'none'; style-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'";
    let headers = response.headers_mut();
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("same-origin"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Who asks, and where the console is mounted.
#[derive(Debug)]
pub(crate) struct Visit {
    pub(crate) permissions: Permissions,
    /// What links begin with.
    pub(crate) base: String,
}

impl FromRequestParts<Console> for Visit {
    type Rejection = Page;

    async fn from_request_parts(parts: &mut Parts, console: &Console) -> Result<Self, Page> {
        let permissions = console.access.permissions(parts).await;
        let original = parts.extensions.get::<OriginalUri>().map_or(parts.uri.path(), |original| original.0.path());
        let visit = Self { permissions, base: base(original, parts.uri.path()).to_owned() };
        match visit.permissions.reads {
            true => Ok(visit),
            false => Err(pages::refused(&visit, StatusCode::FORBIDDEN, "You may not use this console.")),
        }
    }
}

/// The path at which the console is mounted, from that of a request and what the router has left of it.
fn base<'a>(original: &'a str, inner: &str) -> &'a str {
    let base = original.strip_suffix(inner).unwrap_or(if inner == "/" { original } else { "" });
    // Two slashes would begin the name of another host.
    if base.starts_with("//") { "" } else { base }
}

#[cfg(test)]
mod tests {
    use super::base;

    #[test]
    fn links_begin_with_the_path_of_the_console() {
        assert_eq!(base("/", "/"), "");
        assert_eq!(base("/records/ab", "/records/ab"), "");
        assert_eq!(base("/admin/idem", "/"), "/admin/idem");
        assert_eq!(base("/admin/idem/records", "/records"), "/admin/idem");
        assert_eq!(base("//elsewhere/records", "/records"), "");
        assert_eq!(base("/rewritten", "/records"), "");
    }
}
