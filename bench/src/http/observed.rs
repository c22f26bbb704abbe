//! What metrics and spans cost a service: its rate beside that of the same service twice, and the instructions of a request.

use std::process::Stdio;

use idem_servers::Postgres;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::Command;

use crate::contest::{Contestant, Spread, hold, per_second};
use crate::error::Error;
use crate::http::serve::Stack;
use crate::http::{CONNECTIONS, Server};
use crate::judged::Goal;
use crate::outside::{Keys, wrk};
use crate::pace::Pace;
use crate::report::Report;
use crate::servers;

const PLAIN: &str = "without";
const AGAIN: &str = "without, again";
const OBSERVED: &str = "with metrics and spans";

/// The requests of two runs under callgrind; the difference of the runs counts.
const REQUESTS: [u64; 2] = [200, 1_200];

pub(crate) async fn run(pace: Pace, report: &mut Report) -> Result<(), Error> {
    let postgres = servers::postgres()?;
    for (what, stack, database) in [
        ("axum + memory, executing", Stack::Memory, None),
        ("axum + Postgres, executing", Stack::Postgres, Some(&postgres)),
    ] {
        let contestants = [(PLAIN, false), (AGAIN, false), (OBSERVED, true)].map(|(name, is_observed)| {
            Contestant::new(name, move |_| async move {
                let server = Server::start_with(stack, &options(database, is_observed)).await?;
                let process = server.process.id().ok_or("the server has ended")?;
                wrk(server.port, process, CONNECTIONS, Keys::Fresh, pace.turn).await
            })
        });
        let outcome = hold(&format!("{what}, observed"), pace.rounds, contestants.into()).await?;
        let [again, observed] = [AGAIN, OBSERVED].map(|name| outcome.ratio(name, PLAIN, per_second));
        // Noise moves a run against itself as far.
        let least = again.map_or(1.0, |again| again.min.min(1.0));
        report.judge(&format!("{what}: with metrics and spans against without"), Goal::AtLeast(least), observed);
        report.add(outcome);
    }
    let plain = instructions(Stack::Memory, None, false).await?;
    let observed = instructions(Stack::Memory, None, true).await?;
    println!("instructions of a request on axum + memory: {plain:.0}, with metrics and spans {observed:.0}");
    let ratio = Spread::of(vec![observed / plain]);
    report.judge(
        "axum + memory: instructions of a request with metrics and spans against without",
        Goal::AtMost(1.03),
        ratio,
    );
    let plain = instructions(Stack::Postgres, Some(&postgres), false).await?;
    let observed = instructions(Stack::Postgres, Some(&postgres), true).await?;
    println!("instructions of a request on axum + Postgres: {plain:.0}, with metrics and spans {observed:.0}");
    let ratio = Spread::of(vec![observed / plain]);
    report.judge(
        "axum + Postgres: instructions of a request with metrics and spans against without",
        Goal::AtMost(1.03),
        ratio,
    );
    Ok(())
}

fn options(database: Option<&Postgres>, is_observed: bool) -> Vec<String> {
    let database = database.into_iter().flat_map(|postgres| ["--database".to_owned(), postgres.url()]);
    database.chain(is_observed.then(|| "--observed".to_owned())).collect()
}

/// The instructions of the service for one request, by callgrind.
async fn instructions(stack: Stack, database: Option<&Postgres>, is_observed: bool) -> Result<f64, Error> {
    let mut counted = [0.0; 2];
    for (counted, requests) in counted.iter_mut().zip(REQUESTS) {
        *counted = collected(stack, &options(database, is_observed), requests).await?;
    }
    Ok((counted[1] - counted[0]) / (REQUESTS[1] - REQUESTS[0]) as f64)
}

async fn collected(stack: Stack, options: &[String], requests: u64) -> Result<f64, Error> {
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(std::env::current_exe()?);
    command
        .args(["serve", stack.name()])
        .args(options)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let mut process = command.spawn()?;
    let said = process.stdout.take().ok_or("the server says nothing")?;
    let port = BufReader::new(said).lines().next_line().await?.ok_or("the server did not start under valgrind")?;
    let mut stream = BufReader::new(TcpStream::connect(("127.0.0.1", port.trim().parse()?)).await?);
    for _ in 0..requests {
        answered(&mut stream, &uuid::Uuid::new_v4().to_string()).await?;
    }
    let id = process
        .id()
        .and_then(|id| rustix::process::Pid::from_raw(id.try_into().ok()?))
        .ok_or("the server has ended")?;
    rustix::process::kill_process(id, rustix::process::Signal::TERM)?;
    let output = process.wait_with_output().await?;
    let said = String::from_utf8_lossy(&output.stderr);
    let collected = said.lines().find_map(|line| line.split_once("Collected :")?.1.trim().parse().ok());
    collected.ok_or_else(|| format!("callgrind counted nothing:\n{said}").into())
}

/// Sends a request with this key, and reads its answer.
async fn answered(stream: &mut BufReader<TcpStream>, key: &str) -> Result<(), Error> {
    const BODY: &str = r#"{"amount":1000}"#;
    let head = format!("POST /pay HTTP/1.1\r\nhost: bench\r\nidempotency-key: {key}\r\ncontent-type: application/json");
    stream.get_mut().write_all(format!("{head}\r\ncontent-length: {}\r\n\r\n{BODY}", BODY.len()).as_bytes()).await?;
    let (mut length, mut line) = (0, String::new());
    loop {
        line.clear();
        if stream.read_line(&mut line).await? == 0 {
            return Err("the server ended the connection".into());
        }
        if line.starts_with("HTTP/1.1") && !line.contains(" 200 ") {
            return Err(format!("the server answered {}", line.trim()).into());
        }
        if let Some((_, value)) = line.split_once(':').filter(|(name, _)| name.eq_ignore_ascii_case("content-length")) {
            length = value.trim().parse()?;
        }
        if line == "\r\n" {
            break;
        }
    }
    stream.read_exact(&mut vec![0; length]).await?;
    Ok(())
}
