//! Chooses the images.

use std::time::Duration;

use idem_servers::setup::{postgres, redis};

use crate::Error;
use crate::docker::docker;

/// A kind of server, and its images.
struct Kind {
    name: &'static str,
    /// The environment variable that names another image, which takes precedence.
    variable: &'static str,
    official: &'static str,
    /// The image that `cargo xtask images` makes, without its tag.
    own: &'static str,
}

const POSTGRES: Kind =
    Kind { name: "Postgres", variable: postgres::IMAGE_VARIABLE, official: postgres::IMAGE, own: "idem-test/postgres" };
const REDIS: Kind = Kind {
    name: "Redis, Sentinels and Cluster",
    variable: redis::IMAGE_VARIABLE,
    official: redis::IMAGE,
    own: "idem-test/redis",
};
const PGBOUNCER: Kind = Kind {
    name: "PgBouncer",
    variable: "IDEM_PGBOUNCER_IMAGE",
    official: "edoburu/pgbouncer:v1.24.1-p1",
    own: "idem-test/pgbouncer",
};
const PAYMENTS: Kind = Kind {
    name: "the example",
    variable: "IDEM_PAYMENTS_IMAGE",
    official: "idem-test/payments:latest",
    own: "idem-test/payments",
};

/// The time limit for pulling an image. Without a network, Docker can wait for minutes.
const PULL: Duration = Duration::from_secs(300);

/// The images of a run.
#[derive(Debug)]
pub(crate) struct Images {
    pub(crate) postgres: String,
    pub(crate) redis: String,
    pub(crate) pgbouncer: String,
    pub(crate) payments: String,
}

impl Images {
    /// Finds or pulls the images, and prints them. If a release of Debian is named, the servers are those of that release.
    pub(crate) async fn choose(release: Option<&str>) -> Result<Self, Error> {
        Ok(Self {
            postgres: POSTGRES.choose(release).await?,
            redis: REDIS.choose(release).await?,
            pgbouncer: PGBOUNCER.choose(release).await?,
            payments: PAYMENTS.choose(None).await?,
        })
    }
}

impl Kind {
    async fn choose(&self, release: Option<&str>) -> Result<String, Error> {
        let (image, reason) = self.find(release).await?;
        println!("{}: image {image} ({reason})", self.name);
        Ok(image)
    }

    /// The image that the environment names, else the locally built one, else the official one.
    async fn find(&self, release: Option<&str>) -> Result<(String, &'static str), Error> {
        let advice = |error: Error| format!("{error}; run `cargo xtask images`, or name another by {}", self.variable);
        if let Ok(named) = std::env::var(self.variable) {
            provide(&named).await.map_err(|error| format!("{}: {error}", self.variable))?;
            return Ok((named, self.variable));
        }
        let own = format!("{}:{}", self.own, release.unwrap_or("latest"));
        if is_there(&own).await {
            return Ok((own, "made by `cargo xtask images`"));
        }
        // Another version does not replace the requested release.
        if let Some(release) = release {
            return Err(format!("there is no image {own}; run `cargo xtask images --release {release}`").into());
        }
        provide(self.official).await.map_err(advice)?;
        Ok((self.official.into(), "official"))
    }
}

/// Pulls an image unless it is on this machine.
async fn provide(image: &str) -> Result<(), Error> {
    if is_there(image).await {
        return Ok(());
    }
    println!("{image}: not on this machine, so it is pulled");
    match tokio::time::timeout(PULL, docker(&["pull", "--quiet", image])).await {
        Ok(pulled) => pulled.map(drop),
        Err(_) => Err(format!("Docker did not get the image {image} within {} s", PULL.as_secs()).into()),
    }
}

async fn is_there(image: &str) -> bool {
    docker(&["image", "inspect", image]).await.is_ok()
}
