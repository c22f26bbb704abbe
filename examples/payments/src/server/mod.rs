//! The frameworks, and the signals at which they stop.

mod connections;
mod on_actix;
mod on_axum;
mod on_hyper;

use std::error::Error;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::server::graceful::GracefulShutdown;
use idem_core::engine::Idempotency;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::Framework;
use crate::service::Service;

/// How long open connections may hold up a shutdown; running requests are awaited beyond that.
const CLOSE_CONNECTIONS_WITHIN: Duration = Duration::from_secs(10);

/// How long operations may take to end and be settled after the service was asked to stop. Together with the time for
/// connections, it is less than the 30 s after which supervisors kill a process.
const END_OPERATIONS_WITHIN: Duration = Duration::from_secs(15);

/// Serves until a signal asks to stop, and until everything that has begun is settled.
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
        Framework::Hyper => on_hyper::serve(listener, engine, service, signals).await,
        Framework::Actix => {
            give_up_on_slow_readers(&listener, service.client_timeout())?;
            on_actix::serve(listener, engine, service, signals).await
        }
    }
}

/// Ends the connections first, so that clients that stay are answered. Then it ends the engine: handlers run in tasks, and
/// those whose clients have gone belong to no connection any more.
async fn end(open: GracefulShutdown, engine: Idempotency) {
    if tokio::time::timeout(CLOSE_CONNECTIONS_WITHIN, open.shutdown()).await.is_err() {
        tracing::warn!("some connections did not close in time");
    }
    if let Err(unfinished) = engine.shutdown(END_OPERATIONS_WITHIN).await {
        tracing::warn!("{unfinished}");
    }
}

/// Has the system end connections whose clients take nothing of their answers for so long. Connections inherit the timeout
/// from their listener. actix-web has no write timeout, and no place for one.
///
/// It does not end all of them: a client whose system takes a few bytes now and then counts as reading. A proxy in front with
/// a minimum rate ends these.
fn give_up_on_slow_readers(listener: &TcpListener, timeout: Duration) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    socket2::SockRef::from(listener).set_tcp_user_timeout(Some(timeout))?;
    #[cfg(not(target_os = "linux"))]
    tracing::info!(?listener, ?timeout, "this system knows no such limit; a proxy in front has to");
    Ok(())
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

    /// Waits for the first signal, which asks to stop; the next one then ends the process at once.
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
