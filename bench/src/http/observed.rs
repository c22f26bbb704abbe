//! What metrics and spans cost a service: its rate beside that of the same service twice, and the instructions of a request.
//!
//! `payments` is observed by its operator token, which turns its metrics on, and by `RUST_LOG`.

use std::path::Path;
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
use crate::outside::{Keys, Page, built, wrk};
use crate::pace::Pace;
use crate::report::Report;
use crate::servers;

/// The requests of two runs under callgrind; the difference of the runs counts.
const REQUESTS: [u64; 2] = [200, 1_200];

/// How often they are counted, because counts scatter by up to 2 %.
const COUNTS: usize = 5;

/// What a service records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Observed {
    Nothing,
    NothingAgain,
    Metrics,
    /// A log at `info` besides, as a service has it: spans of operations are of the level `debug`.
    MetricsAndLog,
    /// The spans in that log.
    MetricsAndSpans,
}

impl Observed {
    const ALL: [Self; 5] =
        [Self::Nothing, Self::NothingAgain, Self::Metrics, Self::MetricsAndLog, Self::MetricsAndSpans];

    fn name(self) -> &'static str {
        match self {
            Self::Nothing => "without",
            Self::NothingAgain => "without, again",
            Self::Metrics => "with metrics",
            Self::MetricsAndLog => "with metrics and a log",
            Self::MetricsAndSpans => "with metrics, and spans in the log",
        }
    }

    fn has_metrics(self) -> bool {
        !matches!(self, Self::Nothing | Self::NothingAgain)
    }

    /// What is logged. The line of `payments` for each payment is off, because it is the application's.
    fn log(self) -> &'static str {
        match self {
            Self::Nothing | Self::NothingAgain | Self::Metrics => "off",
            Self::MetricsAndLog => "info,payments=warn",
            Self::MetricsAndSpans => "info,payments=warn,idem_core::operation=debug",
        }
    }
}

/// A service that is observed.
#[derive(Debug, Clone, Copy)]
enum Service<'a> {
    /// One route on axum with records in memory, or in this Postgres.
    Route(Option<&'a Postgres>),
    /// The executable of `payments`, with everything in this Postgres.
    Payments(&'a Path, &'a Postgres),
}

impl Service<'_> {
    fn name(self) -> &'static str {
        match self {
            Self::Route(None) => "axum + memory",
            Self::Route(Some(_)) => "axum + Postgres",
            Self::Payments(..) => "payments on Postgres",
        }
    }

    fn page(self) -> Page {
        match self {
            Self::Route(_) => Page::Pay,
            Self::Payments(..) => Page::Payments,
        }
    }

    /// Starts it, under `tool` if there is one.
    fn command(self, tool: &[&str], observed: Observed) -> Result<Command, Error> {
        let program = match self {
            Self::Route(_) => std::env::current_exe()?,
            Self::Payments(program, _) => program.to_owned(),
        };
        let mut command = match tool {
            [] => Command::new(program),
            [tool, options @ ..] => {
                let mut command = Command::new(tool);
                command.args(options).arg(program);
                command
            }
        };
        match self {
            Self::Route(postgres) => {
                command.args(["serve", postgres.map_or(Stack::Memory, |_| Stack::Postgres).name()]);
                command.args(postgres.into_iter().flat_map(|postgres| ["--database".to_owned(), postgres.url()]));
                command.args(observed.has_metrics().then_some("--metrics"));
                command.args(["--log", observed.log()]);
            }
            Self::Payments(_, postgres) => {
                command.args(["--listen", "127.0.0.1:0", "--store", &postgres.url()]);
                command.args(observed.has_metrics().then_some("--operator-token=operator"));
                command.env("RUST_LOG", observed.log());
            }
        }
        Ok(command)
    }
}

