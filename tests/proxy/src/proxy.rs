//! A proxy, independent of the harm that it does.

use std::fmt::Debug;
use std::io;
use std::net::Ipv4Addr;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// By FIN, to both sides.
    Closed,
    /// By RST to the client, and by FIN to the server.
    ClientReset,
    /// By RST, to both sides.
    Reset,
    /// By RST, on all connections.
    AllReset,
}

/// What a proxy does to the connections that it carries.
pub trait Harm: Debug + Send + Sync + 'static {
    /// Whether a connection that was just made is carried; if not, it is reset.
    fn accepts(&self) -> bool {
        true
    }

    /// Completes when the server can be reached. Until then a client is connected and receives nothing.
    fn reach(&self) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// Carries a connection to its end.
    fn carry(&self, client: &mut TcpStream, server: &mut TcpStream) -> impl Future<Output = io::Result<Ended>> + Send;
}

/// Carries connections from a port of 127.0.0.1 to a server. It dereferences to its harm.
#[derive(Debug)]
pub struct Proxy<H: Harm> {
    port: u16,
    shared: Arc<Shared<H>>,
    task: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared<H> {
    host: String,
    upstream: AtomicU16,
    /// Changes when all connections must end, to how they end.
    end: watch::Sender<Ended>,
    harm: H,
}

impl<H: Harm> Proxy<H> {
    /// Starts a proxy to a server.
    ///
    /// # Errors
    /// When there is no free port.
    pub async fn start(host: &str, port: u16, harm: H) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let end = watch::Sender::new(Ended::Closed);
        let shared = Arc::new(Shared { host: host.to_owned(), upstream: port.into(), end, harm });
        let port = listener.local_addr()?.port();
        let carrier = Arc::clone(&shared);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(Arc::clone(&carrier), client));
            }
        });
        Ok(Self { port, shared, task })
    }

    /// Starts a proxy to a port of this machine, with the default harm.
    ///
    /// # Errors
    /// When there is no free port.
    pub async fn to_port(port: u16) -> io::Result<Self>
    where
        H: Default,
    {
        Self::start("127.0.0.1", port, H::default()).await
    }

    /// The port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Directs new connections to this port of the same host.
    pub fn lead_to(&self, port: u16) {
        self.shared.upstream.store(port, Ordering::SeqCst);
    }

    /// Ends all connections. Bytes that have already arrived are not carried either.
    pub fn end_all(&self, how: Ended) {
        self.shared.end.send_replace(how);
    }
}

impl<H: Harm> Deref for Proxy<H> {
    type Target = H;

    fn deref(&self) -> &H {
        &self.shared.harm
    }
}

impl<H: Harm> Drop for Proxy<H> {
    fn drop(&mut self) {
        self.task.abort();
        self.end_all(Ended::Closed);
    }
}

async fn carry<H: Harm>(shared: Arc<Shared<H>>, mut client: TcpStream) {
    let mut end = shared.end.subscribe();
    if !shared.harm.accepts() {
        reset(&client);
        return;
    }
    shared.harm.reach().await;
    // An earlier `end_all` concerns connections to a server, and this one had none yet.
    end.mark_unchanged();
    let upstream = (shared.host.as_str(), shared.upstream.load(Ordering::SeqCst));
    let Ok(mut server) = TcpStream::connect(upstream).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let ended = tokio::select! {
        // First, so that the end of a harm does not release what it held back.
        biased;
        _ = end.changed() => Ok(*end.borrow()),
        ended = shared.harm.carry(&mut client, &mut server) => ended,
    };
    match ended {
        // Both sides see the end of the connection.
        Ok(Ended::Closed) | Err(_) => return,
        Ok(Ended::ClientReset) => return reset(&client),
        Ok(Ended::Reset) => {}
        Ok(Ended::AllReset) => {
            shared.end.send_replace(Ended::Reset);
        }
    }
    reset(&client);
    reset(&server);
}

/// Closing with a linger of zero sends RST instead of FIN.
fn reset(stream: &TcpStream) {
    let _ = socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO));
}
