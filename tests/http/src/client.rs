//! A raw HTTP/1.1 client: tests see the bytes, and can watch and break connections.

use std::fmt;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use socket2::SockRef;

use crate::PATIENCE;

/// The default body of a request.
pub const PAYMENT: &str = r#"{"amount": 1250, "currency": "EUR", "recipient": "alice"}"#;

/// A request to be sent.
#[derive(Debug, Clone)]
pub struct Request {
    pub(crate) method: &'static str,
    /// `Host`, or `:authority`.
    pub(crate) host: String,
    pub(crate) target: String,
    pub(crate) headers: Vec<(String, Vec<u8>)>,
    pub(crate) body: Vec<u8>,
}

/// An answer; the body is without its transfer coding.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Answer {
    /// The status.
    pub status: u16,
    /// The header lines, names in lower case.
    pub headers: Vec<(String, Vec<u8>)>,
    /// The body.
    pub body: Vec<u8>,
}

impl Request {
    fn new(method: &'static str, target: &str) -> Self {
        let request =
            Self { method, host: "test".to_owned(), target: target.to_owned(), headers: Vec::new(), body: Vec::new() };
        request.tenant("acme")
    }

    /// A GET by `acme`.
    #[must_use]
    pub fn get(target: &str) -> Self {
        Self::new("GET", target)
    }

    /// A payment of 12.50 EUR by `acme` under `key`.
    #[must_use]
    pub fn pay(key: &str) -> Self {
        Self::keyless().header("Idempotency-Key", key)
    }

    /// A payment without a key.
    #[must_use]
    pub fn keyless() -> Self {
        Self::new("POST", "/v1/payments").header("Content-Type", "application/json").body(PAYMENT)
    }

    /// Sets the tenant.
    #[must_use]
    pub fn tenant(self, tenant: &str) -> Self {
        self.set("Authorization", format!("Bearer {tenant}"))
    }

    /// Sets the method.
    #[must_use]
    pub fn method(mut self, method: &'static str) -> Self {
        self.method = method;
        self
    }

    /// Sets the host.
    #[must_use]
    pub fn host(mut self, host: &str) -> Self {
        self.host = host.to_owned();
        self
    }

    /// Sets the request target.
    #[must_use]
    pub fn target(mut self, target: &str) -> Self {
        self.target = target.to_owned();
        self
    }

    /// Adds a header line.
    #[must_use]
    pub fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.headers.push((name.to_owned(), value.as_ref().to_vec()));
        self
    }

    /// Replaces all header lines of that name by one.
    #[must_use]
    pub fn set(self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.without(name).header(name, value)
    }

    /// Removes the header lines of that name.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(header, _)| !header.eq_ignore_ascii_case(name));
        self
    }

    /// Sets the body.
    #[must_use]
    pub fn body(mut self, body: impl AsRef<[u8]>) -> Self {
        self.body = body.as_ref().to_vec();
        self
    }

    /// Requests a simulated fault.
    #[must_use]
    pub fn simulate(self, what: &str) -> Self {
        self.set("X-Simulate", what)
    }

    /// Makes the client willing to wait for the answer of a run in progress.
    #[must_use]
    pub fn waiting(self) -> Self {
        self.header("Prefer", "wait=25")
    }

    /// The bytes of the head, without its final empty line.
    fn head(&self, framing: &str) -> Vec<u8> {
        let mut bytes =
            format!("{} {} HTTP/1.1\r\nHost: {}\r\n{framing}", self.method, self.target, self.host).into_bytes();
        for (name, value) in &self.headers {
            bytes.extend([name.as_bytes(), b": ", value, b"\r\n"].concat());
        }
        bytes
    }

    /// The whole request, with its length declared.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let head = self.head(&format!("Content-Length: {}\r\n", self.body.len()));
        [head.as_slice(), b"\r\n", &self.body].concat()
    }

    /// The head alone, with this declared length.
    #[must_use]
    pub fn head_of(&self, declared_bytes: usize) -> Vec<u8> {
        [self.head(&format!("Content-Length: {declared_bytes}\r\n")).as_slice(), b"\r\n"].concat()
    }

    /// The head of a request with a chunked body.
    #[must_use]
    pub fn head_of_chunks(&self) -> Vec<u8> {
        [self.head("Transfer-Encoding: chunked\r\n").as_slice(), b"\r\n"].concat()
    }

    /// Opens a connection and sends the request, without reading the answer.
    ///
    /// # Panics
    /// If the connection fails.
    #[must_use]
    pub fn begin(&self, address: SocketAddr) -> TcpStream {
        let mut stream = connect(address);
        stream.write_all(&self.clone().set("Connection", "close").to_bytes()).unwrap();
        stream
    }

    /// Sends the request on a new connection.
    ///
    /// # Panics
    /// If there is no answer.
    #[must_use]
    pub fn send(&self, address: SocketAddr) -> Answer {
        self.try_send(address).unwrap_or_else(|| panic!("no answer to {self:?}"))
    }

    /// Sends the request on a new connection to a server that may die meanwhile.
    #[must_use]
    pub fn try_send(&self, address: SocketAddr) -> Option<Answer> {
        Answer::read(self.begin(address), self.method)
    }
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Ends an answered connection by RST. After FIN, this machine would remember it for two minutes. With connection tracking, as
/// for Docker, the matrix would fill the table, and packets of other connections would be dropped.
pub(crate) fn leave_no_trace(stream: &TcpStream) {
    SockRef::from(stream).set_linger(Some(Duration::ZERO)).unwrap();
}

