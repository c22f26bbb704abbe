//! A server that does to each request what the test says, and keeps what it was sent.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idem_client::{Backoff, Profile, Settings};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// What happens to one request.
#[derive(Debug, Clone)]
pub(crate) enum Act {
    /// The status line and the fields after it, and a body with its length.
    Answer(&'static str, String),
    /// These bytes, and then the end of the connection.
    Cut(String),
    /// The end of the connection, without an answer.
    Close,
    /// Nothing, for as long as the client waits.
    Hang,
}

/// A request as it arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Arrived {
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Arrived {
    /// The values of a header field.
    pub(crate) fn field(&self, name: &str) -> Vec<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.filter(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value).collect()
    }

    pub(crate) fn key(&self) -> &str {
        let [key] = self.field("idempotency-key")[..] else { panic!("not one key: {self:?}") };
        key
    }

    pub(crate) fn line(&self) -> &str {
        self.head.lines().next().unwrap()
    }
}

/// A server on a port of 127.0.0.1. It follows its script, and then answers 201 to everything.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    arrived: Arc<Mutex<Vec<Arrived>>>,
    task: JoinHandle<()>,
}

impl Server {
    pub(crate) async fn start(script: impl IntoIterator<Item = Act>) -> Self {
        let script: Vec<Act> = script.into_iter().collect();
        Self::deciding(move |number, _| script.get(number).cloned().unwrap_or_else(made)).await
    }

    /// A server whose answer depends on the number of the request, from 0, and the request.
    pub(crate) async fn deciding(decide: impl Fn(usize, &Arrived) -> Act + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (arrived, decide) = (Arc::new(Mutex::new(Vec::new())), Arc::new(decide));
        let seen = Arc::clone(&arrived);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (seen, decide) = (Arc::clone(&seen), Arc::clone(&decide));
                tokio::spawn(async move { serve(stream, &seen, &*decide).await });
            }
        });
        Self { address, arrived, task }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(crate) fn arrived(&self) -> Vec<Arrived> {
        self.arrived.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(mut stream: TcpStream, seen: &Mutex<Vec<Arrived>>, decide: &(dyn Fn(usize, &Arrived) -> Act + Sync)) {
    let mut bytes = Vec::new();
    while let Some(request) = receive(&mut stream, &mut bytes).await {
        let act = {
            let mut seen = seen.lock().unwrap();
            seen.push(request.clone());
            decide(seen.len() - 1, &request)
        };
        match act {
            Act::Answer(head, body) => {
                let answer = format!("HTTP/1.1 {head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                if stream.write_all(answer.as_bytes()).await.is_err() {
                    return;
                }
            }
            Act::Cut(bytes) => {
                let _ = stream.write_all(bytes.as_bytes()).await;
                return;
            }
            Act::Close => return,
            Act::Hang => std::future::pending().await,
        }
    }
}

async fn receive(stream: &mut TcpStream, bytes: &mut Vec<u8>) -> Option<Arrived> {
    loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            let mut request =
                Arrived { head: bytes[..end].iter().copied().map(char::from).collect(), body: Vec::new() };
            let length: usize = request.field("content-length").first().map_or(0, |length| length.parse().unwrap());
            if bytes.len() >= end + 4 + length {
                request.body = bytes[end + 4..end + 4 + length].to_vec();
                bytes.drain(..end + 4 + length);
                return Some(request);
            }
        }
        if stream.read_buf(bytes).await.ok()? == 0 {
            return None;
        }
    }
}

/// The answer to a request that took effect.
pub(crate) fn made() -> Act {
    Act::Answer("201 Created", r#"{"id":1}"#.to_owned())
}

pub(crate) fn answer(head: &'static str) -> Act {
    Act::Answer(head, String::new())
}

/// The answer of an idempotency layer.
pub(crate) fn problem(status: &'static str, name: &str) -> Act {
    Act::Answer(
        Box::leak(format!("{status}\r\ncontent-type: application/problem+json").into_boxed_str()),
        format!(r#"{{"type":"https://docs.rs/idem-http/latest/idem_http/problem/index.html#{name}"}}"#),
    )
}

/// Settings with short pauses, and a budget that no test but that of the budget uses up.
pub(crate) fn quick() -> Settings {
    quick_for(Profile::Idem)
}

pub(crate) fn quick_for(profile: Profile) -> Settings {
    with_pauses(Settings::new(profile))
}

pub(crate) fn with_pauses(settings: Settings) -> Settings {
    let backoff = Backoff { base: Duration::from_millis(1), cap: Duration::from_millis(5) };
    settings.backoff(backoff).retry_budget(100_000, 1000.0)
}
