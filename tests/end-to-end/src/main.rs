//! Payments from end to end: clients with journals, services on axum and on actix, and a worker. Relays and consumers are those
//! of `tests/messages`.
//!
//! Each role is a process of its own, which the fault runs kill. Kill any of them anywhere and start it again.

mod client;
mod on_actix;
mod on_axum;
mod service;

use std::error::Error;

use clap::{Parser, ValueEnum};

type AnyError = Box<dyn Error + Send + Sync>;

#[derive(Debug, Clone, Parser)]
struct Config {
    #[arg(long, value_enum)]
    role: Role,
    /// How long a lease lasts, in milliseconds.
    #[arg(long, default_value_t = 2000)]
    lease_ms: u64,
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: String,
    /// The cache of services and workers.
    #[arg(long, default_value = "")]
    redis: String,
    /// The database of services and workers. Clients do not use it.
    #[arg(long)]
    postgres: String,
    #[command(flatten)]
    client: client::Options,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Role {
    Axum,
    Actix,
    Worker,
    Client,
}

fn main() -> Result<(), AnyError> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let config = Config::parse();
    // Both frameworks run on it: actix starts its own workers.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        match config.role {
            Role::Axum => on_axum::serve(&config, service::Service::open(&config).await?).await,
            Role::Actix => on_actix::serve(&config, service::Service::open(&config).await?).await,
            Role::Worker => service::Service::open(&config).await?.work().await,
            Role::Client => client::run(&config.client).await,
        }
    })
}
