//! The code of `docs/clients.md` does what the page says, against the service and a network that fails.

use std::io::{self, Write};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use idem_proxy::{Ended, Harm, Proxy};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{Contract, Request, Server};

const PAGE: &str = include_str!("../../../docs/clients.md");

/// Answers of a proxy or a server, in place of the service's.
const UNAVAILABLE: &str =
    "HTTP/1.1 503 Service Unavailable\r\nretry-after: 0\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
const REDIRECT: &str = "HTTP/1.1 302 Found\r\nlocation: /v1/ledger\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
const SOLD_OUT: &str = "HTTP/1.1 409 Conflict\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";

/// What the problem types of the service begin with.
const PROBLEMS: &str = "https://docs.rs/idem-http/latest/idem_http/problem/index.html#";

/// So much of an answer that a part of the body is in it.
const BODY: usize = 400;

/// What happens to the requests in their order; later ones pass.
#[derive(Debug)]
struct Script {
    acts: Vec<Act>,
    requests: AtomicUsize,
}

#[derive(Debug, Clone)]
enum Act {
    Reset,
    /// The request arrives, and this much of the answer.
    Cut(usize),
    Answer(String),
}

impl Harm for Script {
    async fn carry(&self, client: &mut TcpStream, server: &mut TcpStream) -> io::Result<Ended> {
        let mut request = Vec::new();
        // The head and the body may arrive separately.
        while !request.ends_with(b"}") {
            if client.read_buf(&mut request).await? == 0 {
                return Ok(Ended::Closed);
            }
        }
        let act = self.acts.get(self.requests.fetch_add(1, Ordering::SeqCst)).cloned();
        let limit = match act {
            Some(Act::Reset) => return Ok(Ended::ClientReset),
            Some(Act::Answer(answer)) => {
                client.write_all(answer.as_bytes()).await?;
                return Ok(Ended::Closed);
            }
            Some(Act::Cut(bytes)) => Some(bytes),
            None => None,
        };
        server.write_all(&request).await?;
        let mut answer = vec![0; 64 * 1024];
        let read = server.read(&mut answer).await?;
        client.write_all(&answer[..limit.unwrap_or(read).min(read)]).await?;
        Ok(Ended::Closed)
    }
}

/// An answer with this body, as a problem document.
fn document(status: &str, body: &str) -> Act {
    let fields = "content-type: application/problem+json; charset=utf-8\r\nconnection: close";
    Act::Answer(format!("HTTP/1.1 {status}\r\n{fields}\r\ncontent-length: {}\r\n\r\n{body}", body.len()))
}

/// A problem of the idempotency layer.
fn problem(status: &str, name: &str) -> Act {
    document(status, &format!(r#"{{"type":"{PROBLEMS}{name}"}}"#))
}

/// The code block of a language.
fn code(language: &str) -> &'static str {
    let (_, after) = PAGE.split_once(&format!("```{language}\n")).unwrap_or_else(|| panic!("no code in {language}"));
    after.split_once("\n```").unwrap().0
}

/// What a program prints, whose code goes to its standard input; `stopped` if it says that a repeat cannot help.
fn output(program: &[&str], code: &str, port: u16) -> String {
    let folder = tempfile::TempDir::new().unwrap();
    let mut command = Command::new(program[0]);
    command.args(&program[1..]).current_dir(folder.path()).env("NO_COLOR", "1");
    let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let process = process.as_mut().unwrap_or_else(|error| panic!("{}: {error}; install it", program[0]));
    let code = code.replace("127.0.0.1:8080", &format!("127.0.0.1:{port}"));
    process.stdin.take().unwrap().write_all(code.as_bytes()).unwrap();
    let mut printed = String::new();
    io::Read::read_to_string(&mut process.stdout.take().unwrap(), &mut printed).unwrap();
    let mut errors = String::new();
    io::Read::read_to_string(&mut process.stderr.take().unwrap(), &mut errors).unwrap();
    if process.wait().unwrap().success() {
        return printed.trim().to_owned();
    }
    assert!(errors.contains("a repeat cannot help"), "{printed}{errors}");
    "stopped".to_owned()
}

/// `runs` says what happens to the first requests of each run, and `stops` after which answers the program gives up.
fn does_what_the_page_says(language: &str, program: &[&str], runs: Vec<Vec<Act>>, stops: Vec<Act>) {
    let server = Server::start(Contract::Transactional, &[]);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let run = |acts: Vec<Act>| {
        let script = Script { acts, requests: AtomicUsize::new(0) };
        let proxy = runtime.block_on(Proxy::start("127.0.0.1", server.address.port(), script)).unwrap();
        let printed = output(program, code(language), proxy.port());
        (printed, proxy.requests.load(Ordering::SeqCst))
    };
    let answer = |text: &str| Act::Answer(text.to_owned());
    // Final answers, before the payment is made.
    assert_eq!(run(vec![answer(REDIRECT)]), ("302".to_owned(), 1));
    assert_eq!(run(vec![answer(SOLD_OUT)]), ("409".to_owned(), 1));
    let own =
        [r#"{"title":"sold out"}"#, r#"{"type":7}"#, "[]", "null", "{", r#"{"type":"https://shop.test/#backoff"}"#];
    for own in own {
        assert_eq!(run(vec![document("409 Conflict", own)]), ("409".to_owned(), 1), "{own}");
    }
    for stop in stops {
        assert_eq!(run(vec![stop.clone()]), ("stopped".to_owned(), 1), "{stop:?}");
    }
    assert_eq!(server.effects(), 0);
    for acts in runs {
        let requests = acts.len() + 1;
        assert_eq!(run(acts), ("201".to_owned(), requests));
    }
    let ledger = server.send(&Request::get("/v1/ledger")).json();
    assert_eq!((ledger["effects"].as_u64(), ledger["total"].as_u64()), (Some(1), Some(1250)));
}

/// Lost connections, an answer that is lost as a whole, one that is cut in its head and one in its body; and refusals for now.
fn all_repeats() -> Vec<Vec<Act>> {
    let refusals =
        [("409 Conflict", "in-progress"), ("409 Conflict", "backoff"), ("400 Bad Request", "body-incomplete")];
    vec![
        vec![Act::Reset, Act::Answer(UNAVAILABLE.to_owned()), Act::Cut(0), Act::Cut(20), Act::Cut(BODY)],
        refusals.map(|(status, name)| problem(status, name)).into(),
    ]
}

fn all_stops() -> Vec<Act> {
    let fault = "500 Internal Server Error";
    let stops = [("504 Gateway Timeout", "outcome-unknown"), (fault, "record-unreadable"), (fault, "misconfigured")];
    stops.map(|(status, name)| problem(status, name)).into()
}

#[test]
fn the_javascript_of_the_page_pays_once() {
    does_what_the_page_says("js", &["node", "-"], all_repeats(), all_stops());
}

#[test]
fn the_python_of_the_page_pays_once() {
    does_what_the_page_says("python", &["python3", "-"], all_repeats(), all_stops());
}

#[test]
fn the_curl_line_of_the_page_pays_once() {
    // Its pauses double from 1 s on. It tells no problems apart.
    does_what_the_page_says("sh", &["sh"], vec![vec![Act::Cut(20), Act::Cut(BODY)]], vec![]);
}
