//! One request and its answer, over either protocol.

use std::any::Any;
use std::net::{Shutdown, SocketAddr};
use std::time::Duration;

use socket2::SockRef;

use crate::client::{Answer, Connection, Request};
use crate::http2;

/// The protocol of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[expect(clippy::exhaustive_enums, reason = "cases must know what each protocol has")]
pub enum Protocol {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2 without TLS, with prior knowledge.
    Http2,
}

impl Protocol {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Http1, Self::Http2];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Http1 => "HTTP/1.1",
            Self::Http2 => "HTTP/2",
        }
    }

    /// The other protocol.
    pub(crate) fn other(self) -> Self {
        match self {
            Self::Http1 => Self::Http2,
            Self::Http2 => Self::Http1,
        }
    }

    /// The ways in which a client can leave.
    pub(crate) fn ways_to_leave(self) -> [Leave; 3] {
        match self {
            Self::Http1 => [Leave::Close, Leave::Reset, Leave::HalfClose],
            Self::Http2 => [Leave::Close, Leave::Reset, Leave::ResetStream],
        }
    }
}

/// How a client leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leave {
    /// Its connection ends by FIN.
    Close,
    /// Its connection ends by RST.
    Reset,
    /// It sends no more, but keeps its connection.
    HalfClose,
    /// It resets one stream, but keeps its connection.
    ResetStream,
}

impl Leave {
    /// Its name, which serves as a key.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Close => "close",
            Self::Reset => "reset",
            Self::HalfClose => "half-close",
            Self::ResetStream => "reset-stream",
        }
    }
}

/// A request that is not finished.
#[derive(Debug)]
pub(crate) enum Exchange {
    Http1 { connection: Connection, method: &'static str, is_in_chunks: bool },
    Http2(http2::Stream),
}

/// A persistent connection.
#[derive(Debug)]
pub(crate) enum Line {
    Http1(Connection),
    Http2(http2::Connection),
}

impl Exchange {
    /// Sends a whole request on a new connection.
    pub(crate) fn begin(protocol: Protocol, address: SocketAddr, request: &Request) -> Self {
        match protocol {
            Protocol::Http1 => {
                let mut connection = Connection::open(address);
                connection.try_write(&request.clone().set("Connection", "close").to_bytes());
                Self::Http1 { connection, method: request.method, is_in_chunks: false }
            }
            Protocol::Http2 => Self::Http2(http2::Stream::alone(address, |connection| connection.begin(request))),
        }
    }

    /// Sends the head of a request on a new connection, with or without a declared length.
    pub(crate) fn upload(
        protocol: Protocol,
        address: SocketAddr,
        request: &Request,
        declared_bytes: Option<usize>,
    ) -> Self {
        match protocol {
            Protocol::Http1 => {
                let mut connection = Connection::open(address);
                let head = declared_bytes.map_or_else(|| request.head_of_chunks(), |bytes| request.head_of(bytes));
                connection.write(&head);
                Self::Http1 { connection, method: request.method, is_in_chunks: declared_bytes.is_none() }
            }
            Protocol::Http2 => {
                Self::Http2(http2::Stream::alone(address, |connection| connection.upload(request, declared_bytes)))
            }
        }
    }

    /// Sends more of the body; the server may refuse it.
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        match self {
            Self::Http1 { connection, is_in_chunks: false, .. } => connection.try_write(bytes),
            Self::Http1 { connection, .. } => {
                connection.try_write(&[format!("{:x}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat())
            }
            Self::Http2(stream) => stream.write(bytes),
        };
    }

    /// Ends the body.
    pub(crate) fn end(&mut self) {
        match self {
            Self::Http1 { is_in_chunks: false, .. } => {}
            Self::Http1 { connection, .. } => connection.write(b"0\r\n\r\n"),
            Self::Http2(stream) => stream.end(),
        }
    }

    /// Ends a body of undeclared length with a trailer.
    pub(crate) fn end_by_trailer(&mut self, name: &'static str, value: &'static str) {
        match self {
            Self::Http1 { connection, .. } => connection.write(format!("0\r\n{name}: {value}\r\n\r\n").as_bytes()),
            Self::Http2(stream) => stream.end_by_trailer(name, value),
        }
    }

    /// Reads the head of the answer.
    pub(crate) fn head(&mut self) -> Option<Answer> {
        match self {
            Self::Http1 { connection, .. } => connection.head(),
            Self::Http2(stream) => stream.head(),
        }
    }

    /// Reads the next piece of a body of undeclared length; the last one is empty.
    pub(crate) fn chunk(&mut self) -> Option<Vec<u8>> {
        match self {
            Self::Http1 { connection, .. } => connection.chunk(),
            Self::Http2(stream) => stream.chunk(),
        }
    }

    /// Reads the whole answer; `None` if the connection ends before.
    pub(crate) fn answer(mut self) -> Option<Answer> {
        let mut answer = match &mut self {
            Self::Http1 { connection, method, .. } => return connection.answer(method),
            Self::Http2(stream) => stream.head()?,
        };
        loop {
            match self.chunk()? {
                last if last.is_empty() => return Some(answer),
                chunk => answer.body.extend(chunk),
            }
        }
    }

    /// Leaves, and returns what keeps the connection open.
    pub(crate) fn leave(self, how: Leave) -> Option<Box<dyn Any>> {
        match (self, how) {
            (Self::Http1 { connection, .. }, Leave::HalfClose) => {
                let stream = connection.into_stream();
                stream.shutdown(Shutdown::Write).unwrap();
                Some(Box::new(stream))
            }
            (Self::Http1 { connection, .. }, how) => {
                if how == Leave::Reset {
                    // Closing with a linger of zero sends RST instead of FIN.
                    SockRef::from(&connection.into_stream()).set_linger(Some(Duration::ZERO)).unwrap();
                }
                None
            }
            (Self::Http2(stream), Leave::ResetStream | Leave::HalfClose) => Some(Box::new(stream.reset())),
            (Self::Http2(stream), how) => {
                stream.disconnect(how == Leave::Reset);
                None
            }
        }
    }
}

impl Line {
    pub(crate) fn open(protocol: Protocol, address: SocketAddr) -> Self {
        match protocol {
            Protocol::Http1 => Self::Http1(Connection::open(address)),
            Protocol::Http2 => Self::Http2(http2::Connection::open(address)),
        }
    }

    /// Sends the next request concurrently with unfinished ones.
    ///
    /// # Panics
    /// Over HTTP/1.1, which allows one request at a time.
    pub(crate) fn begin(&mut self, request: &Request) -> Exchange {
        match self {
            Self::Http1(_) => panic!("a connection of HTTP/1.1 has one request at a time"),
            Self::Http2(connection) => Exchange::Http2(connection.begin(request)),
        }
    }

    /// Sends the next request and reads its answer; `None` if the connection ends before.
    pub(crate) fn ask(&mut self, request: &Request) -> Option<Answer> {
        match self {
            Self::Http1(connection) => {
                // The server may answer and close before everything is sent.
                connection.try_write(&request.to_bytes());
                connection.answer(request.method)
            }
            Self::Http2(connection) => Exchange::Http2(connection.begin(request)).answer(),
        }
    }
}
