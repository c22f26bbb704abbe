//! Postgres.

use testcontainers::ImageExt;

use crate::Error;
use crate::container::{Container, Network};

/// What syncing to the disk protects from is a loss of power, which no suite has; it takes most of their time.
const COMMAND: [&str; 5] = ["postgres", "-c", "fsync=off", "-c", "max_connections=200"];

/// Starts one, and waits until it accepts connections.
pub(crate) async fn start(network: &Network, name: &str, image: &str) -> Result<Container, Error> {
    let server = network
        .start(name, image, |request| request.with_env_var("POSTGRES_HOST_AUTH_METHOD", "trust").with_cmd(COMMAND));
    let server = server.await?;
    wait(&server).await?;
    Ok(server)
}

/// Waits until it accepts connections: over TCP, as the image initialises its data with a server that has only a socket.
pub(crate) async fn wait(server: &Container) -> Result<(), Error> {
    let question = ["pg_isready", "--host=127.0.0.1", "--username=postgres"];
    server.wait_until(async || server.execute(&question).await).await
}
