//! `idem console`.
//!
//! The secret is a part of each page's path. Browsers send a cookie to every port of this machine, so another user's server could read it.

use std::error::Error;
use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::Arc;

use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use clap::Args;
use http::request::Parts;
use http::{StatusCode, header};
use idem_console::{Access, Console, Permissions};
use idem_core::{
    Erase, EraseOutcome, Inspect, Operate, OwnerToken, Repair, RepairNote, Resolve, ResolveOutcome, StateName,
    StoreError, StoreErrorKind,
};

use crate::Ended;
use crate::commands::sealed;
use crate::output::{say, token};
use crate::store::Store;

/// Where, and what it permits.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// An address of this machine that only this machine reaches. Port 0: one that is free.
    #[arg(long, default_value = "127.0.0.1:0", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// Permits no repairs.
    #[arg(long)]
    read_only: bool,
    /// With --keys: permits repairs although no record proves that the primary key is that of the application.
    #[arg(long)]
    dangerous_unverified_key: bool,
    /// Permits showing header values and bodies of stored answers. They may hold secrets.
    #[arg(long)]
    answers: bool,
    /// Who repairs. Default: the user of this machine.
    #[arg(long, env = "USER", default_value = "unknown")]
    actor: String,
}

/// What this process permits to each client that knows its secret path.
struct Permitted(Permissions);

#[async_trait]
impl Access for Permitted {
    async fn permissions(&self, _: &Parts) -> Permissions {
        self.0.clone()
    }
}

/// Repairs no record whose answer the application could not read.
struct Readable {
    store: Arc<dyn Store>,
    unproven: bool,
}

impl fmt::Debug for Readable {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Readable").field("unproven", &self.unproven).finish_non_exhaustive()
    }
}

#[async_trait]
impl Operate for Readable {
    async fn resolve(&self, request: &Resolve) -> Result<ResolveOutcome, StoreError> {
        self.store.resolve(request).await
    }

    async fn erase(&self, request: &Erase) -> Result<EraseOutcome, StoreError> {
        self.store.erase(request).await
    }

    /// Notes a repair. The first note comes before the change, so a repair that is refused here changes and leaves nothing.
    async fn note(&self, note: &RepairNote) -> Result<(), StoreError> {
        let has_answer = note.resolution != StateName::OutcomeUnknown.as_str();
        if note.outcome.is_none() && has_answer {
            let readable = sealed::expect_readable(&*self.store, Some(note.record), self.unproven).await;
            readable.map_err(|error| StoreError::new(StoreErrorKind::Misconfigured, error.to_string()))?;
        }
        self.store.note(note).await
    }

    async fn repairs(&self, limit: NonZeroU32) -> Result<Vec<Repair>, StoreError> {
        self.store.repairs(limit).await
    }
}

pub(crate) async fn run(store: Box<dyn Store>, options: &Options) -> Result<Ended, Box<dyn Error>> {
    if !options.listen.ip().is_loopback() {
        let advice = "mount the crate idem-console behind the login of your application instead";
        return Err(format!("{} can be reached from other machines; {advice}", options.listen).into());
    }
    if !options.read_only {
        let readable = sealed::expect_readable(&*store, None, options.dangerous_unverified_key).await;
        readable.map_err(|error| format!("{error}; or give --read-only"))?;
    }
    let permissions = Permissions::read_only(&options.actor);
    let permissions = if options.answers { permissions.and_answers() } else { permissions };
    let permissions = if options.read_only { permissions } else { permissions.and_resolve() };
    let store: Arc<dyn Store> = store.into();
    let operate = Readable { store: store.clone(), unproven: options.dangerous_unverified_key };
    let (inspect, operate): (Arc<dyn Inspect>, Arc<dyn Operate>) = (store, Arc::new(operate));
    let console = Console::new(inspect, operate, Arc::new(Permitted(permissions)));
    let listener = tokio::net::TcpListener::bind(options.listen).await?;
    let (address, path) = (listener.local_addr()?, format!("/{}", token(&OwnerToken::random())));
    say(&format!("http://{address}{path}"));
    eprintln!("This URL is for you alone: it lets each user of this machine in. Ctrl-C ends the console.");
    let router: Router = Router::new().nest(&path, console.router()).layer(from_fn_with_state(address, expect_host));
    let interrupted = async {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    axum::serve(listener, router).with_graceful_shutdown(interrupted).await?;
    Ok(Ended::Done)
}

/// Refuses requests under another name, which an attacker can let lead to this machine.
async fn expect_host(State(address): State<SocketAddr>, request: Request<Body>, next: Next) -> Response {
    let names = [address.to_string(), format!("localhost:{}", address.port())];
    // Browsers leave out the port of the protocol.
    let is_known = |host: &[u8]| {
        names.iter().any(|name| name.as_bytes() == host || name.strip_suffix(":80").map(str::as_bytes) == Some(host))
    };
    match request.headers().get(header::HOST).is_some_and(|host| is_known(host.as_bytes())) {
        true => next.run(request).await,
        false => (StatusCode::FORBIDDEN, "The console answers under its own address only.\n").into_response(),
    }
}
