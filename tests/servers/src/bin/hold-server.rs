//! Starts a server, prints its URL, and waits to be killed: what the tests of a killed parent kill.

use std::io::Write;

use idem_servers::{Postgres, Redis};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    match std::env::args().nth(1).as_deref() {
        Some("postgres") => {
            let postgres = Postgres::start_with(&["fsync=off"])?;
            hold(&postgres.url(), postgres)
        }
        Some("redis") => {
            let redis = Redis::start()?;
            hold(&redis.url(), redis)
        }
        _ => Err("which server? postgres or redis".into()),
    }
}

fn hold<T>(url: &str, _server: T) -> Result<(), Box<dyn std::error::Error>> {
    println!("{url}");
    std::io::stdout().flush()?;
    loop {
        std::thread::park();
    }
}
