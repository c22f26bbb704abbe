//! A payments API that survives retries. `payments --help` explains its flags.

mod app;
mod config;
mod ledger;
mod problem;
mod simulate;
mod store;

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use idem_axum::Settings;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use config::Config;
use ledger::Ledger;
use store::Store;

/// How long open connections may hold up a shutdown; requests that run are awaited beyond that.
const CLOSE_CONNECTIONS_WITHIN: Duration = Duration::from_secs(10);

#[tokio::main]
async fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().json().with_env_filter(filter).with_writer(std::io::stderr).init();
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
        .wait(Duration::from_millis(config.wait_ms));
    let engine = store.engine(&config, settings)?;
    store.self_test().await?;
    let ledger = Ledger::open(&config).await?;
    let router = app::router(&config, engine.clone(), store.clone(), ledger);
    // The signals are caught before anyone is told that the server is ready.
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let listener = TcpListener::bind(config.listen).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let purge = store.start_purge();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = axum::serve(listener, router).with_graceful_shutdown(async { drop(stopped.await) });
    let mut server = tokio::spawn(server.into_future());
    tokio::select! {
        served = &mut server => return Ok(served??),
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("shutting down; a second signal ends it at once");
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::error!("ended by a second signal; keys of running requests are free, or answered, after their lease");
        std::process::exit(1);
    });
    drop(stop);
    let served = tokio::time::timeout(CLOSE_CONNECTIONS_WITHIN, &mut server).await;
    if served.is_err() {
        tracing::warn!("some connections did not close in time");
    }
    // Handlers whose clients have gone are in no connection any more, and are awaited here.
    engine.shutdown().await;
    purge.stop().await;
    match served {
        Ok(served) => Ok(served??),
        Err(_) => Ok(()),
    }
}

/// What went wrong, and why, and why that.
fn with_causes(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |&error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
