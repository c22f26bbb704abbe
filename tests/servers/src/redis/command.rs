//! A minimal client for Redis's protocol (RESP2, no password).

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use super::Reply;
use crate::Error;

/// The time limit for a connection, and for each part of the answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Where a Redis server listens: a port of 127.0.0.1, or an address elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RedisAddress(SocketAddr);

impl From<u16> for RedisAddress {
    fn from(port: u16) -> Self {
        Self((Ipv4Addr::LOCALHOST, port).into())
    }
}

impl From<SocketAddr> for RedisAddress {
    fn from(address: SocketAddr) -> Self {
        Self(address)
    }
}

impl fmt::Display for RedisAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

/// Sends one command on a new connection to the Redis server at this address, or on this port of 127.0.0.1:
/// `redis_command(port, &["GET", "name"])`.
///
/// It follows no redirection and does not retry: a wrong cluster node answers `MOVED`.
///
/// # Errors
///
/// [`Error::Refused`] if the server answers with an error; [`Error::Io`] if it does not answer within five seconds.
pub fn redis_command<W: AsRef<[u8]>>(server: impl Into<RedisAddress>, words: &[W]) -> Result<Reply, Error> {
    let server = server.into();
    // Arguments can be long and secret, so an error names only the command.
    let name = words.first().map(|word| String::from_utf8_lossy(word.as_ref()).into_owned()).unwrap_or_default();
    let what = || format!("{name} at {server}");
    match exchange(server, words).map_err(Error::io(what()))? {
        Reply::Error(reply) => Err(Error::Refused { what: what(), reply }),
        reply => Ok(reply),
    }
}

fn exchange<W: AsRef<[u8]>>(server: RedisAddress, words: &[W]) -> io::Result<Reply> {
    let mut stream = TcpStream::connect_timeout(&server.0, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    stream.write_all(&encode(words))?;
    read(&mut BufReader::new(stream))
}

fn encode<W: AsRef<[u8]>>(words: &[W]) -> Vec<u8> {
    let mut message = format!("*{}\r\n", words.len()).into_bytes();
    for word in words.iter().map(AsRef::as_ref) {
        message.extend(format!("${}\r\n", word.len()).into_bytes());
        message.extend(word);
        message.extend(b"\r\n");
    }
    message
}

fn read(stream: &mut impl BufRead) -> io::Result<Reply> {
    let mut line = Vec::new();
    stream.read_until(b'\n', &mut line)?;
    let Some(line) = line.strip_suffix(b"\r\n") else { return Err(io::ErrorKind::UnexpectedEof.into()) };
    let line = String::from_utf8_lossy(line);
    let unknown = || io::Error::new(io::ErrorKind::InvalidData, format!("not a reply of Redis: {line}"));
    let (kind, rest) = line.split_at_checked(1).ok_or_else(unknown)?;
    if let Some(reply) = match kind {
        "+" => Some(Reply::Status(rest.into())),
        "-" => Some(Reply::Error(rest.into())),
        _ => None,
    } {
        return Ok(reply);
    }
    let number: i64 = rest.parse().map_err(|_| unknown())?;
    match (kind, u64::try_from(number)) {
        (":", _) => Ok(Reply::Integer(number)),
        ("$" | "*", Err(_)) => Ok(Reply::Nil),
        ("$", Ok(length)) => read_bytes(stream, length),
        ("*", Ok(length)) => (0..length).map(|_| read(stream)).collect::<io::Result<_>>().map(Reply::Array),
        _ => Err(unknown()),
    }
}

fn read_bytes(stream: &mut impl BufRead, length: u64) -> io::Result<Reply> {
    let mut bytes = Vec::new();
    stream.take(length).read_to_end(&mut bytes)?;
    let mut end = [0; 2];
    stream.read_exact(&mut end)?;
    Ok(Reply::Bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::{Reply, encode, read};

    #[test]
    fn words_are_sent_with_their_lengths() {
        assert_eq!(encode(&["GET", "a b"]), b"*2\r\n$3\r\nGET\r\n$3\r\na b\r\n");
    }

    #[test]
    fn every_kind_of_reply_is_read() {
        let mut sent = &b"*6\r\n+OK\r\n-ERR no\r\n:-7\r\n$4\r\na\r\nb\r\n$-1\r\n*0\r\n"[..];
        let items = vec![
            Reply::Status("OK".into()),
            Reply::Error("ERR no".into()),
            Reply::Integer(-7),
            Reply::Bytes(b"a\r\nb".into()),
            Reply::Nil,
            Reply::Array(Vec::new()),
        ];
        assert_eq!(read(&mut sent).unwrap(), Reply::Array(items));
        assert!(sent.is_empty());
    }

    #[test]
    fn a_reply_that_ends_early_is_an_error() {
        for sent in ["", "+OK", "$4\r\nab", "*2\r\n:1\r\n", "!\r\n", "\r\n", ":x\r\n"] {
            assert!(read(&mut sent.as_bytes()).is_err(), "{sent:?}");
        }
    }
}
