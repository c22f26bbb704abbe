//! The middleware: sends an operation until it has a final answer.

use std::sync::Arc;

use async_trait::async_trait;
use http::{Extensions, Method};
use reqwest::redirect::Policy;
use reqwest::{Request, Response};
use reqwest_middleware::{ClientBuilder, Middleware, Next};

use crate::hosts::Hosts;
use crate::run::Run;
use crate::settings::Settings;

/// A client that sends each POST and PATCH with one idempotency key until it has a final answer. Other methods pass unchanged.
///
/// The client follows no redirects, whatever `http` says: `reqwest` would turn a POST into a GET, or take the key to another
/// host. A 3xx is a final answer. Retries of `reqwest` itself are off, so that each attempt counts.
///
/// Middleware that is added with [`ClientBuilder::with`] sees each attempt.
///
/// # Errors
/// If `http` cannot be built, for example because its TLS cannot be initialised.
///
/// # Cancellation safety
/// Dropping the future of a request stops its retries. The server may have received it. A [journal](Settings::journal) keeps it.
#[cfg_attr(not(feature = "journal"), doc = "", doc = "[journal]: crate")]
pub fn client(settings: Settings, http: reqwest::ClientBuilder) -> reqwest::Result<ClientBuilder> {
    let http = http.redirect(Policy::none()).retry(reqwest::retry::never()).build()?;
    let hosts = Hosts::new(settings.retries_per_second, settings.retry_share);
    Ok(ClientBuilder::new(http).with(Retries { shared: Arc::new(Shared { settings, hosts }) }))
}

/// What all operations of a client share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    pub(crate) hosts: Hosts,
}

/// Not public: it is safe only with the client that [`client`] builds.
struct Retries {
    shared: Arc<Shared>,
}

#[async_trait]
impl Middleware for Retries {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<Response> {
        if !matches!(*request.method(), Method::POST | Method::PATCH) {
            return next.run(request, extensions).await;
        }
        let run = Run::begin(&self.shared.settings, &self.shared.hosts, request, extensions).await;
        run.map_err(reqwest_middleware::Error::middleware)?.finish(extensions, next).await
    }
}
