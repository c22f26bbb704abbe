//! A payments API that survives retries. `payments --help` explains its flags.

mod answer;
mod config;
mod joined;
mod ledger;
mod metrics;
mod openapi;
mod problem;
mod running;
mod server;
mod service;
mod simulate;
mod store;

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use idem_core::engine::Settings;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use config::Config;
use ledger::Ledger;
use metrics::Recorder;
use server::Signals;
use service::Service;
use store::Store;

/// The longest backoff of a payment that keeps failing.
const LONGEST_BACKOFF: Duration = Duration::from_secs(60);

#[tokio::main]
async fn main() -> ExitCode {
    // It reads most of what `EnvFilter` reads, and has no work to do each time that a span is entered.
    let filter = std::env::var("RUST_LOG").ok().and_then(|text| text.parse().ok());
    let filter = filter.unwrap_or_else(|| Targets::new().with_default(LevelFilter::INFO));
    let lines = tracing_subscriber::fmt::layer().json().with_writer(std::io::stderr);
    tracing_subscriber::registry().with(lines).with(filter).init();
    match run(Config::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = with_causes(error.as_ref()), "payments cannot run");
            ExitCode::FAILURE
        }
    }
}

async fn run(config: Config) -> Result<(), Box<dyn Error + Send + Sync>> {
    let store = Store::open(&config).await?;
    let settings = Settings::new()
        .lease(Duration::from_millis(config.lease_ms))
        .retention(Duration::from_secs(config.retention_s))
        .wait(Duration::from_millis(config.wait_ms))
        .store_timeout(Duration::from_millis(config.store_timeout_ms))
        .backoff(Duration::from_millis(config.backoff_ms), LONGEST_BACKOFF)
        .runtime(Handle::current());
    let settings = if config.dangerous_fail_open { settings.dangerous_fail_open() } else { settings };
    let recorder = config.operator_token.as_ref().map(|_| Recorder::install()).transpose()?;
    let settings = if recorder.is_some() { Recorder::observing(settings) } else { settings };
    let engine = store.engine(&config, settings)?;
    store.self_test().await?;
    let ledger = Ledger::open(&config, store.settle_run_sql(&config)?).await?;
    allow_many_connections();
    // The signals are caught before the service reports that it is ready.
    let signals = Signals::catch()?;
    // Tokio's listener has a backlog of about a thousand connections, and the standard library's one of 128.
    let listener = TcpListener::bind(config.listen).await?.into_std()?;
    println!("listening on http://{}", listener.local_addr()?);
    let purge = store.start_purge();
    let metrics = recorder.map(|recorder| recorder.metrics(engine.clone()));
    if let (Some(_), Some(records)) = (&metrics, store.records(&config)) {
        metrics::start_counting(records, Duration::from_millis(config.count_every_ms));
    }
    let service = Service::new(config.clone(), store, ledger, engine.clone(), metrics);
    server::serve(config.framework, listener, engine, service, signals).await?;
    if let Some(purge) = purge {
        purge.stop().await;
    }
    Ok(())
}

/// Raises the limit of open files to the maximum. Most shells begin with a thousand, and each waiting client takes one.
fn allow_many_connections() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(error = &error as &dyn Error, "no more files can be opened than the shell allows");
    }
}

/// An error with its causes.
fn with_causes(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |&error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
