//! Postgres.

use idem_servers::setup::postgres::{ENVIRONMENT, IS_READY};
use testcontainers::ImageExt;

use crate::Error;
use crate::container::{Container, Network};

/// Syncing is off: it protects from a loss of power, which no suite tests, and would take most of the time.
const COMMAND: [&str; 5] = ["postgres", "-c", "fsync=off", "-c", "max_connections=200"];

/// Starts Postgres, and waits until it accepts connections.
pub(crate) async fn start(network: &Network, name: &str, image: &str) -> Result<Container, Error> {
    let server =
        network.start(name, image, |request| request.with_env_var(ENVIRONMENT.0, ENVIRONMENT.1).with_cmd(COMMAND));
    let server = server.await?;
    wait(&server).await?;
    Ok(server)
}

/// Waits until it accepts connections.
pub(crate) async fn wait(server: &Container) -> Result<(), Error> {
    server.wait_until(async || server.execute(&IS_READY).await).await
}