/// A persistent connection, with the bytes read from it.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    read: Vec<u8>,
}

impl Connection {
    /// Opens a connection.
    ///
    /// # Panics
    /// If the server does not listen.
    #[must_use]
    pub fn open(address: SocketAddr) -> Self {
        Self { stream: connect(address), read: Vec::new() }
    }

    /// Writes bytes.
    ///
    /// # Panics
    /// If the server has closed the connection.
    pub fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Writes bytes; false if the server has closed the connection before.
    pub fn try_write(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).is_ok()
    }

    /// Returns the stream.
    #[must_use]
    pub fn into_stream(self) -> TcpStream {
        self.stream
    }

    /// Reads more; false at the end.
    fn fill(&mut self) -> bool {
        let mut more = [0; 16 * 1024];
        // A reset ends the connection as well; what arrived before it counts.
        let length = self.stream.read(&mut more).unwrap_or(0);
        self.read.extend(&more[..length]);
        length > 0
    }

    /// Takes everything before `end`, and skips `end`.
    fn until(&mut self, end: &[u8]) -> Option<Vec<u8>> {
        loop {
            if let Some(at) = self.read.windows(end.len()).position(|window| window == end) {
                let taken = self.read[..at].to_vec();
                self.read.drain(..at + end.len());
                return Some(taken);
            }
            if !self.fill() {
                return None;
            }
        }
    }

    fn exactly(&mut self, length: usize) -> Option<Vec<u8>> {
        while self.read.len() < length {
            if !self.fill() {
                return None;
            }
        }
        Some(self.read.drain(..length).collect())
    }

    /// Reads the head of the next answer.
    ///
    /// # Panics
    /// If the bytes are not HTTP.
    pub fn head(&mut self) -> Option<Answer> {
        let head = self.until(b"\r\n\r\n")?;
        let mut lines = head.split(|&byte| byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
        let status_line = String::from_utf8(lines.next()?.to_vec()).unwrap();
        let status = status_line.split(' ').nth(1).unwrap().parse().unwrap();
        Some(Answer { status, headers: lines.map(header_line).collect(), body: Vec::new() })
    }

    /// Reads the next answer, to a request with this method; `None` if the connection ends before.
    pub fn answer(&mut self, method: &str) -> Option<Answer> {
        let mut answer = self.head()?;
        let has_body = method != "HEAD" && answer.status >= 200 && ![204, 304].contains(&answer.status);
        if has_body {
            answer.body = if answer.header("transfer-encoding") == Some("chunked") {
                self.chunks()?
            } else if let Some(length) = answer.header("content-length") {
                let length = length.parse().unwrap();
                self.exactly(length)?
            } else {
                while self.fill() {}
                std::mem::take(&mut self.read)
            };
        }
        Some(answer)
    }

    /// Reads a chunked body (RFC 9112 section 7.1).
    fn chunks(&mut self) -> Option<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            match self.chunk()? {
                last if last.is_empty() => return Some(body),
                chunk => body.extend(chunk),
            }
        }
    }

    /// Reads the next chunk of a chunked body; the last one is empty.
    pub fn chunk(&mut self) -> Option<Vec<u8>> {
        let line = self.until(b"\r\n")?;
        let length = usize::from_str_radix(std::str::from_utf8(&line).ok()?, 16).ok()?;
        let chunk = self.exactly(length)?;
        self.until(b"\r\n")?;
        Some(chunk)
    }
}

