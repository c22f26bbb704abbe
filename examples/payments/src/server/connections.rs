//! Connections with timeouts, for axum and for hyper alone. `axum::serve` has none: a client that never ends the head of its
//! request keeps its connection forever.

use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::BoxError;
use axum::serve::Listener;
use bytes::Bytes;
use hyper::body::{Body, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio_io_timeout::TimeoutStream;
use tower_service::Service;

/// Serves HTTP/1.1 and HTTP/2 until it is asked to stop; then returns the connections that are still open.
///
/// A client may take `client_timeout` for the head of a request, and keep a connection without one for as long.
pub(super) async fn serve<P, B>(
    mut listener: TcpListener,
    pages: P,
    client_timeout: Duration,
    asked_to_stop: impl Future<Output = ()>,
) -> GracefulShutdown
where
    P: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    P::Future: Send,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(client_timeout);
    // HTTP/2 uses pings, because the requests of a connection come and go.
    let mut http2 = builder.http2();
    http2.timer(TokioTimer::new()).keep_alive_interval(client_timeout).keep_alive_timeout(client_timeout);
    let (open, mut asked_to_stop) = (GracefulShutdown::new(), pin!(asked_to_stop));
    loop {
        let stream = tokio::select! {
            // Axum's `accept` continues after errors, such as too many open files.
            (stream, _) = Listener::accept(&mut listener) => stream,
            () = &mut asked_to_stop => return open,
        };
        tokio::spawn(connection(builder.clone(), stream, pages.clone(), client_timeout, open.watcher()));
    }
}

/// Serves one connection to its end.
async fn connection<P, B>(
    builder: Builder<TokioExecutor>,
    stream: TcpStream,
    pages: P,
    client_timeout: Duration,
    watcher: Watcher,
) where
    P: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    P::Future: Send,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let began = Arc::new(Notify::new());
    let begins = Arc::clone(&began);
    let service = service_fn(move |request: Request<Incoming>| {
        begins.notify_one();
        pages.clone().call(request)
    });
    let mut stream = TimeoutStream::new(stream);
    // The timeout of a client that does not read. The system's own limit does not end every such connection.
    stream.set_write_timeout(Some(client_timeout));
    let mut served = pin!(watcher.watch(builder.serve_connection(TokioIo::new(Box::pin(stream)), service)));
    // Until the protocol is known, none of its timers runs.
    tokio::select! {
        served = &mut served => return log(served),
        () = began.notified() => {}
        () = tokio::time::sleep(client_timeout) => return,
    }
    log(served.await);
}

fn log(served: Result<(), impl std::fmt::Display>) {
    if let Err(error) = served {
        tracing::debug!(%error, "a connection ended");
    }
}
