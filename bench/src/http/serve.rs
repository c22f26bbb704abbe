//! One server: the same handler, bare or behind a layer.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix_web::{App, HttpServer, web};
use axum::Router;
use axum::routing::post;
use axum_idempotent::{IdempotentLayer, IdempotentOptions};
use bytes::Bytes;
use clap::ValueEnum;
use idem_axum::{IdempotencyLayer, SingleTenant};
use idem_core::engine::{Idempotency, Settings};
use idem_core::{IdempotencyStore, MemoryStore};
use idem_metrics::MetricsObserver;
use idem_postgres::{PostgresConfig, PostgresStore};
use ruts::store::SessionStore;
use ruts::store::moka::MokaStore;
use ruts::store::postgres::{PostgresStore as PeerPostgresStore, PostgresStoreBuilder};
use ruts::{CookieOptions, SessionLayer};
use tokio::net::TcpListener;
use tower_cookies::CookieManagerLayer;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::error::Error;

/// The stack that answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Stack {
    Bare,
    Memory,
    Postgres,
    PeerInMemory,
    PeerOnPostgres,
    ActixBare,
    ActixMemory,
    /// A handler that waits for a request to `/go`, behind the layer and bare.
    Waiting,
    BareWaiting,
}

impl Stack {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Memory => "memory",
            Self::Postgres => "postgres",
            Self::PeerInMemory => "peer-in-memory",
            Self::PeerOnPostgres => "peer-on-postgres",
            Self::ActixBare => "actix-bare",
            Self::ActixMemory => "actix-memory",
            Self::Waiting => "waiting",
            Self::BareWaiting => "bare-waiting",
        }
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[arg(value_enum)]
    stack: Stack,
    /// The URL of a Postgres, for the stacks that need one.
    #[arg(long)]
    database: Option<String>,
    /// Records metrics, in the stacks `memory` and `postgres`.
    #[arg(long)]
    metrics: bool,
    /// What is logged, as in `RUST_LOG`, in the stacks `memory` and `postgres`.
    #[arg(long, default_value = "off")]
    log: tracing_subscriber::filter::Targets,
    /// How long the bare handler computes in addition, in nanoseconds.
    #[arg(long, default_value_t = 0)]
    busy_ns: u64,
}

/// More records than any turn makes.
const RECORDS: usize = 20_000_000;

/// The bounds of durations in seconds, and how often samples are put into their buckets, as `payments` has them.
const BUCKETS: [f64; 13] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];
const UPKEEP_EVERY: Duration = Duration::from_secs(5);

const ANSWER: &str =
    r#"{"id":"0197f3c2-7d1e-7a50-9f2b-3c1d5e6f7a8b","status":"succeeded","amount":1000,"currency":"EUR"}"#;

/// What every stack does: read the body, answer.
async fn pay(body: Bytes) -> ([(&'static str, &'static str); 1], &'static str) {
    std::hint::black_box(body);
    ([("content-type", "application/json")], ANSWER)
}

async fn pay_after(busy: Duration, body: Bytes) -> ([(&'static str, &'static str); 1], &'static str) {
    if !busy.is_zero() {
        let started = Instant::now();
        while started.elapsed() < busy {
            std::hint::spin_loop();
        }
    }
    pay(body).await
}

async fn pay_on_actix(body: web::Bytes) -> actix_web::HttpResponse {
    std::hint::black_box(body);
    actix_web::HttpResponse::Ok().content_type("application/json").body(ANSWER)
}

