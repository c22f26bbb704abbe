//! The command line `idem`: finds, explains and repairs records of idempotent operations. `idem --help` explains it.

mod commands;
mod keys;
mod output;
mod store;

use std::error::Error;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use tracing_subscriber::EnvFilter;

#[cfg(feature = "console")]
use commands::console;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use commands::parked;
use commands::{capacity, check, erase, generate, identity, list, purge, repairs, resolve, show, stats, sweep, watch};
use store::StoreOptions;

/// Finds, explains and repairs records of idempotent operations.
#[derive(Debug, Parser)]
#[command(name = "idem", version, after_help = EXIT_CODES)]
struct Arguments {
    #[command(flatten)]
    store: StoreOptions,
    /// Prints JSON, one document for each record.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "Exit codes: 0 done; 1 the store did not answer, or an argument does not fit; 2 wrong arguments; \
    3 `check` found a weakness, or could not find something out; 4 `check` found that the store cannot be used; 5 not all was changed that was asked for, or there is no such record";

#[derive(Debug, Subcommand)]
enum Command {
    /// Makes the tables of the store, or brings them up to date. Makes the file of SQLite if it is missing.
    Migrate,
    /// Examines the store: login, schema, durability, clock, and whether it keeps its promises.
    Check,
    /// Counts all records by their state.
    Stats(stats::Options),
    /// Counts them again and again, and shows what has changed. Ctrl-C ends it.
    Watch(watch::Options),
    /// Lists records, with those that are selected only.
    List(list::Options),
    /// Shows one record and explains its state.
    Show(show::Options),
    /// Says how an operation ended that gave no answer itself.
    Resolve(resolve::Options),
    /// Lets an operation run again that took no effect: `resolve --as retryable`.
    Release(resolve::Release),
    /// Gives an operation its final answer: `resolve --as completed` or `--as failed`.
    Settle(resolve::Settle),
    /// Erases what a person left in final answers, and keeps tombstones, so that nothing runs again.
    Erase(erase::Options),
    /// Lists messages that an inbox has set aside, and replays them.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    Parked(parked::Options),
    /// Gives the records a new identity after a restore, so that Redis does not replay what the store no longer has.
    NewIdentity(identity::Options),
    /// Lists what was resolved and erased, by whom and why.
    Repairs(repairs::Options),
    /// Marks operations under AtMostOnce as unknown whose owner has crashed, without waiting for a client.
    Sweep(sweep::Options),
    /// Removes expired records.
    Purge(purge::Options),
    /// Shows records in a browser on this machine, and repairs them there.
    #[cfg(feature = "console")]
    Console(console::Options),
    /// Computes what a store needs for a rate of operations. It asks no store.
    Capacity(capacity::Options),
    /// Prints the completions of a shell.
    Completions(generate::Completions),
    /// Prints a page for man: `idem man | man -l -`.
    Man(generate::Man),
}

/// How a command ended, as an exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    Done,
    Weak,
    Unusable,
    Unchanged,
}

impl From<Ended> for ExitCode {
    fn from(ended: Ended) -> Self {
        Self::from(match ended {
            Ended::Done => 0,
            Ended::Weak => 3,
            Ended::Unusable => 4,
            Ended::Unchanged => 5,
        })
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn,idem_console=info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    // An error would say that another one was installed before.
    #[cfg(feature = "tls")]
    let _ = rustls::crypto::ring::default_provider().install_default();
    match run(Arguments::parse()).await {
        Ok(ended) => ended.into(),
        Err(error) => {
            eprintln!("idem: {}", with_causes(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: Arguments) -> Result<Ended, Box<dyn Error>> {
    let Arguments { store, json, command } = arguments;
    let (options, store) = match command {
        Command::Check => return check::run(&store, json).await,
        #[cfg(any(feature = "postgres", feature = "sqlite"))]
        Command::Parked(options) => return parked::run(&store, &options, json).await,
        Command::Capacity(options) => return capacity::run(&options, json),
        Command::Completions(options) => return generate::completions(Arguments::command(), &options),
        Command::Man(options) => return generate::man(Arguments::command(), &options),
        Command::Migrate => {
            store.migrate().await?;
            return Ok(Ended::Done);
        }
        command => (command, store.open().await?),
    };
    match options {
        Command::Check | Command::Migrate | Command::Capacity(_) | Command::Completions(_) | Command::Man(_) => {
            Ok(Ended::Done)
        }
        #[cfg(any(feature = "postgres", feature = "sqlite"))]
        Command::Parked(_) => Ok(Ended::Done),
        Command::Stats(options) => stats::run(&*store, &options, json).await,
        Command::List(options) => list::run(&*store, &options, json).await,
        Command::Show(options) => show::run(&*store, &options, json).await,
        Command::Resolve(options) => resolve::run(&*store, &options, json).await,
        Command::Release(options) => resolve::run(&*store, &options.into(), json).await,
        Command::Settle(options) => resolve::run(&*store, &options.into(), json).await,
        Command::Erase(options) => erase::run(&*store, &options, json).await,
        Command::NewIdentity(options) => identity::run(&*store, &options).await,
        Command::Watch(options) => watch::run(&*store, &options, json).await,
        Command::Repairs(options) => repairs::run(&*store, &options, json).await,
        Command::Sweep(options) => sweep::run(&*store, &options, json).await,
        Command::Purge(options) => purge::run(&*store, &options, json).await,
        #[cfg(feature = "console")]
        Command::Console(options) => console::run(store, &options).await,
    }
}

/// The message of an error and those of its causes.
fn with_causes(error: &dyn Error) -> String {
    let (mut text, mut cause) = (error.to_string(), error.source());
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}
