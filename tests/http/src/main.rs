//! Runs the suite against a running server: `cargo xtask http-suite --url http://127.0.0.1:8080`.

use std::net::{SocketAddr, ToSocketAddrs};
use std::process::ExitCode;

use clap::Parser;
use idem_http_suite::{Contract, Request, run};

/// Runs the suite against a server with the interface of the payments example.
#[derive(Debug, Parser)]
struct Options {
    /// URL of the server, such as http://127.0.0.1:8080. It must obey X-Simulate, and have the default limits.
    #[arg(long)]
    url: String,
}

fn main() -> ExitCode {
    idem_http_suite::allow_many_connections();
    match address_of(&Options::parse().url) {
        Ok(address) => judge(address),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn address_of(url: &str) -> Result<SocketAddr, String> {
    let authority = url.strip_prefix("http://").ok_or("the URL begins with http://")?;
    let authority = authority.trim_end_matches('/');
    let authority = if authority.contains(':') { authority.to_owned() } else { format!("{authority}:80") };
    let mut addresses = authority.to_socket_addrs().map_err(|error| format!("{authority}: {error}"))?;
    addresses.next().ok_or_else(|| format!("{authority} has no address"))
}

fn judge(address: SocketAddr) -> ExitCode {
    let running = Request::get("/v1/running").send(address).json();
    let named = |contract: &Contract| running["contract"] == contract.name();
    let Some(contract) = Contract::ALL.into_iter().find(named) else {
        eprintln!("error: /v1/running names no contract; is the server started with --simulate? {running}");
        return ExitCode::FAILURE;
    };
    let report = run(address, contract);
    for (case, reason) in &report.failed {
        println!("FAILED {case}: {reason}");
    }
    println!("under {}: {}", contract.name(), report.score());
    if report.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
