//! Redis.

use idem_servers::setup::redis::command;
use testcontainers::ImageExt;

use super::ask;
use crate::Error;
use crate::container::{Container, Network};

pub(crate) const PORT: u16 = 6379;

/// Starts Redis with more settings, the last of which win, and waits until it answers.
pub(crate) async fn start(network: &Network, name: &str, image: &str, settings: &[&str]) -> Result<Container, Error> {
    let server = network.start(name, image, |request| request.with_cmd(command(settings))).await?;
    wait(&server).await?;
    Ok(server)
}

/// Waits until it answers.
pub(crate) async fn wait(server: &Container) -> Result<(), Error> {
    server.wait_until(async || ask(server, PORT, &["PING"]).await.map(drop)).await
}
