//! A minimal client for Postgres's protocol (version 3.0, simple queries, no password).

use std::io::{Error, Read, Result, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

/// Sends one query on a new connection to the server on this port, as the user and in the database `postgres`. Values of a row
/// are joined by `|`, rows by `;`.
pub(crate) fn ask(port: u16, sql: &str) -> Result<String> {
    Client::connect(port)?.ask(sql)
}

/// The port in a URL that ends with `:PORT/postgres`.
pub(crate) fn port(url: &str) -> u16 {
    let authority = url.strip_suffix("/postgres").unwrap();
    authority.rsplit_once(':').unwrap().1.parse().unwrap()
}

pub(crate) struct Client(TcpStream);

impl Client {
    pub(crate) fn connect(port: u16) -> Result<Client> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(&framed(b"", b"\0\x03\0\0user\0postgres\0database\0postgres\0\0"))?;
        let mut client = Client(stream);
        client.answer()?;
        Ok(client)
    }

    pub(crate) fn ask(&mut self, sql: &str) -> Result<String> {
        self.send(sql)?;
        self.answer()
    }

    pub(crate) fn send(&mut self, sql: &str) -> Result<()> {
        self.0.write_all(&framed(b"Q", format!("{sql}\0").as_bytes()))
    }

    /// Reads until the server is ready for the next query.
    pub(crate) fn answer(&mut self) -> Result<String> {
        let mut rows = Vec::new();
        loop {
            let mut head = [0; 5];
            self.0.read_exact(&mut head)?;
            let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
            let mut body = vec![0; length as usize - 4];
            self.0.read_exact(&mut body)?;
            match head[0] {
                b'D' => rows.push(row(&body)),
                b'E' => return Err(Error::other(String::from_utf8_lossy(&body).replace('\0', " "))),
                b'Z' => return Ok(rows.join(";")),
                _ => {}
            }
        }
    }
}

fn framed(kind: &[u8], body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len() + 4).unwrap();
    [kind, &length.to_be_bytes(), body].concat()
}

/// Parses the number of values, then each with its length; NULL has the length -1.
fn row(body: &[u8]) -> String {
    let (mut values, mut rest) = (Vec::new(), &body[2..]);
    while let [a, b, c, d, tail @ ..] = rest {
        let length = usize::try_from(i32::from_be_bytes([*a, *b, *c, *d])).unwrap_or(0);
        values.push(String::from_utf8_lossy(&tail[..length]).into_owned());
        rest = &tail[length..];
    }
    values.join("|")
}
