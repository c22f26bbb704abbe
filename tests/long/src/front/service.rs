//! A process of the payments example, and connections to it.

use std::io::{BufRead, BufReader};
use std::ops::Add;
use std::process::{Child, Command, Stdio};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{HeaderMap, Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::Error;

/// The token of the operator.
const OPERATOR: &str = "operator";

/// The process, which is killed when this is dropped.
#[derive(Debug)]
pub(super) struct Service {
    process: Child,
    address: String,
}

/// An answer, read to its end.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

/// A connection that is kept alive.
#[derive(Debug)]
pub(super) struct Connection(SendRequest<Full<Bytes>>);

/// Which store answered how many requests.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Cache {
    pub(super) fast_replays: u64,
    pub(super) durable_replays: u64,
    pub(super) fast_in_progress: u64,
    pub(super) durable_in_progress: u64,
    pub(super) opened: u64,
    pub(super) unreadable: u64,
    pub(super) failures: u64,
}

impl Service {
    /// Starts a process on these servers, under the transactional contract.
    pub(super) fn start(postgres: &str, redis: &str) -> Result<Self, Error> {
        // `cargo xtask long` has built it in the same folder as this program.
        let program = std::env::current_exe()?.with_file_name("payments");
        let mut process = Command::new(&program)
            .args(["--listen", "127.0.0.1:0", "--store", postgres, "--cache", redis, "--simulate"])
            // On a busy machine, waiting for a connection must not fail as an unavailable store.
            .args(["--contract", "transactional", "--store-timeout-ms", "10000", "--operator-token", OPERATOR])
            .env("RUST_LOG", "error")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("{}: {error}; run this by `cargo xtask long`", program.display()))?;
        let mut line = String::new();
        let out = process.stdout.take().ok_or("payments has no output")?;
        BufReader::new(out).read_line(&mut line)?;
        let address = line.trim().strip_prefix("listening on http://").map(str::to_owned);
        let Some(address) = address else {
            process.kill()?;
            return Err(format!("payments said {line:?}").into());
        };
        Ok(Self { process, address })
    }

    pub(super) async fn connect(&self) -> Result<Connection, Error> {
        let stream = TcpStream::connect(&self.address).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        // Ends when either side closes, which the next request notices.
        tokio::spawn(connection);
        Ok(Connection(sender))
    }

    pub(super) async fn cache(&self) -> Result<Cache, Error> {
        let request = Request::get("/operator/health").header("host", "payments");
        let request = request.header("authorization", format!("Bearer {OPERATOR}")).body(Full::default())?;
        let answer = self.connect().await?.send(request).await?;
        let health: serde_json::Value = serde_json::from_slice(&answer.body)?;
        let number = |value: &serde_json::Value| value.as_u64().ok_or("the health page lacks a number");
        let cache = &health["cache"];
        Ok(Cache {
            fast_replays: number(&cache["replays"]["cache"])?,
            durable_replays: number(&cache["replays"]["store"])?,
            fast_in_progress: number(&cache["in_progress"]["cache"])?,
            durable_in_progress: number(&cache["in_progress"]["store"])?,
            opened: number(&cache["opened"])?,
            unreadable: number(&cache["unreadable"])?,
            failures: number(&cache["failures"])?,
        })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Connection {
    pub(super) async fn send(&mut self, request: Request<Full<Bytes>>) -> Result<Answer, Error> {
        self.0.ready().await?;
        let (head, body) = self.0.send_request(request).await?.into_parts();
        Ok(Answer { status: head.status, headers: head.headers, body: body.collect().await?.to_bytes() })
    }
}

impl Add for Cache {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            fast_replays: self.fast_replays + other.fast_replays,
            durable_replays: self.durable_replays + other.durable_replays,
            fast_in_progress: self.fast_in_progress + other.fast_in_progress,
            durable_in_progress: self.durable_in_progress + other.durable_in_progress,
            opened: self.opened + other.opened,
            unreadable: self.unreadable + other.unreadable,
            failures: self.failures + other.failures,
        }
    }
}
