//! `idem console`.

use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;

use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse as _, Response};
use clap::Args;
use http::header::{COOKIE, HOST, LOCATION, SET_COOKIE};
use http::request::Parts;
use http::{HeaderMap, StatusCode};
use idem_console::{Access, Console, Permissions};
use idem_core::{Inspect, Operate, OwnerToken};
use subtle::ConstantTimeEq as _;

use crate::Ended;
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
    /// Permits showing header values and bodies of stored answers. They may hold secrets.
    #[arg(long)]
    answers: bool,
    /// Who repairs. Default: the user of this machine.
    #[arg(long, env = "USER", default_value = "unknown")]
    actor: String,
}

/// What this process permits to the browser that has its token.
struct Permitted(Permissions);

#[async_trait]
impl Access for Permitted {
    async fn permissions(&self, _: &Parts) -> Permissions {
        self.0.clone()
    }
}

/// The only client: the one that has the printed URL.
#[derive(Debug, Clone)]
struct Door {
    address: SocketAddr,
    /// In the printed URL.
    token: String,
    /// In the cookie, because URLs get into histories and logs.
    cookie: String,
}

pub(crate) async fn run(store: Box<dyn Store>, options: &Options) -> Result<Ended, Box<dyn Error>> {
    if !options.listen.ip().is_loopback() {
        let advice = "mount the crate idem-console behind the login of your application instead";
        return Err(format!("{} can be reached from other machines; {advice}", options.listen).into());
    }
    let permissions = Permissions::read_only(&options.actor);
    let permissions = if options.answers { permissions.and_answers() } else { permissions };
    let permissions = if options.read_only { permissions } else { permissions.and_resolve() };
    let store: Arc<dyn Store> = store.into();
    let (inspect, operate): (Arc<dyn Inspect>, Arc<dyn Operate>) = (store.clone(), store);
    let console = Console::new(inspect, operate, Arc::new(Permitted(permissions)));
    let listener = tokio::net::TcpListener::bind(options.listen).await?;
    let [secret, cookie] = [OwnerToken::random(), OwnerToken::random()].map(|secret| token(&secret));
    let door = Door { address: listener.local_addr()?, token: secret, cookie };
    // Each page may be opened so, such as /records/ID?token=….
    say(&format!("http://{}/?token={}", door.address, door.token));
    eprintln!("This page is for one browser on this machine. Ctrl-C ends it.");
    let router: Router = console.router().layer(from_fn_with_state(door, enter));
    let interrupted = async {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    axum::serve(listener, router).with_graceful_shutdown(interrupted).await?;
    Ok(Ended::Done)
}

/// Lets the browser in that has the token.
async fn enter(State(door): State<Door>, request: Request<Body>, next: Next) -> Response {
    // A site whose name leads to this machine would get the answers of the browser.
    if !door.is_addressed(request.headers()) {
        return (StatusCode::FORBIDDEN, "The console answers under its own address only.\n").into_response();
    }
    let given = request.uri().query().and_then(|query| query.strip_prefix("token="));
    if given.is_some_and(|given| is_equal(given, &door.token)) {
        let cookie = format!("{}={}; HttpOnly; SameSite=Strict; Path=/", door.name(), door.cookie);
        let path = request.uri().path();
        // Two slashes would begin the name of another host.
        let page = if path.starts_with("//") { "/" } else { path }.to_owned();
        return (StatusCode::SEE_OTHER, [(SET_COOKIE, cookie), (LOCATION, page)]).into_response();
    }
    if door.is_known(request.headers()) {
        return next.run(request).await;
    }
    (StatusCode::FORBIDDEN, "Open the URL that `idem console` has printed.\n").into_response()
}

impl Door {
    /// The name of the cookie. Cookies are sent to all ports, so that two consoles need two names.
    fn name(&self) -> String {
        format!("idem_console_{}", self.address.port())
    }

    fn is_addressed(&self, headers: &HeaderMap) -> bool {
        let localhost = format!("localhost:{}", self.address.port());
        headers.get(HOST).is_some_and(|host| host == self.address.to_string().as_str() || host == localhost.as_str())
    }

    fn is_known(&self, headers: &HeaderMap) -> bool {
        let pairs = headers.get_all(COOKIE).iter().filter_map(|cookies| cookies.to_str().ok());
        let mut pairs = pairs.flat_map(|cookies| cookies.split("; ")).filter_map(|pair| pair.split_once('='));
        pairs.any(|(name, value)| name == self.name() && is_equal(value, &self.cookie))
    }
}

fn is_equal(given: &str, secret: &str) -> bool {
    given.as_bytes().ct_eq(secret.as_bytes()).into()
}
