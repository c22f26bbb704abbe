//! The memory that requests in flight take.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::contest::Spread;
use crate::error::Error;
use crate::http::Server;
use crate::http::serve::Stack;
use crate::judged::Goal;
use crate::report::Report;

/// Requests in flight, each on a separate connection.
const REQUESTS: u64 = 10_000;

/// The body of each.
const BODY: u64 = 4096;

pub(crate) async fn run(report: &mut Report) -> Result<(), Error> {
    println!("\nMemory: {REQUESTS} requests in flight with bodies of {BODY} bytes");
    // Each connection takes a file in this process and one in the server.
    make_room_for(REQUESTS + 1_000)?;
    let bare = grown(Stack::BareWaiting).await?;
    let grown = grown(Stack::Waiting).await?;
    let bodies = REQUESTS * BODY;
    report.note(format!(
        "memory: {} MB more than with idle connections while {REQUESTS} requests are in flight whose bodies are {} MB; \
         without the layer {} MB more",
        grown / 1_000_000,
        bodies / 1_000_000,
        bare / 1_000_000
    ));
    let figure = Spread::of(vec![grown as f64 / bodies as f64]);
    report.judge("memory of 10,000 requests in flight, in bytes of their bodies", Goal::AtMost(2.0), figure);
    Ok(())
}

/// How much larger a server is while requests are in flight than with their connections idle.
async fn grown(stack: Stack) -> Result<u64, Error> {
    let server = Server::start(stack, None).await?;
    let process = server.process.id().ok_or("the server has ended")?;
    let mut connections = Vec::new();
    for _ in 0..REQUESTS {
        connections.push(TcpStream::connect(("127.0.0.1", server.port)).await?);
    }
    // After its first request, the framework keeps memory for a connection, also without the layer.
    for (number, connection) in connections.iter_mut().enumerate() {
        let warm_up = format!("GET /none HTTP/1.1\r\nHost: localhost\r\nX-Number: {number}\r\n\r\n");
        connection.write_all(warm_up.as_bytes()).await?;
        read_answer(connection, "HTTP/1.1 404").await?;
    }
    let idle = resident(process)?;
    let body = vec![b'x'; usize::try_from(BODY)?];
    for (number, connection) in connections.iter_mut().enumerate() {
        let head = format!(
            "POST /pay HTTP/1.1\r\nHost: localhost\r\nIdempotency-Key: in-flight-{number:06}\r\nContent-Length: {BODY}\r\n\r\n"
        );
        connection.write_all(head.as_bytes()).await?;
        connection.write_all(&body).await?;
    }
    let busy = settled(process).await?;
    let mut go = TcpStream::connect(("127.0.0.1", server.port)).await?;
    go.write_all(b"POST /go HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n").await?;
    // All requests were in flight, because all are answered only now.
    for connection in &mut connections {
        read_answer(connection, "HTTP/1.1 200").await?;
    }
    Ok(busy.saturating_sub(idle))
}

async fn read_answer(connection: &mut TcpStream, begin: &str) -> Result<(), Error> {
    let mut buffer = [0; 4096];
    let read = connection.read(&mut buffer).await?;
    let answer = String::from_utf8_lossy(buffer.get(..read).unwrap_or_default()).into_owned();
    if answer.starts_with(begin) { Ok(()) } else { Err(format!("expected {begin}, got {answer:?}").into()) }
}

/// The memory of a process after it has stopped growing.
async fn settled(process: u32) -> Result<u64, Error> {
    let mut last = resident(process)?;
    loop {
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        let now = resident(process)?;
        if now <= last {
            return Ok(now);
        }
        last = now;
    }
}

/// The resident memory of a process in bytes.
fn resident(process: u32) -> Result<u64, Error> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("there is no VmRSS")?;
    let kilobytes: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kilobytes * 1024)
}

/// Raises the limit of open files for this process and those that it starts.
fn make_room_for(files: u64) -> Result<(), Error> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if limit.maximum.is_some_and(|maximum| maximum < files) {
        return Err(format!("this needs {files} open files; raise the limit (ulimit -Hn)").into());
    }
    let current = limit.current.map(|current| current.max(files));
    Ok(setrlimit(Resource::Nofile, Rlimit { current, maximum: limit.maximum })?)
}
