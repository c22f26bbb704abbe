//! Redis.

use testcontainers::ImageExt;

use super::ask;
use crate::Error;
use crate::container::{Container, Network};

pub(crate) const PORT: u16 = 6379;

/// Nothing is written to the disk, and nothing is thrown away. Only this machine and containers beside it reach its port.
const COMMAND: [&str; 9] =
    ["redis-server", "--protected-mode", "no", "--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"];

/// Starts one with more settings, the last of which win, and waits until it answers.
pub(crate) async fn start(network: &Network, name: &str, image: &str, settings: &[&str]) -> Result<Container, Error> {
    let command = COMMAND.iter().chain(settings).copied();
    let server = network.start(name, image, |request| request.with_cmd(command)).await?;
    wait(&server).await?;
    Ok(server)
}

/// Waits until it answers.
pub(crate) async fn wait(server: &Container) -> Result<(), Error> {
    server.wait_until(async || ask(server, PORT, &["PING"]).await.map(drop)).await
}