impl Answer {
    /// Makes an answer that was read elsewhere; names must be in lower case.
    pub(crate) fn new(status: u16, headers: Vec<(String, Vec<u8>)>, body: Vec<u8>) -> Self {
        Self { status, headers, body }
    }

    /// Removes the fields of these names.
    #[must_use]
    pub fn without(mut self, names: &[&str]) -> Self {
        self.headers.retain(|(name, _)| !names.contains(&name.as_str()));
        self
    }

    /// Reads one answer and ends the connection; `None` if the connection ends before.
    pub fn read(stream: TcpStream, method: &str) -> Option<Self> {
        let mut connection = Connection { stream, read: Vec::new() };
        let answer = connection.answer(method);
        leave_no_trace(&connection.stream);
        answer
    }

    /// The value of the only header line of that name.
    ///
    /// # Panics
    /// If there are several.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.values(name).into_iter();
        let value = values.next()?;
        assert!(values.next().is_none(), "{name} is repeated");
        Some(std::str::from_utf8(value).unwrap())
    }

    /// The values of all header lines of that name.
    #[must_use]
    pub fn values(&self, name: &str) -> Vec<&[u8]> {
        self.headers.iter().filter(|(header, _)| header == name).map(|(_, value)| value.as_slice()).collect()
    }

    /// Whether it is marked as a replay.
    #[must_use]
    pub fn is_replay(&self) -> bool {
        self.header("idempotency-replayed") == Some("true")
    }

    /// The body as JSON.
    ///
    /// # Panics
    /// If it is not JSON.
    #[must_use]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }

    /// The end of the type URI, if this is a problem of the idempotency layer. Every problem document is checked against RFC
    /// 9457.
    ///
    /// # Panics
    /// If it is an invalid problem document.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        if self.header("content-type") != Some("application/problem+json") || self.body.is_empty() {
            return None;
        }
        let document = self.json();
        assert_eq!(document["status"].as_u64(), Some(u64::from(self.status)), "{document}");
        assert!(document["title"].is_string() && document["detail"].is_string(), "{document}");
        let (page, kind) = document["type"].as_str().unwrap().split_once('#')?;
        assert_eq!(page, "https://docs.rs/idem-http/latest/idem_http/problem/index.html");
        assert_eq!(self.values("cache-control"), [b"no-store"], "a cache may keep {self:?}");
        Some(kind.to_owned())
    }

    /// `Retry-After` in seconds.
    ///
    /// # Panics
    /// If it is not a number.
    #[must_use]
    pub fn retry_after(&self) -> Option<u64> {
        self.header("retry-after").map(|seconds| seconds.parse().unwrap())
    }

    /// The part that a first answer and all its replays share. Frameworks may send fields of different names in any order (RFC
    /// 9110 section 5.3), so they are sorted by name here.
    #[must_use]
    pub fn essence(&self) -> Self {
        const OF_THE_MOMENT: [&str; 6] = [
            "date",
            "idempotency-replayed",
            "idempotency-retention",
            "content-length",
            "transfer-encoding",
            "connection",
        ];
        let lasting = |(name, _): &&(String, Vec<u8>)| !OF_THE_MOMENT.contains(&name.as_str());
        let mut headers: Vec<_> = self.headers.iter().filter(lasting).cloned().collect();
        headers.sort_by(|(one, _), (other, _)| one.cmp(other));
        Self { headers, ..self.clone() }
    }
}

/// Shows text as text, and only the beginning of a long body.
impl fmt::Debug for Answer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let headers = self.headers.iter().map(|(name, value)| format!("{name}: {}", value.escape_ascii()));
        let shown = &self.body[..self.body.len().min(300)];
        formatter
            .debug_struct("Answer")
            .field("status", &self.status)
            .field("headers", &headers.collect::<Vec<_>>())
            .field("body_bytes", &self.body.len())
            .field("body", &shown.escape_ascii().to_string())
            .finish()
    }
}

fn header_line(line: &[u8]) -> (String, Vec<u8>) {
    let colon = line.iter().position(|&byte| byte == b':').unwrap();
    (String::from_utf8(line[..colon].to_ascii_lowercase()).unwrap(), line[colon + 1..].trim_ascii().to_vec())
}
