//! The frameworks, and the signals at which they stop.

mod on_actix;
mod on_axum;

use std::error::Error;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use idem_core::engine::Idempotency;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::Framework;
use crate::service::Service;

/// How long open connections may hold up a shutdown; requests that run are awaited beyond that.
const CLOSE_CONNECTIONS_WITHIN: Duration = Duration::from_secs(10);

/// Serves until a signal asks to stop, and until everything that was begun then is settled.
pub(crate) async fn serve(
    framework: Framework,
    listener: TcpListener,
    engine: Idempotency,
    service: Service,
    signals: Signals,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let service = Arc::new(service);
    match framework {
        Framework::Axum => on_axum::serve(listener, engine, service, signals).await,
        Framework::Actix => on_actix::serve(listener, engine, service, signals).await,
    }
}

/// SIGTERM and SIGINT.
#[derive(Debug)]
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Catches them from now on.
    pub(crate) fn catch() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// The first one asks to stop; from then on, the next one ends the process at once.
    async fn asked_to_stop(mut self) {
        self.next().await;
        tracing::info!("shutting down; a second signal ends it at once");
        tokio::spawn(async move {
            self.next().await;
            tracing::error!(
                "ended by a second signal; keys of running requests are free, or answered, after their lease"
            );
            std::process::exit(1);
        });
    }
}
