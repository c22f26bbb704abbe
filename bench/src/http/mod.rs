//! Over HTTP: a bare handler, the layers, and peers, each in a separate process.

pub(crate) mod observed;
pub(crate) mod serve;

use std::process::Stdio;
use std::time::Duration;

use idem_servers::Postgres;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::contest::{Contestant, Outcome, hold, per_second};
use crate::error::Error;
use crate::http::serve::Stack;
use crate::judged::Goal;
use crate::outside::{Keys, Page, warm_up, wrk};
use crate::pace::Pace;
use crate::report::Report;
use crate::servers;

/// Connections at once.
const CONNECTIONS: usize = 64;

pub(crate) async fn run(pace: Pace, report: &mut Report) -> Result<(), Error> {
    let in_memory = [Stack::Bare, Stack::Memory, Stack::PeerInMemory, Stack::ActixBare, Stack::ActixMemory];
    let executing = contest("HTTP in memory, executing", &in_memory, None, Keys::Fresh, pace).await?;
    let ratio = |outcome: &Outcome, one: Stack, other: Stack| outcome.ratio(one.name(), other.name(), per_second);
    let figure = ratio(&executing, Stack::Memory, Stack::Bare);
    report.judge("axum + memory, executing, against the bare handler", Goal::AtLeast(0.7), figure);
    let figure = ratio(&executing, Stack::Memory, Stack::PeerInMemory);
    report.judge("axum + memory, executing, against axum-idempotent", Goal::AtLeast(1.2), figure);
    let figure = ratio(&executing, Stack::ActixMemory, Stack::Memory);
    report.judge("actix against axum, executing", Goal::Between(0.9, 1.1), figure);
    report.add(executing);
    let replaying = contest("HTTP in memory, replaying", &in_memory, None, Keys::Few, pace).await?;
    let figure = ratio(&replaying, Stack::Memory, Stack::Bare);
    report.judge("axum + memory, replaying, against the bare handler", Goal::AtLeast(0.9), figure);
    let figure = ratio(&replaying, Stack::Memory, Stack::PeerInMemory);
    report.judge("axum + memory, replaying, against axum-idempotent", Goal::AtLeast(1.1), figure);
    let figure = ratio(&replaying, Stack::ActixMemory, Stack::Memory);
    report.judge("actix against axum, replaying", Goal::Between(0.9, 1.1), figure);
    report.add(replaying);

    let postgres = servers::postgres()?;
    let on_postgres = [Stack::Postgres, Stack::PeerOnPostgres];
    for (name, what, keys, least) in [
        (
            "HTTP on Postgres, executing",
            "axum + Postgres against axum-idempotent + Postgres, executing",
            Keys::Fresh,
            3.0,
        ),
        (
            "HTTP on Postgres, replaying",
            "axum + Postgres against axum-idempotent + Postgres, replaying",
            Keys::Few,
            2.0,
        ),
    ] {
        let outcome = contest(name, &on_postgres, Some(&postgres), keys, pace).await?;
        report.judge(what, Goal::AtLeast(least), ratio(&outcome, Stack::Postgres, Stack::PeerOnPostgres));
        report.add(outcome);
    }
    Ok(())
}

/// The bare handler, compared with ones that compute longer, as behind a layer with no other cost.
pub(crate) async fn busy_handlers(busy: &[(&'static str, Duration)], pace: Pace) -> Result<Outcome, Error> {
    let handlers = std::iter::once((Stack::Bare.name(), Duration::ZERO)).chain(busy.iter().copied());
    let contestants = handlers.map(|(name, busy)| {
        Contestant::new(name, move |_| async move {
            let server = Server::start_with(Stack::Bare, &["--busy-ns", &busy.as_nanos().to_string()]).await?;
            let process = server.process.id().ok_or("the server has ended")?;
            wrk(Page::Pay, server.port, process, CONNECTIONS, Keys::Few, pace.turn).await
        })
    });
    hold("HTTP, at most: a bare handler that takes longer", pace.rounds, contestants.collect()).await
}

async fn contest(
    name: &str,
    stacks: &[Stack],
    postgres: Option<&Postgres>,
    keys: Keys,
    pace: Pace,
) -> Result<Outcome, Error> {
    let contestants = stacks.iter().map(|&stack| {
        // A new process for each turn, so that memory of one turn does not affect the next.
        Contestant::new(stack.name(), move |_| async move {
            let server = Server::start(stack, postgres).await?;
            if keys == Keys::Few {
                warm_up(server.port, CONNECTIONS).await?;
            }
            let process = server.process.id().ok_or("the server has ended")?;
            wrk(Page::Pay, server.port, process, CONNECTIONS, keys, pace.turn).await
        })
    });
    hold(name, pace.rounds, contestants.collect()).await
}

/// A server in a separate process, which ends with this value.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) process: Child,
    pub(crate) port: u16,
}

impl Server {
    pub(crate) async fn start(stack: Stack, postgres: Option<&Postgres>) -> Result<Self, Error> {
        match postgres {
            Some(postgres) => Self::start_with(stack, &["--database", &postgres.url()]).await,
            None => Self::start_with::<&str>(stack, &[]).await,
        }
    }

    async fn start_with<S: AsRef<std::ffi::OsStr>>(stack: Stack, options: &[S]) -> Result<Self, Error> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["serve", stack.name()]).args(options);
        Self::of(command).await.map_err(|error| format!("{}: {error}", stack.name()).into())
    }

    /// The server that `command` starts. Its first line ends with its port.
    async fn of(mut command: Command) -> Result<Self, Error> {
        let mut process = command.stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let said = process.stdout.take().ok_or("the server says nothing")?;
        let line = BufReader::new(said).lines().next_line().await?.ok_or("the server did not start")?;
        let port = line.trim().rsplit(':').next().unwrap_or_default().parse()?;
        Ok(Self { process, port })
    }
}
