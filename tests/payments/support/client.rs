//! An HTTP/1.1 client that hides nothing: one connection per request, bytes as they are.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use super::PATIENCE;

/// A request to be sent.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    method: &'static str,
    target: String,
    headers: Vec<(String, Vec<u8>)>,
    body: Vec<u8>,
}

/// What came back; the body is without its transfer coding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, Vec<u8>)>,
    pub(crate) body: Vec<u8>,
}

impl Request {
    fn new(method: &'static str, target: &str) -> Self {
        let request = Self { method, target: target.to_owned(), headers: Vec::new(), body: Vec::new() };
        request.header("Authorization", "Bearer acme")
    }

    pub(crate) fn get(target: &str) -> Self {
        Self::new("GET", target)
    }

    /// A payment of 12.50 EUR by `acme` under `key`.
    pub(crate) fn pay(key: &str) -> Self {
        Self::keyless().header("Idempotency-Key", key)
    }

    /// The same without a key.
    pub(crate) fn keyless() -> Self {
        let request = Self::new("POST", "/v1/payments").header("Content-Type", "application/json");
        request.body(r#"{"amount": 1250, "currency": "EUR", "recipient": "alice"}"#)
    }

    pub(crate) fn method(mut self, method: &'static str) -> Self {
        self.method = method;
        self
    }

    pub(crate) fn target(mut self, target: &str) -> Self {
        self.target = target.to_owned();
        self
    }

    /// Adds a header line.
    pub(crate) fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.headers.push((name.to_owned(), value.as_ref().to_vec()));
        self
    }

    /// Replaces all header lines of that name by one.
    pub(crate) fn set(self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.without(name).header(name, value)
    }

    pub(crate) fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(header, _)| !header.eq_ignore_ascii_case(name));
        self
    }

    pub(crate) fn body(mut self, body: impl AsRef<[u8]>) -> Self {
        self.body = body.as_ref().to_vec();
        self
    }

    pub(crate) fn simulate(self, what: &str) -> Self {
        self.set("X-Simulate", what)
    }

    /// Opens a connection and sends the request, without reading the answer.
    pub(crate) fn begin(&self, address: SocketAddr) -> TcpStream {
        self.begin_part(address, self.body.len())
    }

    /// The same with only the first `sent` bytes of the body.
    pub(crate) fn begin_part(&self, address: SocketAddr, sent: usize) -> TcpStream {
        let mut head = format!("{} {} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n", self.method, self.target);
        head.push_str(&format!("Content-Length: {}\r\n", self.body.len()));
        let mut bytes = head.into_bytes();
        for (name, value) in &self.headers {
            bytes.extend([name.as_bytes(), b": ", value, b"\r\n"].concat());
        }
        bytes.extend(b"\r\n");
        bytes.extend(&self.body[..sent]);
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(&bytes).unwrap();
        stream
    }

    pub(crate) fn send(&self, address: SocketAddr) -> Answer {
        let method = self.method;
        Answer::read(self.begin(address), method).unwrap_or_else(|| panic!("no answer to {self:?}"))
    }

    /// The same for a server that may die meanwhile.
    pub(crate) fn try_send(&self, address: SocketAddr) -> Option<Answer> {
        Answer::read(self.begin(address), self.method)
    }
}

impl Answer {
    /// Reads a connection to its end; `None` when it ends before an answer.
    pub(crate) fn read(mut stream: TcpStream, method: &str) -> Option<Self> {
        let mut bytes = Vec::new();
        // A reset ends the connection as well; what arrived before it counts.
        let _ = stream.read_to_end(&mut bytes);
        let end_of_head = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
        let (head, body) = (&bytes[..end_of_head], &bytes[end_of_head + 4..]);
        let mut lines = head.split(|&byte| byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line));
        let status_line = String::from_utf8(lines.next()?.to_vec()).unwrap();
        let status = status_line.split(' ').nth(1).unwrap().parse().unwrap();
        let headers: Vec<(String, Vec<u8>)> = lines.map(header_line).collect();
        let mut answer = Self { status, headers, body: Vec::new() };
        answer.body = match answer.header("transfer-encoding") {
            Some("chunked") => unchunk(body)?,
            _ => {
                let length: usize = answer.header("content-length").map_or(0, |length| length.parse().unwrap());
                if method != "HEAD" && body.len() < length {
                    return None;
                }
                body.to_vec()
            }
        };
        Some(answer)
    }

    /// The value of the only header line of that name.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.values(name).into_iter();
        let value = values.next()?;
        assert!(values.next().is_none(), "{name} is repeated");
        Some(std::str::from_utf8(value).unwrap())
    }

    pub(crate) fn values(&self, name: &str) -> Vec<&[u8]> {
        self.headers.iter().filter(|(header, _)| header == name).map(|(_, value)| value.as_slice()).collect()
    }

    pub(crate) fn is_replay(&self) -> bool {
        self.header("idempotency-replayed") == Some("true")
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }

    /// The end of the type URI of a problem of the idempotency layer.
    pub(crate) fn problem(&self) -> Option<String> {
        if self.header("content-type") != Some("application/problem+json") {
            return None;
        }
        let document = self.json();
        assert_eq!(document["status"].as_u64(), Some(u64::from(self.status)), "{document}");
        let (page, kind) = document["type"].as_str()?.split_once('#')?;
        assert_eq!(page, "https://docs.rs/idem-http/latest/idem_http/problem/index.html");
        Some(kind.to_owned())
    }

    /// `Retry-After` in seconds.
    pub(crate) fn retry_after(&self) -> Option<u64> {
        self.header("retry-after").map(|seconds| seconds.parse().unwrap())
    }

    /// What must be the same in a first answer and all its replays.
    pub(crate) fn essence(&self) -> Self {
        const OF_THE_MOMENT: [&str; 5] =
            ["date", "idempotency-replayed", "content-length", "transfer-encoding", "connection"];
        let lasting = |(name, _): &&(String, Vec<u8>)| !OF_THE_MOMENT.contains(&name.as_str());
        Self { headers: self.headers.iter().filter(lasting).cloned().collect(), ..self.clone() }
    }
}

fn header_line(line: &[u8]) -> (String, Vec<u8>) {
    let colon = line.iter().position(|&byte| byte == b':').unwrap();
    (String::from_utf8(line[..colon].to_ascii_lowercase()).unwrap(), line[colon + 1..].trim_ascii().to_vec())
}

/// The body without its chunks (RFC 9112 section 7.1); `None` when the last chunk is missing.
fn unchunk(mut bytes: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let end = bytes.windows(2).position(|window| window == b"\r\n")?;
        let length = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).ok()?, 16).ok()?;
        if length == 0 {
            return Some(body);
        }
        body.extend(bytes.get(end + 2..end + 2 + length)?);
        bytes = bytes.get(end + 4 + length..)?;
    }
}
