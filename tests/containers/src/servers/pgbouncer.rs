//! PgBouncer in front of Postgres, in transaction mode.

use idem_servers::setup::pgbouncer::configuration;
use testcontainers::ImageExt;

use crate::Error;
use crate::container::{Container, Network};

pub(crate) const PORT: u16 = 5432;

/// The file that the images of PgBouncer use instead of generated settings.
const SETTINGS: &str = "/etc/pgbouncer/pgbouncer.ini";

/// Starts PgBouncer with `pool_size` connections to each database, and waits until it accepts connections.
pub(crate) async fn start(
    network: &Network,
    name: &str,
    image: &str,
    postgres: &str,
    pool_size: u16,
) -> Result<Container, Error> {
    let databases = format!("* = host={postgres} port=5432 user=postgres");
    let settings = configuration(&databases, ("*", PORT), pool_size, &[]);
    let server = network.start(name, image, |request| request.with_copy_to(SETTINGS, settings.into_bytes())).await?;
    server.wait_until_it_listens(PORT).await?;
    Ok(server)
}