pub(crate) async fn run(pace: Pace, report: &mut Report) -> Result<(), Error> {
    let payments = built("payments", "payments").await?;
    let postgres = servers::postgres()?;
    let payments = Service::Payments(&payments, &postgres);
    // First, while the tables are small: with metrics, `payments` counts its records.
    for service in [Service::Route(None), Service::Route(Some(&postgres)), payments] {
        count(service, report).await?;
    }
    for service in [Service::Route(None), payments] {
        let contestants = Observed::ALL.map(|observed| {
            Contestant::new(observed.name(), move |_| async move {
                let server = Server::of(service.command(&[], observed)?).await?;
                let process = server.process.id().ok_or("the server has ended")?;
                wrk(service.page(), server.port, process, CONNECTIONS, Keys::Fresh, pace.turn).await
            })
        });
        let what = service.name();
        let outcome = hold(&format!("{what}, observed"), pace.rounds, contestants.into()).await?;
        let against_nothing = |observed: Observed| outcome.ratio(observed.name(), Observed::Nothing.name(), per_second);
        // Noise moves a run against itself as far.
        let least = against_nothing(Observed::NothingAgain).map_or(1.0, |again| again.min.min(1.0));
        for observed in [Observed::MetricsAndLog, Observed::MetricsAndSpans] {
            let judged = format!("{what}: {} against without", observed.name());
            report.judge(&judged, Goal::AtLeast(least), against_nothing(observed));
        }
        report.add(outcome);
    }
    Ok(())
}

/// Counts the instructions of a request, side by side in each round.
async fn count(service: Service<'_>, report: &mut Report) -> Result<(), Error> {
    let what = service.name();
    let mut ratios = Observed::ALL.map(|observed| (observed, Vec::new()));
    for _ in 0..COUNTS {
        let mut plain = None;
        for (observed, ratios) in &mut ratios {
            let counted = instructions(service, *observed).await?;
            let ratio = counted / *plain.get_or_insert(counted);
            println!("instructions of a request on {what}, {}: {counted:.0}, {ratio:.3}×", observed.name());
            ratios.push(ratio);
        }
    }
    for (observed, ratios) in ratios {
        if matches!(observed, Observed::MetricsAndLog | Observed::MetricsAndSpans) {
            let judged = format!("{what}: instructions of a request {} against without", observed.name());
            report.judge(&judged, Goal::AtMost(1.03), Spread::of(ratios));
        }
    }
    Ok(())
}

/// The instructions of the service for one request, by callgrind.
async fn instructions(service: Service<'_>, observed: Observed) -> Result<f64, Error> {
    let mut counted = [0.0; 2];
    for (counted, requests) in counted.iter_mut().zip(REQUESTS) {
        *counted = collected(service, observed, requests).await?;
    }
    Ok((counted[1] - counted[0]) / (REQUESTS[1] - REQUESTS[0]) as f64)
}

async fn collected(service: Service<'_>, observed: Observed, requests: u64) -> Result<f64, Error> {
    let valgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"];
    let mut command = service.command(&valgrind, observed)?;
    // With more threads the count scatters more, because they look for work now more and now less often.
    command.env("TOKIO_WORKER_THREADS", "1");
    let Server { process, port } = Server::of({
        command.stderr(Stdio::piped());
        command
    })
    .await?;
    let mut stream = BufReader::new(TcpStream::connect(("127.0.0.1", port)).await?);
    for _ in 0..requests {
        answered(&mut stream, service.page(), &uuid::Uuid::new_v4().to_string()).await?;
    }
    drop(stream);
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
async fn answered(stream: &mut BufReader<TcpStream>, page: Page, key: &str) -> Result<(), Error> {
    let (path, body) = (page.path(), page.body());
    let head = format!("POST {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer acme\r\nidempotency-key: {key}");
    let request = format!("{head}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    stream.get_mut().write_all(request.as_bytes()).await?;
    let (mut length, mut line) = (0, String::new());
    loop {
        line.clear();
        if stream.read_line(&mut line).await? == 0 {
            return Err("the server ended the connection".into());
        }
        if line.starts_with("HTTP/1.1") && !line.contains(" 20") {
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