/// Prints its port, and serves until it is killed.
pub(crate) async fn run(options: &Options) -> Result<(), Error> {
    let database = || options.database.clone().ok_or("--database is missing");
    let app: Router = match options.stack {
        Stack::Bare => {
            let busy = Duration::from_nanos(options.busy_ns);
            Router::new().route("/pay", post(move |body| pay_after(busy, body)))
        }
        Stack::Memory => protected(Arc::new(memory()?), settings(options)?),
        Stack::Postgres => {
            let store = PostgresStore::open(PostgresConfig::new(database()?)).await?;
            protected(Arc::new(store), settings(options)?)
        }
        Stack::PeerInMemory => peer(MokaStore::builder().max_capacity(RECORDS as u64).build()),
        Stack::PeerOnPostgres => {
            // As many connections as serve it best on two cores.
            let options = sqlx_of_peers::postgres::PgPoolOptions::new().max_connections(16);
            let pool = options.connect(&database()?).await?;
            let store: PeerPostgresStore = PostgresStoreBuilder::new(pool).create_table(true).build().await?;
            peer(store)
        }
        Stack::Waiting => {
            let settings = Settings::new().max_running(NonZeroUsize::MAX);
            let engine = Idempotency::at_least_once(Arc::new(memory()?), settings);
            waiting(Some(IdempotencyLayer::new(engine).single_tenant()))
        }
        Stack::BareWaiting => waiting(None),
        Stack::ActixBare | Stack::ActixMemory => return on_actix(options.stack).await,
    };
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?.port());
    Ok(axum::serve(listener, app).await?)
}

fn memory() -> Result<MemoryStore, Error> {
    Ok(MemoryStore::new(NonZeroUsize::new(RECORDS).ok_or("no records")?))
}

/// The defaults, or those of a service that is observed as `payments` is: counters and histograms, and a log. Nothing is logged,
/// because nothing goes wrong.
fn settings(options: &Options) -> Result<Settings, Error> {
    let lines = tracing_subscriber::fmt::layer().json().with_writer(std::io::stderr);
    tracing_subscriber::registry().with(lines).with(options.log.clone()).init();
    if !options.metrics {
        return Ok(Settings::new());
    }
    let page = metrics_exporter_prometheus::PrometheusBuilder::new().set_buckets(&BUCKETS)?.install_recorder()?;
    tokio::spawn(async move {
        let mut due = tokio::time::interval(UPKEEP_EVERY);
        loop {
            due.tick().await;
            page.run_upkeep();
        }
    });
    Ok(Settings::new().observer(Arc::new(MetricsObserver::new())))
}

fn protected(store: Arc<dyn IdempotencyStore>, settings: Settings) -> Router {
    let layer = IdempotencyLayer::new(Idempotency::at_least_once(store, settings));
    Router::new().route("/pay", post(pay).layer(layer.single_tenant()))
}

fn peer<S: SessionStore + 'static>(store: S) -> Router {
    let options = IdempotentOptions::default().use_idempotency_key_header(None, true).expire_after(24 * 60 * 60);
    Router::new()
        .route("/pay", post(pay))
        .layer(IdempotentLayer::<S>::new(options))
        .layer(SessionLayer::new(Arc::new(store)).with_cookie_options(CookieOptions::build().name("session")))
        .layer(CookieManagerLayer::new())
}

fn waiting(layer: Option<IdempotencyLayer<SingleTenant>>) -> Router {
    let (go, gone) = tokio::sync::watch::channel(false);
    let wait = post(move |body: Bytes| {
        let mut gone = gone.clone();
        async move {
            // A sender that is gone lets it end as well.
            let _ = gone.wait_for(|gone| *gone).await;
            pay(body).await
        }
    });
    let wait = match layer {
        Some(layer) => wait.layer(layer),
        None => wait,
    };
    let go = move || async move {
        let _ = go.send(true);
    };
    Router::new().route("/pay", wait).route("/go", post(go))
}

async fn on_actix(stack: Stack) -> Result<(), Error> {
    let layer = idem_actix::IdempotencyLayer::at_least_once(Arc::new(memory()?)).single_tenant();
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    // Actix starts a runtime for each worker, which cannot run inside of another one.
    let server = tokio::task::spawn_blocking(move || {
        actix_web::rt::System::new().block_on(async move {
            let server = match stack {
                Stack::ActixMemory => {
                    let app = move || {
                        let route = web::resource("/pay").wrap(layer.clone()).route(web::post().to(pay_on_actix));
                        App::new().service(route)
                    };
                    HttpServer::new(app).listen(listener)?.run()
                }
                _ => {
                    let app = || App::new().service(web::resource("/pay").route(web::post().to(pay_on_actix)));
                    HttpServer::new(app).listen(listener)?.run()
                }
            };
            println!("{port}");
            server.await
        })
    });
    Ok(server.await??)
}
