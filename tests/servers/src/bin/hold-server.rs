//! Starts a server, prints its URL, and waits to be killed: what the tests of a killed parent kill.

use std::io::Write;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let postgres = idem_servers::Postgres::start_with(&["fsync=off"])?;
    println!("{}", postgres.url());
    std::io::stdout().flush()?;
    loop {
        std::thread::park();
    }
}
