//! An HTTP/2 client with prior knowledge. Tests can watch and break each stream and each connection.

use std::future::Future;
use std::net::{SocketAddr, TcpStream};
use std::sync::LazyLock;
use std::time::Duration;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest, handshake};
use h2::{RecvStream, SendStream};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use socket2::SockRef;
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;

use crate::PATIENCE;
use crate::client::{Answer, Request, leave_no_trace};

/// The runtime of all connections. Cases block on it from other threads.
static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap());

/// Waits for at most [`PATIENCE`].
fn wait<T>(future: impl Future<Output = T>) -> Option<T> {
    RUNTIME.block_on(async { tokio::time::timeout(PATIENCE, future).await.ok() })
}

/// A persistent connection.
#[derive(Debug)]
pub(crate) struct Connection {
    requests: SendRequest<Bytes>,
    driver: JoinHandle<()>,
    /// The same socket, for what HTTP cannot express.
    socket: TcpStream,
}

/// One request and its answer. Dropping it resets the stream, unless both have ended.
#[derive(Debug)]
pub(crate) struct Stream {
    request: SendStream<Bytes>,
    response: Option<ResponseFuture>,
    body: Option<RecvStream>,
    /// The stream's own connection, if it has one.
    connection: Option<Connection>,
}

impl Connection {
    pub(crate) fn open(address: SocketAddr) -> Self {
        let socket = TcpStream::connect(address).unwrap();
        let stream = socket.try_clone().unwrap();
        stream.set_nonblocking(true).unwrap();
        let shaken = wait(async { handshake(tokio::net::TcpStream::from_std(stream).unwrap()).await });
        let (requests, connection) = shaken.expect("the server does not speak HTTP/2").unwrap();
        let driver = RUNTIME.spawn(async { drop(connection.await) });
        Self { requests, driver, socket }
    }

    /// Sends the head of a request.
    pub(crate) fn upload(&mut self, request: &Request, declared_bytes: Option<usize>) -> Stream {
        self.head(request, declared_bytes, false)
    }

    /// Sends a whole request.
    pub(crate) fn begin(&mut self, request: &Request) -> Stream {
        let mut stream = self.head(request, None, request.body.is_empty());
        if !request.body.is_empty() {
            let _ = stream.request.send_data(request.body.clone().into(), true);
        }
        stream
    }

    fn head(&mut self, request: &Request, declared_bytes: Option<usize>, is_whole: bool) -> Stream {
        let mut head = http::Request::builder()
            .method(Method::from_bytes(request.method.as_bytes()).unwrap())
            .uri(format!("http://{}{}", request.host, request.target))
            .body(())
            .unwrap();
        for (name, value) in &request.headers {
            let value = HeaderValue::from_bytes(value).unwrap();
            head.headers_mut().append(HeaderName::from_bytes(name.as_bytes()).unwrap(), value);
        }
        if let Some(bytes) = declared_bytes {
            head.headers_mut().insert("content-length", bytes.into());
        }
        wait(std::future::poll_fn(|context| self.requests.poll_ready(context))).unwrap().unwrap();
        let (response, request) = self.requests.send_request(head, is_whole).unwrap();
        Stream { request, response: Some(response), body: None, connection: None }
    }

    /// Ends the connection under all its streams, by RST or by FIN.
    fn end(self, is_reset: bool) {
        if is_reset {
            // Closing with a linger of zero sends RST instead of FIN.
            SockRef::from(&self.socket).set_linger(Some(Duration::ZERO)).unwrap();
        }
        self.driver.abort();
        // The driver was aborted, or had ended.
        let _ = wait(self.driver);
    }
}

impl Stream {
    /// Makes a stream on a new connection.
    pub(crate) fn alone(address: SocketAddr, begin: impl FnOnce(&mut Connection) -> Self) -> Self {
        let mut connection = Connection::open(address);
        let stream = begin(&mut connection);
        Self { connection: Some(connection), ..stream }
    }

    /// Sends more of the body; false if the server accepts no more.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> bool {
        self.request.send_data(Bytes::copy_from_slice(bytes), false).is_ok()
    }

    /// Ends the body.
    pub(crate) fn end(&mut self) {
        let _ = self.request.send_data(Bytes::new(), true);
    }

    /// Ends the body with a trailer.
    pub(crate) fn end_by_trailer(&mut self, name: &'static str, value: &'static str) {
        let trailers = HeaderMap::from_iter([(HeaderName::from_static(name), HeaderValue::from_static(value))]);
        let _ = self.request.send_trailers(trailers);
    }

    /// Reads the head of the answer.
    pub(crate) fn head(&mut self) -> Option<Answer> {
        let (head, body) = wait(self.response.take()?)?.ok()?.into_parts();
        self.body = Some(body);
        let headers = head.headers.iter().map(|(name, value)| (name.to_string(), value.as_bytes().to_vec()));
        Some(Answer::new(head.status.as_u16(), headers.collect(), Vec::new()))
    }

    /// Reads the next piece of the body; the last one is empty.
    pub(crate) fn chunk(&mut self) -> Option<Vec<u8>> {
        let body = self.body.as_mut()?;
        let chunk = wait(async {
            loop {
                match body.data().await {
                    None => return Some(Vec::new()),
                    Some(Ok(chunk)) if chunk.is_empty() => {}
                    Some(Ok(chunk)) => {
                        // Makes room for more data.
                        body.flow_control().release_capacity(chunk.len()).unwrap();
                        return Some(chunk.to_vec());
                    }
                    Some(Err(_)) => return None,
                }
            }
        })?;
        if let (Some([]), Some(connection)) = (chunk.as_deref(), &self.connection) {
            leave_no_trace(&connection.socket);
        }
        chunk
    }

    /// Resets the stream, and returns its connection, which stays open.
    pub(crate) fn reset(mut self) -> Option<Connection> {
        self.connection.take()
    }

    /// Ends the connection.
    pub(crate) fn disconnect(mut self, is_reset: bool) {
        if let Some(connection) = self.connection.take() {
            connection.end(is_reset);
        }
    }
}
